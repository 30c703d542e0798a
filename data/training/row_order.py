"""In which order an epoch reads its rows: a permutation of all, or, where rows only stream by, a shuffle buffer.

An order is a function of seed and epoch alone, so a run that is resumed needs only the number of rows it has read. The
shuffle buffer of `datasets` is lost when its state is restored; ours is filled again from the epoch's first row, which
reads, but does not tokenise, the rows before.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Union

from locret.data.training.json_rows import BadRow, Entry, JsonRows

if TYPE_CHECKING:
    from datasets import Dataset

SHUFFLE_BUFFER = 1000
"""Streamed rows among which the next one is drawn: some 50 MB of long rows from the Hub, nothing of local JSON."""
_SCHEMA_ROWS = 100
"""Rows whose keys together are the columns of a data set that does not list them."""


@dataclass(frozen=True)
class StreamedRows:
    """Rows that can only be read from the first on."""

    begin: Callable[[], Iterator[Entry]]


Rows = Union["Dataset", Sequence[Mapping[str, Any]], StreamedRows]


class RowOrder(ABC):
    """The rows of a data set in the order of an epoch."""

    size: int | None
    """Number of rows, where it is known."""

    @abstractmethod
    def epoch(self, number: int, start: int = 0) -> Iterator[Entry]:
        """Yield the rows of an epoch, from its row `start` on."""

    @abstractmethod
    def in_file_order(self) -> Iterator[Entry]:
        """Yield all rows as they stand in the data set."""

    @abstractmethod
    def last_first(self) -> Iterator[Entry]:
        """Yield the rows in the order in which they are set aside: those first that training meets last."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return the settings that decide the order; plain JSON types."""

    def columns(self) -> list[str]:
        """Return the names of the columns.

        Raises:
            BadRow: If no row among the first can be read.
        """
        found: dict[str, None] = {}
        problem = None
        for entry in islice(self.in_file_order(), _SCHEMA_ROWS):
            try:
                found.update(dict.fromkeys(entry.load()))
            except BadRow as error:
                problem = problem or error
        if problem is not None and not found:
            raise problem
        return list(found)


class Permuted(RowOrder):
    """A seeded permutation of all rows, another one in every epoch."""

    def __init__(self, rows: Dataset | Sequence[Mapping[str, Any]], seed: int) -> None:
        self._rows, self._seed, self.size = rows, seed, len(rows)

    def epoch(self, number: int, start: int = 0) -> Iterator[Entry]:
        """Yield the rows of an epoch, from its row `start` on."""
        return map(self._entry, self._order(number)[start:])

    def in_file_order(self) -> Iterator[Entry]:
        """Yield all rows as they stand in the data set."""
        return map(self._entry, range(len(self._rows)))

    def last_first(self) -> Iterator[Entry]:
        """Yield the rows of the first epoch from its last one on."""
        return map(self._entry, reversed(self._order(0)))

    def identity(self) -> dict[str, Any]:
        """Return the settings that decide the order."""
        return {"rows": self.size, "seed": self._seed}

    def columns(self) -> list[str]:
        """Return the names of the columns."""
        listed = getattr(self._rows, "column_names", None)  # a table lists them; records in Python do not
        return super().columns() if listed is None else list(listed)

    def _order(self, epoch: int) -> list[int]:
        order = list(range(len(self._rows)))
        _random(self._seed, epoch).shuffle(order)
        return order

    def _entry(self, index: int) -> Entry:
        if isinstance(self._rows, JsonRows):
            return self._rows.entry(index)
        return Entry(index, numbered(index), lambda: self._load(index))

    def _load(self, index: int) -> Mapping[str, Any]:
        try:
            return self._rows[index]
        except UnicodeDecodeError as error:  # Arrow stores text without checking it
            raise BadRow(numbered(index), "invalid UTF-8", f"holds text that is not UTF-8 ({error.reason})") from None


class Buffered(RowOrder):
    """Rows drawn at random from a buffer that streams through the data set."""

    size = None

    def __init__(self, rows: StreamedRows, seed: int, shuffle_buffer: int) -> None:
        self._rows, self._seed, self._shuffle_buffer = rows, seed, shuffle_buffer

    def epoch(self, number: int, start: int = 0) -> Iterator[Entry]:
        """Yield the rows of an epoch, from its row `start` on; those before are passed over."""
        return islice(self._shuffled(number), start, None)

    def in_file_order(self) -> Iterator[Entry]:
        """Yield all rows as they stand in the data set."""
        return self._rows.begin()

    def last_first(self) -> Iterator[Entry]:
        """Yield all rows as they stand in the data set: what comes last is not known."""
        return self._rows.begin()

    def identity(self) -> dict[str, Any]:
        """Return the settings that decide the order."""
        return {"rows": "streamed", "seed": self._seed, "shuffle_buffer": self._shuffle_buffer}

    def _shuffled(self, epoch: int) -> Iterator[Entry]:
        drawn, buffer = _random(self._seed, epoch), list[Entry]()
        for entry in self._rows.begin():
            if len(buffer) < self._shuffle_buffer:
                buffer.append(entry)
                continue
            slot = drawn.randrange(len(buffer))
            yield buffer[slot]
            buffer[slot] = entry
        drawn.shuffle(buffer)
        yield from buffer


def order_of(rows: Rows, *, seed: int, shuffle_buffer: int) -> RowOrder:
    """Return the order in which rows are read."""
    return Buffered(rows, seed, shuffle_buffer) if isinstance(rows, StreamedRows) else Permuted(rows, seed)


def numbered(index: int) -> str:
    """Return what names a row that stands on no line."""
    return f"row {index} (counted from 0)"


def _random(seed: int, epoch: int) -> random.Random:
    # Seeding by text is hashed with SHA-512: the same on every platform, and epochs of near seeds do not coincide.
    return random.Random(f"{seed}:{epoch}")
