"""Rows of JSON files, found by one scan and read when asked for.

The one reader of training rows and of published benchmarks, with one error. A row that cannot be read stops nothing but
itself: it keeps its number, and says what is wrong when it is loaded. Memory holds where rows lie (24 bytes a row),
never the rows; `datasets` would hold a list whole, and refuse all rows of a file for one.
"""

from __future__ import annotations

import errno
import json
import mmap
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any

SUFFIXES = (".json", ".jsonl")
MAX_ROW_BYTES = 4_900_000
"""Just under 5 MB: 1.2 million tokens of English."""
_MARK = b"\xef\xbb\xbf"
_NOTHING = _MARK + b" \t\r\n[]"
_STRUCTURE = re.compile(rb'["\[\]{},]')


class BadRow(ValueError):
    """A row that cannot be used.

    Args:
        where: Where it stands.
        reason: A few words that a count of rows left out is kept under.
        detail: What is wrong, after "the row": "has no answer".
        remedy: What to do about it.
    """

    def __init__(self, where: str, reason: str, detail: str, remedy: str = "mend or drop the row"):
        super().__init__(f"{where} {detail}; {remedy}, or pass --skip-bad-rows to leave out such rows")
        self.where, self.reason, self.detail = where, reason, detail


@dataclass(frozen=True)
class Entry:
    """One row that has not been read yet."""

    number: int
    """Its index in the data set, from 0."""
    where: str
    """Where it stands: "rows.jsonl: row 16 (counted from 0)"."""
    load: Callable[[], Mapping[str, Any]]
    """Reads it; raises BadRow."""


class JsonRows(Sequence[Mapping[str, Any]]):
    """Rows of JSON files: a list of objects, or one object a line.

    Args:
        files: Paths, in order.
        max_row_bytes: Longer rows are unreadable.

    Raises:
        ValueError: If a file is empty.
        OSError: If one cannot be read.
    """

    def __init__(self, files: Sequence[str], max_row_bytes: int = MAX_ROW_BYTES) -> None:
        self._files, self._max_row_bytes = list(files), max_row_bytes
        places = array("q")
        for number, file in enumerate(self._files):
            for start, end in spans(file):
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
        return self.entry(index).load()

    def entry(self, index: int) -> Entry:
        """Return a row and where it stands, without reading it."""
        row = 3 * self._chosen[index]
        number, start, end = self._places[row : row + 3]
        file = self._files[number]
        return _entry(index, file, file, (start, end), self._max_row_bytes)


def placed(named: str, number: int) -> str:
    """Return what names a row of a file or data set."""
    return f"{named}: row {number} (counted from 0)"


@contextmanager
def one_sentence(named: str, way_out: str) -> Iterator[None]:
    """Turn whatever a reader of archives or tables raises, which has no end, into one sentence.

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
        # A damaged offset of an archive is an invalid argument; the errors of Arrow, and of datasets, have no number.
        if getattr(cause, "errno", None) not in (None, errno.EINVAL):
            raise OSError(f"{named} cannot be read ({cause}); check its path and permissions") from None
        reason = " ".join(str(cause).split())[:300] or type(cause).__name__
        raise ValueError(f"{named} cannot be read ({reason}); {way_out}") from None


def spans(file: str, named: str = "") -> Iterator[tuple[int, int]]:
    """Yield first and past-the-end byte of the rows of a file: the elements of a list, or lines that are not blank.

    Args:
        file: Its path, which is never held in memory.
        named: What messages call it; the path if empty.

    Raises:
        ValueError: If there is none.
        OSError: If the file cannot be read.
    """
    named = named or file
    try:
        with open(file, "rb") as stream:
            if not any(block.strip(_NOTHING) for block in iter(lambda: stream.read(4096), b"")):
                raise ValueError(f"{named} is empty; it needs at least one row")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
                start = len(_MARK) if content[:3] == _MARK else 0
                first = re.compile(rb"\S").search(content, start)
                is_list = not file.endswith(".jsonl") and first is not None and first.group() == b"["
                yield from _elements(content, first.start() + 1) if is_list and first else _filled_lines(content, start)
    except OSError as error:
        raise OSError(f"{named} cannot be read ({error.strerror or error}); check its permissions") from None


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


def _entry(number: int, named: str, file: str, span: tuple[int, int], max_row_bytes: int) -> Entry:
    where, (start, end) = placed(named, number), span

    def load() -> Mapping[str, Any]:
        if end - start > max_row_bytes:
            raise BadRow(where, "row too long", f"has {end - start:,} bytes where {max_row_bytes:,} are allowed")
        with open(file, "rb") as stream:
            stream.seek(start)
            return _parsed(where, stream.read(end - start))

    return Entry(number, where, load)


def _parsed(where: str, text: bytes) -> Mapping[str, Any]:
    try:
        record = json.loads(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        byte = f"byte {error.start} of the row (0x{text[error.start]:02x})"
        raise BadRow(where, "invalid UTF-8", f"is not UTF-8 at {byte}") from None
    except (ValueError, RecursionError) as error:
        raise BadRow(where, "not JSON", f"is not a JSON object ({error})") from None
    if not isinstance(record, Mapping):
        raise BadRow(where, "wrong type", f"is of type {type(record).__name__} where an object is needed")
    return record


# --- fields of a row ---


def text_of(
    record: Mapping[str, Any], where: str, field: str, *, may_be_empty: bool = False, may_be_missing: bool = False
) -> str:
    """Return a text field; one that may be missing is empty where it is absent or null.

    Raises:
        BadRow: If it is missing, empty, no text, or holds half a surrogate pair, which is not valid UTF-8.
    """
    value = record.get(field) if may_be_missing else _present(record, where, field)
    if value is None and may_be_missing:
        return ""
    if not isinstance(value, str):
        detail = f"has a field {field!r} of type {type(value).__name__} where text is needed"
        raise BadRow(where, "wrong type", detail)
    return _valid(value, where, field, may_be_empty or may_be_missing)


def texts_of(record: Mapping[str, Any], where: str, field: str, *, may_be_empty: bool = False) -> tuple[str, ...]:
    """Return a field that holds a list of texts or numbers, or a single one; numbers as they are written.

    Raises:
        BadRow: As `text_of`, and if an entry is a list, an object or null, or there is none.
    """
    value = _present(record, where, field)
    entries = value if isinstance(value, list) else [] if value is None else [value]
    if not may_be_empty and not entries:
        raise BadRow(where, f"no {field}", f"has an empty field {field!r}")
    found = []
    for number, entry in enumerate(entries):
        name = f"{field}[{number}]" if isinstance(value, list) else field
        if isinstance(entry, bool) or not isinstance(entry, str | int | float):
            detail = f"has a field {name!r} of type {type(entry).__name__} where text or a number is needed"
            raise BadRow(where, "wrong type", detail)
        found.append(_valid(entry, where, name, may_be_empty) if isinstance(entry, str) else str(entry))
    return tuple(found)


def _present(record: Mapping[str, Any], where: str, field: str) -> Any:
    if field not in record:
        raise BadRow(where, f"no {field}", f"has no field {field!r} (it has {', '.join(record) or 'none'})")
    return record[field]


def _valid(value: str, where: str, field: str, may_be_empty: bool) -> str:
    if not may_be_empty and not value.strip():
        raise BadRow(where, f"no {field.split('[')[0]}", f"has an empty field {field!r}")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            detail = f"has half a surrogate pair at character {error.start} of field {field!r}, which is not UTF-8"
            raise BadRow(where, "invalid UTF-8", detail) from None
    return value
