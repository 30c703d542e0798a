"""A text with what was kept of it: kept words dark, forgotten ones pale, as a page or a picture."""
# N tokens that were read

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from locret.base.files import write_text, written_whole
from locret.conversation.turns import Transcript
from locret.pictures import require_matplotlib

ENDINGS = (".html", ".png")
_PALEST, _DARK, _COLUMNS, _MOST_LINES = 0.12, 0.95, 110, 400
_SIZE, _LINE, _MARGIN = 6.6, 0.12, 0.25
"""Of a letter, in points; of a line and the margins, in inches."""
_LETTER = 0.602 * _SIZE / 72
"""Width of a letter of the font, in inches."""
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>body {{ font: 15px/1.5 Georgia, serif; max-width: 46em; margin: 2em auto; padding: 0 1em; white-space: pre-wrap
}} h1 {{ font-size: 1.2em }} p {{ color: #555 }}</style>
<h1>{title}</h1><p>{note}</p><main>{body}</main></html>
"""

Marked = list[tuple[str, float]]
"""The pieces of a text, each with how dark it is, 0 to 1."""


def marked(text: str, share_N: Tensor, tokenizer: Any, template: str, system: str | None = None) -> Marked:
    """Return a text's pieces with the share of KV heads that hold each, of the share of the piece that most hold.

    Args:
        text: What was read.
        share_N: What `locret.infer.kept_text.share_of_heads` returned.
        tokenizer: The backbone's, a fast one.
        template: How the text was put into a turn.
        system: The system message in front of it.

    Raises:
        ValueError: If it is another text than the one that was read.
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
    """Write a page or a picture, by the ending of the file's name, one of `ENDINGS`.

    Raises:
        ValueError: For another ending, or a picture without matplotlib.
        OSError: If it cannot be written.
    """
    ending = Path(file).suffix.lower()
    if ending not in ENDINGS:
        raise ValueError(f"{file} has another ending than {' and '.join(ENDINGS)}; rename it")
    if ending == ".png":
        return _picture(file, pieces, title, note)
    spans = (f'<span style="opacity:{_darkness(share):.2f}">{html.escape(piece)}</span>' for piece, share in pieces)
    page = _PAGE.format(title=html.escape(title), note=html.escape(note), body="".join(spans))
    write_text(file, page, parents=True)


def _darkness(share: float) -> float:
    return _PALEST + (1 - _PALEST) * share


def _lines(pieces: Marked) -> list[list[tuple[int, str, float]]]:
    """Return lines of (column, piece, share), broken where the text is and where a line is full."""
    lines: list[list[tuple[int, str, float]]] = [[]]
    column = 0
    for piece, share in pieces:
        for nth, part in enumerate(piece.split("\n")):
            if nth or column + len(part) > _COLUMNS:
                lines.append([])
                column = 0
            if part:
                lines[-1].append((column, part, share))
                column += len(part)
    return lines


def _picture(file: str | Path, pieces: Marked, title: str, note: str) -> None:
    require_matplotlib(str(file))
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines: Sequence[Any] = [line for line in _lines(pieces) if line][:_MOST_LINES]
    width, height = 2 * _MARGIN + _COLUMNS * _LETTER, _LINE * (len(lines) + 6)
    figure = Figure(figsize=(width, height), facecolor="white")
    left = _MARGIN / width
    figure.text(left, 1 - 0.2 / height, title, fontsize=10, va="top", weight="bold")
    figure.text(left, 1 - 0.42 / height, note, fontsize=7, va="top", color="#555555")
    for number, line in enumerate(lines):
        for column, piece, share in line:
            place = ((_MARGIN + column * _LETTER) / width, 1 - _LINE * (number + 6) / height)
            shade = f"{1 - _darkness(share):.3f}"
            font: dict[str, Any] = {"fontsize": _SIZE, "family": "DejaVu Sans Mono", "color": shade}
            figure.text(*place, piece.replace("$", r"\$"), **font)
    with written_whole(Path(file), parents=True) as fresh:
        FigureCanvasAgg(figure).print_figure(str(fresh), dpi=130, format="png")
