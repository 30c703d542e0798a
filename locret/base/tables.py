"""Tables in Markdown, for files and terminals alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

UNKNOWN = "unknown"
Row = Mapping[str, Any]
Columns = Mapping[str, Callable[[Row], str]]
"""What is written of a row, by the title of the column."""


def markdown(heads: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: bool = True) -> list[str]:
    """Return the lines of a table; all columns but the first are aligned right if they hold `numbers`."""
    marks = ["---", *["---:" if numbers else "---"] * (len(heads) - 1)]
    written = ([str(one).replace("|", "\\|").replace("\n", " ") for one in cells] for cells in (heads, marks, *rows))
    return [f"| {' | '.join(cells)} |" for cells in written]


def of_rows(columns: Columns, rows: Iterable[Row]) -> list[str]:
    """Return the lines of a table with a line for every row, whose cells are what each column writes of it."""
    return markdown(list(columns), ([write(row) for write in columns.values()] for row in rows))


def number(path: str, form: str, unit: float = 1) -> Callable[[Row], str]:
    """Return what writes the number at a path such as `peak_bytes.cache`, in units; "unknown" where there is none."""

    def write(row: Row) -> str:
        value: Any = row
        for name in path.split("."):
            value = None if value is None else value.get(name)
        return UNKNOWN if value is None else format(value if unit == 1 else value / unit, form)

    return write
