"""Rows of a published file, one at a time, each with the place where it stands: JSON Lines, JSON list or Parquet.

A row that cannot be read does not end the file: a `BadRow` stands in its place, so the rows after it keep their
numbers. `PublishedTask.items` raises it, or counts it if bad rows may be skipped.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from locret.data.tasks.published.base import MAX_ROW_BYTES, BadRow, Record

SUFFIXES = (".jsonl", ".json", ".parquet")


def read_records(path: str | Path, *, max_row_bytes: int = MAX_ROW_BYTES) -> Iterator[tuple[str, Record]]:
    """Yield each row with its place.

    Args:
        path: A `.jsonl`, `.json` (a list of objects) or `.parquet` file; `archive.zip!a/b.jsonl` is a JSON Lines file
            inside an archive.
        max_row_bytes: Longer lines of JSON Lines are bad rows; they are not held in memory.

    Yields:
        "file:line" (from 1; "file: row N", from 0, where there are no lines) and the row, or what is wrong with it.

    Raises:
        ValueError: If the ending is unknown, or the file as a whole cannot be parsed or holds no rows.
        OSError: If it cannot be read.
    """
    suffix = Path(path).suffix
    if suffix not in SUFFIXES:
        raise ValueError(f"{path}: the ending {suffix!r} is not known; convert the file to {', '.join(SUFFIXES)}")
    rows = {".jsonl": _lines, ".json": _list, ".parquet": _table}[suffix](str(path), max_row_bytes)
    empty = True
    for row in rows:
        empty = False
        yield row
    if empty:
        raise ValueError(f"{path} is empty; it needs at least one row")


@contextmanager
def _opened(path: str) -> Iterator[IO[bytes]]:
    """The bytes of a file, or of a member of an archive."""
    archive, _, member = path.partition("!")
    try:
        if not member:
            with open(path, "rb") as stream:
                yield stream
            return
        with zipfile.ZipFile(archive) as files, files.open(member) as stream:
            yield stream
    except KeyError:
        raise ValueError(f"{archive} has no file {member} inside; check that it is the published archive") from None
    except zipfile.BadZipFile as error:
        raise ValueError(f"{archive} is no intact zip archive ({error}); fetch it again") from None
    except OSError as error:
        raise OSError(
            f"{path} cannot be read ({error.strerror or error}); check the path and its permissions"
        ) from None


def _lines(path: str, max_row_bytes: int) -> Iterator[tuple[str, Record]]:
    with _opened(path) as stream:
        number = 0
        while line := stream.readline(max_row_bytes + 1):
            number += 1
            place = f"{path}:{number}"
            if len(line) > max_row_bytes and not line.endswith(b"\n"):
                size = len(line) + _skip_line(stream, max_row_bytes)
                yield place, BadRow(place, "line too long", _too_long(size, max_row_bytes))
            elif line.strip():
                yield place, _parsed(place, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)


def _skip_line(stream: IO[bytes], block: int) -> int:
    """Read to the end of the line and return the number of its bytes that were passed."""
    size = 0
    while part := stream.readline(block):
        size += len(part.removesuffix(b"\n"))
        if part.endswith(b"\n"):
            break
    return size


def _too_long(size: int, limit: int) -> str:
    return f"the line has {size:,} bytes where {limit:,} are allowed (max_row_bytes)"


def _parsed(place: str, line: bytes) -> Record:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        byte = line[error.start]
        return BadRow(place, "invalid UTF-8", f"byte {error.start} of the line (0x{byte:02x}) is not UTF-8")
    except (ValueError, RecursionError) as error:
        return BadRow(place, "not JSON", f"the line is not JSON ({error})")
    return _object(place, record)


def _object(place: str, record: Any) -> Record:
    if isinstance(record, Mapping):
        return record
    return BadRow(place, "wrong type", f"the row is of type {type(record).__name__} where an object is needed")


def _list(path: str, _: int) -> Iterator[tuple[str, Record]]:
    with _opened(path) as stream:
        content = stream.read()
    try:
        rows = json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {error.start} is not UTF-8; re-export the file as UTF-8") from None
    except (ValueError, RecursionError) as error:
        hint = "; a file with one object a line must end in .jsonl" if "Extra data" in str(error) else ""
        raise ValueError(f"{path} is not JSON ({error}){hint or '; mend or re-export it'}") from None
    if not isinstance(rows, list):
        raise ValueError(f"{path} holds a {type(rows).__name__} where a list of rows is needed; re-export it")
    for number, row in enumerate(rows):
        place = f"{path}: row {number}"
        yield place, _object(place, row)


def _table(path: str, _: int) -> Iterator[tuple[str, Record]]:
    import datasets
    import pyarrow  # type: ignore[import-untyped]

    try:
        rows = datasets.load_dataset("parquet", data_files=path, split="train", streaming=True)
        for number, row in enumerate(rows):
            yield f"{path}: row {number}", row
    except FileNotFoundError:
        raise OSError(f"{path} cannot be read (no such file); check the path") from None
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is not Parquet ({' '.join(str(error).split())}); fetch it again") from None


# --- fields of a row ---


def text_of(record: Mapping[str, Any], place: str, field: str, *, may_be_empty: bool = False) -> str:
    """Return a text field.

    Raises:
        BadRow: If it is missing, empty, no text, or holds half a surrogate pair, which is no valid UTF-8.
    """
    if field not in record:
        raise BadRow(place, f"no {field}", f"field {field!r} is missing (the row has {', '.join(record) or 'none'})")
    value = record[field]
    if not isinstance(value, str):
        raise BadRow(place, "wrong type", f"field {field!r} is of type {type(value).__name__} where text is needed")
    return _valid(value, place, field, may_be_empty)


def texts_of(record: Mapping[str, Any], place: str, field: str, *, may_be_empty: bool = False) -> tuple[str, ...]:
    """Return a field that holds a list of texts or numbers, or a single one; numbers as they are written.

    Raises:
        BadRow: As `text_of`, and if an entry is a list, an object or null, or there is none.
    """
    if field not in record:
        raise BadRow(place, f"no {field}", f"field {field!r} is missing (the row has {', '.join(record) or 'none'})")
    value = record[field]
    entries = value if isinstance(value, list) else [value]
    if not may_be_empty and (value is None or not entries):
        raise BadRow(place, f"no {field}", f"field {field!r} is empty")
    if value is None:
        return ()
    found = []
    for number, entry in enumerate(entries):
        name = f"{field}[{number}]" if isinstance(value, list) else field
        if isinstance(entry, bool) or not isinstance(entry, str | int | float):
            kind = "null" if entry is None else f"of type {type(entry).__name__}"
            raise BadRow(place, "wrong type", f"field {name!r} is {kind} where text or a number is needed")
        found.append(_valid(entry, place, name, may_be_empty) if isinstance(entry, str) else str(entry))
    return tuple(found)


def _valid(value: str, place: str, field: str, may_be_empty: bool) -> str:
    if not may_be_empty and not value.strip():
        name = field.split("[")[0]
        raise BadRow(place, f"no {name}", f"field {field!r} is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        detail = f"field {field!r} holds half a surrogate pair at character {error.start}, which is not UTF-8"
        raise BadRow(place, "invalid UTF-8", detail) from None
    return value
