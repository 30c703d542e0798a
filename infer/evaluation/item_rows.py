"""The items of a published task that an evaluation asks, read one at a time."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from locret.data.tasks.published import Item
from locret.data.tasks.published.generated import GeneratedTask
from locret.data.tasks.published.loading import TaskRows

_LONG = 100_000
"""Tokens from which rows are filled to about their length only: where the search begins then matters."""


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

    def size(self) -> tuple[int | None, bool]:
        """Return the items of the whole set, None if unknown, and that they were not made for the run."""
        published = self.rows.task.size
        # Some files have more items than their papers count.
        return (None if published is None else max(published, self.count)), False

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


@dataclass
class GeneratedRows:
    """Rows that a task makes for the run, of one length."""

    task: GeneratedTask
    tokens: int
    """Of prompt and answer; 0 for the published sizes."""
    samples: int
    seed: int
    source: Path | None
    """Where essays and question sets lie."""
    _make: Callable[[int], dict[str, Any]] | None = field(init=False, default=None, repr=False)
    _last: tuple[int, Item | None] = field(init=False, default=(-1, None), repr=False)

    @property
    def chosen(self) -> list[int]:
        """Numbers of the rows."""
        return list(range(self.samples))

    def item(self, row: int, tokenizer: Any) -> Item:
        """Return an item, which depends on its number, the seed and the length alone.

        Raises:
            ValueError: If the length cannot hold it, or a source text is missing.
        """
        if self._last[0] != row or self._last[1] is None:
            if self._make is None or self.tokens > _LONG:
                self._make = self.task.maker(
                    tokenizer, self.tokens or None, samples=self.samples, seed=self.seed, data_dir=self.source
                )
            (found,) = self.task.read(row, f"{self.task.name}:{row}", self._make(row))
            self._last = (row, found)
        return self._last[1]  # type: ignore[return-value]

    def size(self) -> tuple[int | None, bool]:
        """Return that there is no whole set, and that the rows were made for the run."""
        return None, True

    def facts(self) -> dict[str, Any]:
        """Return what tells these data from others."""
        return {"generated": True, "seed": self.seed, "source": None if self.source is None else self.source.name}


def source_of(task: GeneratedTask, tokenizer: Any, tokens: int, folders: Sequence[str] | None) -> Path | None:
    """Return the folder that has the texts a task is made from; None if it needs none, or makes do with its own.

    Raises:
        ValueError: If none of the folders has them, or the length cannot hold a row.
    """
    options: list[Path | None] = [None] if folders is None else [Path(folder).expanduser() for folder in folders]
    for option in options:
        try:
            task.maker(tokenizer, tokens or None, samples=1, seed=0, data_dir=option)
            return option
        except ValueError:
            if option is options[-1]:
                raise
    raise AssertionError("there is at least one option")
