"""Rows of local JSON files, found by one scan and read when asked for, each with the file and line where it begins.

A row that cannot be read stops nothing but itself: it keeps its number, and says what is wrong when it is loaded.
Memory holds where rows lie (32 bytes a row), never the rows.
"""

from __future__ import annotations

import json
import mmap
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, overload

SUFFIXES = (".json", ".jsonl")
_STRUCTURE = re.compile(rb'["\[\]{},]')


class UnreadableRow(ValueError):
    """A row that cannot be read at all; `reason` is a few words that a count of dropped rows is kept under."""

    def __init__(self, reason: str, detail: str):
        super().__init__(detail)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Entry:
    """One row that has not been read yet."""

    number: int
    """Its index in the data set, from 0."""
    place: str
    """Where it stands: "rows.jsonl:17 (row 16 from 0)", or "row 16 (counted from 0)" where there are no lines."""
    load: Callable[[], Mapping[str, Any]]
    """Reads it; raises UnreadableRow."""


class Span(NamedTuple):
    """Where a row lies: bytes `start` to `end` of the file, beginning on `line`, counted from 1."""

    start: int
    end: int
    line: int


class JsonRows(Sequence[Mapping[str, Any]]):
    """Rows of JSON files: a list of objects, or one object a line.

    Args:
        files: Paths, in order.
        max_row_bytes: Longer rows are unreadable.

    Raises:
        ValueError: If a file is empty.
        OSError: If one cannot be read.
    """

    def __init__(self, files: Sequence[str | Path], *, max_row_bytes: int) -> None:
        self._files, self._max_row_bytes = [str(file) for file in files], max_row_bytes
        self._numbers, self._starts, self._ends, self._lines = (array("q") for _ in range(4))
        for number, file in enumerate(self._files):
            for start, end, line in spans(file):
                self._numbers.append(number)
                self._starts.append(start)
                self._ends.append(end)
                self._lines.append(line)
        self._selected: Sequence[int] = range(len(self._starts))

    def select(self, indices: Sequence[int]) -> JsonRows:
        """Return some of the rows; the index is shared."""
        chosen = object.__new__(JsonRows)
        chosen.__dict__.update(self.__dict__)
        chosen._selected = [self._selected[index] for index in indices]
        return chosen

    def __len__(self) -> int:
        return len(self._selected)

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Mapping[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> Mapping[str, Any] | Sequence[Mapping[str, Any]]:
        """Read a row; raises UnreadableRow if it cannot be."""
        if isinstance(index, slice):
            return self.select(range(len(self))[index])
        return self.entry(index).load()

    def entry(self, index: int) -> Entry:
        """Return a row with its place, without reading it."""
        row = self._selected[index]
        span = Span(self._starts[row], self._ends[row], self._lines[row])
        return _entry(index, self._files[self._numbers[row]], span, self._max_row_bytes)


def stream_entries(files: Sequence[str | Path], *, max_row_bytes: int) -> Iterator[Entry]:
    """Yield the rows of files one after the other, with no index of them; errors as those of `JsonRows`."""
    found = ((str(file), span) for file in files for span in spans(str(file)))
    for number, (file, span) in enumerate(found):
        yield _entry(number, file, span, max_row_bytes)


def spans(file: str) -> Iterator[Span]:
    """Yield where the rows of a file lie, in bounded memory: the elements of a list, or lines that are not blank.

    Raises:
        ValueError: If there is none.
        OSError: If the file cannot be read.
    """
    try:
        with open(file, "rb") as stream:
            if not stream.read(4096).strip(b"\xef\xbb\xbf \t\r\n[]"):
                stream.seek(0)
                if not stream.read().strip(b"\xef\xbb\xbf \t\r\n[]"):
                    raise ValueError(f"{file} is empty; it needs at least one row")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
                start = 3 if content[:3] == b"\xef\xbb\xbf" else 0
                first = re.compile(rb"\S").search(content, start)
                is_list = not file.endswith(".jsonl") and first is not None and first.group() == b"["
                yield from _elements(content, first.start() + 1) if is_list and first else _filled_lines(content, start)
    except OSError as error:
        raise OSError(f"{file} cannot be read ({error.strerror or error}); check its permissions") from None


def _filled_lines(content: mmap.mmap, start: int) -> Iterator[Span]:
    size, line = len(content), 0
    while start < size:
        line += 1
        newline = content.find(b"\n", start)
        end = size if newline < 0 else newline
        if content[start : start + 64].split(b"\n")[0].strip() or content[start:end].strip():
            yield Span(start, end, line)
        start = end + 1


def _elements(content: mmap.mmap, start: int) -> Iterator[Span]:
    """Cut a list at the commas that lie in none of its elements; what lies between may be anything."""
    depth, line, counted, size = 0, 1, 0, len(content)

    def element(begin: int, end: int) -> Span:
        nonlocal line, counted
        text = content[begin : min(end, begin + 4096)]
        begin += len(text) - len(text.lstrip())  # the line of the element, not of the comma before it
        line, counted = line + content[counted:begin].count(b"\n"), begin
        return Span(begin, end, line)

    at = start
    while found := _STRUCTURE.search(content, at):
        mark, at = found.group(), found.end()
        if mark == b'"':
            at = _string_end(content, at)
        elif mark in b"[{":
            depth += 1
        elif mark == b",":
            if depth == 0:
                yield element(start, found.start())
                start = at
        elif depth:
            depth -= 1
        else:
            if content[start : found.start()].strip():
                yield element(start, found.start())
            start = at
            break
    if content[start:size].strip():  # the list is cut off, or something follows it
        yield element(start, size)


def _string_end(content: mmap.mmap, start: int) -> int:
    """Return where a string that begins after its quote at `start` has ended; the file's end if it never does."""
    quote = content.find(b'"', start)
    while quote >= 0:
        before = quote
        while before > start and content[before - 1] == 0x5C:
            before -= 1
        if (quote - before) % 2 == 0:  # no backslash is left over to escape it
            return quote + 1
        quote = content.find(b'"', quote + 1)
    return len(content)


def _entry(number: int, file: str, span: Span, max_row_bytes: int) -> Entry:
    def load() -> Mapping[str, Any]:
        size = span.end - span.start
        if size > max_row_bytes:
            allowed = f"{max_row_bytes:,} are allowed (--max-row-bytes)"
            raise UnreadableRow("row too long", f"has {size:,} bytes where {allowed}")
        with open(file, "rb") as stream:
            stream.seek(span.start)
            return _parsed(stream.read(size))

    return Entry(number, f"{file}:{span.line} (row {number} from 0)", load)


def _parsed(text: bytes) -> Mapping[str, Any]:
    try:
        record = json.loads(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        byte = f"byte {error.start} of the row (0x{text[error.start]:02x})"
        raise UnreadableRow("invalid UTF-8", f"is not UTF-8 at {byte}") from None
    except (ValueError, RecursionError) as error:
        raise UnreadableRow("not JSON", f"is no JSON object ({error})") from None
    if not isinstance(record, Mapping):
        raise UnreadableRow("wrong type", f"is of type {type(record).__name__} where an object is needed")
    return record
