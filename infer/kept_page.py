"""Which parts of a text stayed: a line of bars per layer, what stayed of each message, and the text drawn."""
# N tokens that were read

from __future__ import annotations

import html
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from locret.base.files import write_text, written_whole
from locret.base.plugins import install
from locret.conversation.protect import KeptTurn
from locret.conversation.turns import Transcript
from locret.pictures import Retention, as_lines

_PALEST, _DARK = 0.12, 0.95
_COLUMNS, _MOST_LINES, _SIZE = 110, 400, 6.6
"""Of a picture: letters in a line, lines, and the size of a letter in points."""
_LETTER, _LINE = 0.602 * _SIZE / 72, 0.12
"""Width of a letter of the font and height of a line, in inches."""
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
        lines += ["", "units per KV head that stayed of each message"]
        lines += [f"{'':>4}{'message':<11}{'tokens':>10}{'units':>9}{'least':>7}  protected"]
        for nth, one in enumerate(turns):
            numbers = f"{one.tokens:>10,}{one.units:>9,.1f}{one.least:>7,}"
            lines.append(f"{nth:>3} {one.role:<11}{numbers}  {one.protected or '-'}")
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
    """Write a page or a picture, by the ending of the file's name, .html or .png."""
    ending = Path(file).suffix.lower()
    if ending not in (".html", ".png"):
        raise ValueError(f"{file} has another ending than .html and .png; rename it")
    dark = [(piece, _PALEST + (1 - _PALEST) * share) for piece, share in pieces]
    if ending == ".png":
        return _picture(file, dark, title, note)
    spans = (f'<span style="opacity:{share:.2f}">{html.escape(piece)}</span>' for piece, share in dark)
    page = _PAGE.format(title=html.escape(title), note=html.escape(note), body="".join(spans))
    write_text(file, page, parents=True)


def _picture(file: str | Path, dark: Marked, title: str, note: str) -> None:
    if find_spec("matplotlib") is None:
        raise ValueError(f"{file} needs matplotlib; {install('eval')}, or write .html")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines: list[list[tuple[int, str, float]]] = [[]]
    column = 0
    for piece, share in dark:
        for nth, part in enumerate(piece.split("\n")):
            if nth or column + len(part) > _COLUMNS:
                lines.append([])
                column = 0
            if part:
                lines[-1].append((column, part, share))
                column += len(part)
    shown = [line for line in lines if line][:_MOST_LINES]
    width, height = _COLUMNS * _LETTER + 0.5, _LINE * (len(shown) + 6)
    figure = Figure(figsize=(width, height), facecolor="white")
    figure.text(0.25 / width, 1 - 0.2 / height, title, fontsize=10, va="top", weight="bold")
    figure.text(0.25 / width, 1 - 0.42 / height, note, fontsize=7, va="top", color="#555555")
    for number, line in enumerate(shown):
        for column, piece, share in line:
            place = ((0.25 + column * _LETTER) / width, 1 - _LINE * (number + 6) / height)
            text, grey = piece.replace("$", r"\$"), f"{1 - share:.3f}"
            figure.text(*place, text, fontsize=_SIZE, family="DejaVu Sans Mono", color=grey)
    with written_whole(Path(file), parents=True) as fresh:
        FigureCanvasAgg(figure).print_figure(str(fresh), dpi=130, format="png")
