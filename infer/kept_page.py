"""Which parts of a text stayed: a line of bars per layer, what stayed of each message, and the text drawn."""
# N tokens that were read

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from locret.base.files import write_text
from locret.conversation.protect import KeptTurn, as_table
from locret.conversation.turns import Transcript
from locret.pictures import Retention, as_lines

_PALEST, _DARK = 0.12, 0.95
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>body {{ font: 15px/1.5 Georgia, serif; max-width: 46em; margin: 2em auto; padding: 0 1em; white-space: pre-wrap
}} h1 {{ font-size: 1.2em }} p {{ color: #555 }}</style>
<h1>{title}</h1><p>{note}</p><main>{body}</main></html>
"""

Marked = list[tuple[str, float]]
"""The pieces of a text, each with how dark it is, 0 to 1."""


def as_text(retention: Retention, turns: Sequence[KeptTurn] | None) -> str:
    """Return what was kept, as people read it at a terminal; `turns` says what stayed of each message."""
    lines = ["kept by each layer, from the beginning of the text to its end", *as_lines(retention)]
    if turns is not None:
        lines += ["", "units per KV head that stayed of each message", as_table(turns)]
    return "\n".join(lines)


def share_of_heads(retention: Retention) -> Tensor:
    """Return (N,) which share of all KV heads holds the unit of each token."""
    heads = [one[one >= 0].cpu() for layer in retention.kept.values() for one in layer]
    counts = sum(torch.bincount(one, minlength=retention.prompt_tokens)[: retention.prompt_tokens] for one in heads)
    return torch.as_tensor(counts).float() / len(heads)


def marked(text: str, share_N: Tensor, tokenizer: Any, template: str, system: str | None = None) -> Marked:
    """Return a text's pieces with the share of KV heads that hold each, of the share of the piece that most hold.

    `share_N` is what `share_of_heads` returned; the tokenizer is a fast one.
    """
    opening, own = Transcript(tokenizer, template, system).opening(), text.strip()
    found = tokenizer(opening + own, add_special_tokens=template != "chat", return_offsets_mapping=True, verbose=False)[
        "offset_mapping"
    ]
    read = len(share_N)
    if not 0 <= len(found) - read <= 64:  # the last few words wait for the question
        raise ValueError(
            f"the text has {len(found):,} tokens and {read:,} were read, so it is another one; give that one"
        )
    darkest = float(share_N.quantile(_DARK)) or 1.0  # a few tokens that all heads hold would leave the rest pale
    pieces: Marked = []
    place = len(opening)
    for (_, end), share in zip(found, [*share_N.tolist(), *[darkest] * (len(found) - read)], strict=True):
        if end > place:
            pieces.append(((opening + own)[place:end], min(1.0, share / darkest)))
            place = end
    return pieces


def write(file: str | Path, pieces: Marked, title: str, note: str) -> None:
    """Write a page."""
    dark = ((piece, _PALEST + (1 - _PALEST) * share) for piece, share in pieces)
    spans = (f'<span style="opacity:{share:.2f}">{html.escape(piece)}</span>' for piece, share in dark)
    page = _PAGE.format(title=html.escape(title), note=html.escape(note), body="".join(spans))
    write_text(file, page, parents=True)
