"""Tables in Markdown, for files and terminals alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown(heads: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: bool = True) -> list[str]:
    """Return the lines of a table; all columns but the first are aligned right if they hold `numbers`."""
    marks = ["---", *["---:" if numbers else "---"] * (len(heads) - 1)]
    return ["| " + " | ".join(map(_cell, cells)) + " |" for cells in (heads, marks, *rows)]


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
