"""Rows of JSON files, found by one scan and read when asked for.

A row that cannot be read stops nothing but itself: it keeps its number, and says what is wrong when it is loaded.
Memory holds where rows lie (24 bytes a row), never the rows; `datasets` would hold a list whole, and refuse all rows of
a file for one.
"""

from __future__ import annotations

import errno
import json
import mmap
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

SUFFIXES = (".json", ".jsonl")
_MARK = b"\xef\xbb\xbf"
_NOTHING = _MARK + b" \t\r\n[]"
_STRUCTURE = re.compile(rb'["\[\]{},]')


class BadRow(ValueError):
    """A row that cannot be trained on.

    Args:
        reason: A few words that rows left out are counted under.
        detail: What is wrong, after "the row": "has no answer".
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class JsonRows(Sequence[Mapping[str, Any]]):
    """Rows of JSON files: a list of objects, or one object a line.

    Args:
        files: Paths, in order.

    Raises:
        ValueError: If a file is empty.
        OSError: If one cannot be read.
    """

    def __init__(self, files: Sequence[str]) -> None:
        self._files = list(files)
        places = array("q")
        for number, file in enumerate(self._files):
            for start, end in _spans(file):
                places.extend((number, start, end))
        self._places = places
        self._chosen = range(len(places) // 3)

    def part(self, first: int, end: int) -> JsonRows:
        """Return some of the rows; what is known of the files is shared."""
        some = copy(self)
        some._chosen = self._chosen[first:end]
        return some

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: Any) -> Any:
        """Read a row; raises BadRow if it cannot be."""
        file, start, end = self._place(index)
        with open(file, "rb") as stream:
            stream.seek(start)
            return _parsed(stream.read(end - start))

    def file_of(self, index: int) -> str:
        """Return the file that holds a row."""
        return self._place(index)[0]

    def _place(self, index: int) -> tuple[str, int, int]:
        row = 3 * self._chosen[index]
        number, start, end = self._places[row : row + 3]
        return self._files[number], start, end


@contextmanager
def one_sentence(named: str, way_out: str) -> Iterator[None]:
    """Turn whatever a reader of tables raises, which has no end, into one sentence.

    Raises:
        ValueError: For damage.
        OSError: If the operating system refuses.
    """
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        cause = error.__cause__ or error
        # A damaged offset is an invalid argument; the errors of Arrow, and of datasets, have no number.
        if getattr(cause, "errno", None) not in (None, errno.EINVAL):
            raise OSError(f"{named} cannot be read ({cause}); check its path and permissions") from None
        reason = " ".join(str(cause).split())[:300] or type(cause).__name__
        raise ValueError(f"{named} cannot be read ({reason}); {way_out}") from None


def _spans(file: str) -> Iterator[tuple[int, int]]:
    """Yield first and past-the-end byte of the rows of a file: the elements of a list, or lines that are not blank."""
    try:
        with open(file, "rb") as stream:
            if not any(block.strip(_NOTHING) for block in iter(lambda: stream.read(4096), b"")):
                raise ValueError(f"{file} is empty; it needs at least one row")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
                start = len(_MARK) if content[:3] == _MARK else 0
                first = re.compile(rb"\S").search(content, start)
                is_list = not file.endswith(".jsonl") and first is not None and first.group() == b"["
                yield from _elements(content, first.start() + 1) if is_list and first else _filled_lines(content, start)
    except OSError as error:
        raise OSError(f"{file} cannot be read ({error.strerror or error}); check its permissions") from None


def _filled_lines(content: mmap.mmap, start: int) -> Iterator[tuple[int, int]]:
    while start < len(content):
        newline = content.find(b"\n", start)
        end = len(content) if newline < 0 else newline
        if content[start : min(end, start + 64)].strip() or content[start:end].strip():
            yield start, end
        start = end + 1


def _elements(content: mmap.mmap, start: int) -> Iterator[tuple[int, int]]:
    """Cut a list at the commas that lie in none of its elements; what lies between may be anything."""
    depth, at, size = 0, start, len(content)
    while found := _STRUCTURE.search(content, at):
        mark, at = found.group(), found.end()
        if mark == b'"':
            at = _string_end(content, at)
        elif mark in b"[{":
            depth += 1
        elif mark == b",":
            if depth == 0:
                yield start, found.start()
                start = at
        elif depth:
            depth -= 1
        else:
            if content[start : found.start()].strip():
                yield start, found.start()
            start = at
            break
    if content[start:size].strip():  # the list is cut off, or something follows it
        yield start, size


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


def _parsed(text: bytes) -> Mapping[str, Any]:
    try:
        record = json.loads(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        byte = f"byte {error.start} of the row (0x{text[error.start]:02x})"
        raise BadRow("invalid UTF-8", f"is not UTF-8 at {byte}") from None
    except (ValueError, RecursionError) as error:
        raise BadRow("not JSON", f"is not a JSON object ({error})") from None
    if not isinstance(record, Mapping):
        raise BadRow("wrong type", f"is of type {type(record).__name__} where an object is needed")
    return record
