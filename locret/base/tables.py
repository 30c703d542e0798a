"""Tables in Markdown, for files and terminals alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown(heads: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: bool = True) -> list[str]:
    """Return the lines of a table; all columns but the first are aligned right if they hold `numbers`."""
    marks = ["---", *["---:" if numbers else "---"] * (len(heads) - 1)]
    written = ([str(one).replace("|", "\\|").replace("\n", " ") for one in cells] for cells in (heads, marks, *rows))
    return [f"| {' | '.join(cells)} |" for cells in written]
