"""The items of a published task that an evaluation asks, read one at a time."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from locret.data.benchmarks import Item
from locret.data.benchmarks.loading import TaskRows


@dataclass
class FileRows:
    """The items of a file that are asked: all of them, or so many, evenly spread over the file."""

    rows: TaskRows
    samples: int | None
    count: int = field(init=False)
    """Items that the file has."""
    prompts_sha256: str = field(init=False)
    """Of the asked items' prompts before truncation and template."""
    skipped: dict[str, int] = field(init=False)
    """Bad rows that were left out, by reason."""
    _ahead: Iterator[tuple[int, Item]] = field(init=False, repr=False)
    _last: tuple[int, Item | None] = field(init=False, default=(-1, None), repr=False)

    def __post_init__(self) -> None:
        digests = [_digest(item) for item in self.rows.items()]
        self.count = len(digests)
        if not digests:
            raise ValueError(
                f"{self.rows.origin} holds no row that {self.rows.task.name} could ask; check that it is the right file"
            )
        self.prompts_sha256 = hashlib.sha256(b"".join(digests[row] for row in self.chosen)).hexdigest()
        self.skipped = self.rows.skipped_by_reason()
        if self.skipped:
            reasons = ", ".join(f"{reason}: {n}" for reason, n in self.skipped.items())
            warnings.warn(
                f"{self.rows.task.name}: {len(self.rows.skipped)} bad rows are left out ({reasons}); the first is "
                f"{self.rows.skipped[0].place}",
                stacklevel=2,
            )
        self._rewind()

    @cached_property
    def chosen(self) -> list[int]:
        """Positions of the asked items, ascending."""
        asked = self.count if self.samples is None else min(self.samples, self.count)
        return [index * self.count // asked for index in range(asked)]

    def item(self, row: int, tokenizer: Any) -> Item:
        """Return the item at a position; going forward reads the file once, going back starts again."""
        if row < self._last[0]:
            self._rewind()
        while self._last[0] < row:
            self._last = next(self._ahead)
        found = self._last[1]
        assert found is not None
        return found

    def _rewind(self) -> None:
        self._ahead, self._last = enumerate(self.rows.items()), (-1, None)

    def facts(self) -> dict[str, Any]:
        """Return what tells these data from others."""
        rows = self.rows
        return {
            "file": rows.origin if rows.revision else Path(rows.path).name,
            "revision": rows.revision,
            "sha256": rows.sha256(),
            "items": self.count,
            "skipped_rows": self.skipped,
            "prompts_sha256": self.prompts_sha256,
        }


def _digest(item: Item) -> bytes:
    return hashlib.sha256("\0".join((item.system, item.content, item.lead)).encode()).digest()
