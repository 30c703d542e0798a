"""Rows of published benchmarks: a local copy in the published layout, or the Hub at a pinned revision.

A file is a list of objects or one object a line, plain or inside a zip archive.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from locret.data.tasks.task import NoSamples, Sample, SampleSet

if TYPE_CHECKING:
    from locret.data.tasks.published.base import PublishedTask


class BadRow(ValueError):
    """A row that cannot be asked; the message names its place and what is wrong."""


class Row(NamedTuple):
    """One row of a file."""

    number: int
    """Its index in the data set, from 0."""
    where: str
    """Its place, for messages."""
    fields: Mapping[str, Any]

    def bad(self, detail: str) -> BadRow:
        """Return the error of a row that has something wrong in it."""
        return BadRow(f"{self.where} {detail}; mend or drop the row")

    def text(self, name: str, *, may_be_empty: bool = False) -> str:
        """Return a text field; one that is missing, empty or no text is refused."""
        value = self._value(name)
        if not isinstance(value, str):
            raise self.bad(f"has a field {name!r} of type {type(value).__name__} where text is needed")
        if not (may_be_empty or value.strip()):
            raise self.bad(f"has an empty field {name!r}")
        return value

    def texts(self, name: str, *, may_be_empty: bool = False) -> tuple[str, ...]:
        """Return a field that holds a list of texts or numbers, or a single one; numbers as they are written."""
        value = self._value(name)
        found = value if isinstance(value, list) else [] if value is None else [value]
        for one in found:
            if isinstance(one, bool) or not isinstance(one, str | int | float):
                raise self.bad(f"has a field {name!r} with a {type(one).__name__} where text or a number is needed")
        if not may_be_empty and not (found and all(str(one).strip() for one in found)):
            raise self.bad(f"has an empty field {name!r}")
        return tuple(map(str, found))

    def one_of(self, name: str, known: Collection[str]) -> str:
        """Return a field that holds one of the known texts."""
        if (value := self.text(name)) not in known:
            raise self.bad(f"holds {value!r} in field {name!r} where {' or '.join(known)} is right")
        return value

    def _value(self, name: str) -> Any:
        if name not in self.fields:
            raise self.bad(f"has no field {name!r} (it has {', '.join(self.fields) or 'none'})")
        return self.fields[name]


def read_rows(path: str) -> Iterator[Row]:
    """Yield the rows of a file; `archive.zip!a/b.jsonl` is one inside an archive."""
    file, _, member = path.partition("!")
    try:
        if member:
            with zipfile.ZipFile(file) as archive, archive.open(member) as stream:
                yield from _rows(path, _objects(stream, member))
        else:
            with open(file, "rb") as stream:
                yield from _rows(path, _objects(stream, file))
    except BadRow:
        raise
    except (ValueError, KeyError, zipfile.BadZipFile, RecursionError) as error:
        raise ValueError(f"{path} is no intact file of rows ({' '.join(str(error).split())}); fetch it again") from None


def _objects(stream: Any, name: str) -> Iterator[Any]:
    if name.endswith(".jsonl"):
        yield from (json.loads(line.decode("utf-8-sig")) for line in stream if line.strip())
        return
    text = stream.read().decode("utf-8-sig")
    yield from json.loads(text) if text.lstrip()[:1] == "[" else map(json.loads, filter(None, text.splitlines()))


def _rows(path: str, objects: Iterator[Any]) -> Iterator[Row]:
    for number, fields in enumerate(objects):
        row = Row(number, f"{path}: row {number} (counted from 0)", fields)
        if not isinstance(fields, dict):
            raise row.bad(f"is of type {type(fields).__name__} where an object is needed")
        yield row


def open_rows(task: PublishedTask, folders: Sequence[str] | None = None, samples: int | None = None) -> SampleSet:
    """Find a task's rows, of which so many `samples` are asked, evenly spread over the file, or all.

    Local copies are searched in order: the benchmark's folder in its published layout, or a folder of such folders
    (`DIR/longbench/data/qasper.jsonl`); the Hub where there are none.
    """
    if folders is None:
        path, commit = _fetched(task)
        origin = f"{task.repo}/{task.hub_file or task.file}"
    elif (own := local(task, folders)) is not None:
        path, commit, origin = own, None, own
    else:
        raise NoSamples(
            f"--data-dir {', '.join(folders)} holds no rows of {task.name}; looked for "
            f"{', '.join(candidates(task)[:4])}; put the published file there, or leave out --data-dir to read the Hub",
            "no rows found",
        )
    if not (count := sum(1 for _ in task.items(read_rows(path)))):
        raise NoSamples(
            f"{origin} holds no row that {task.name} could ask; check that it is the right file",
            "no rows to ask in its file",
        )
    asked = min(samples or count, count)
    chosen = [index * count // asked for index in range(asked)]

    @cache
    def held() -> dict[int, Sample]:
        wanted = set(chosen)
        return {number: sample for number, sample in enumerate(task.items(read_rows(path))) if number in wanted}

    with open(path.partition("!")[0], "rb") as stream:
        digest = hashlib.sha256()
        for block in iter(lambda: stream.read(1 << 20), b""):
            digest.update(block)
    file = origin if commit else Path(path).name
    return SampleSet(
        task=task,
        chosen=chosen,
        sample=lambda number: held()[number],
        facts={"file": file, "revision": commit, "sha256": digest.hexdigest(), "items": count},
        of=None if task.size is None else max(task.size, count),  # some files have more than their papers count
    )


def candidates(task: PublishedTask) -> list[str]:
    """Return where a local copy may have a task's rows, relative to it, in the order they are looked for."""
    spots = [task.file, task.hub_file or task.file, Path(task.file).name]
    return list(dict.fromkeys([f"{task.family}/{spot}" for spot in spots] + spots))


def local(task: PublishedTask, folders: Sequence[str]) -> str | None:
    """Return the file of a local copy that has a task's rows; None if there is none."""
    for folder in map(os.path.expanduser, folders):
        if not os.path.isdir(folder):
            raise ValueError(f"--data-dir {folder} is not a folder; give the folder of a local copy")
        for spot in candidates(task):
            if os.path.isfile(os.path.join(folder, spot.partition("!")[0])):
                return os.path.join(folder, spot)
    return None


def _fetched(task: PublishedTask) -> tuple[str, str]:
    """Return the local path of a file on the Hub, fetched unless it is in the cache, and its commit."""
    from huggingface_hub import hf_hub_download

    from locret.hub import one_sentence

    if not task.repo:
        missing = f"task {task.name} is not on the Hub; give --data-dir with a local copy of {task.file}"
        raise NoSamples(missing, "no rows found")
    name, _, member = (task.hub_file or task.file).partition("!")
    lacks = f"has no {name} at {task.revision}, the rows of {task.name}; give --data-dir with a local copy"
    with one_sentence("load", task.repo, what="data set", lacks=lacks):
        path = hf_hub_download(task.repo, name, repo_type="dataset", revision=task.revision)
    # .../snapshots/<commit>/<file>
    commit = Path(path).parents[len(Path(name).parts) - 1].name
    return (f"{path}!{member}" if member else path), commit
