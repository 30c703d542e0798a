"""samples.jsonl: one line per answer, written as soon as it is known, so that an interrupted run can go on.

The output folder holds one configuration, which is checked before anything is loaded or written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from locret.base.files import visible, write_text
from locret.base.warned import warn_user
from locret.environment import versions

SAMPLES, RESULTS, TABLE = "samples.jsonl", "results.json", "results.md"
PART = "samples.process-{}.jsonl"
"""What another process than the first writes, until the first merges it."""
KEY = ("task", "version", "tokens", "index", "method", "budget", "chunk_size", "stabilizers", "protocol")
"""What tells one run from another within an output folder."""
PROTOCOLS = AWARE, AGNOSTIC = "aware", "agnostic"
"""The question stands in the prompt while that is read; or the document is read and evicted to the budget first, and
the question comes afterwards, on a fork."""


def key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what tells a record from others."""
    return (*(record[name] for name in KEY), record.get("budget_share"), record.get("question"))


class SampleLog:
    """The records of an output folder; each process but the first has a file of its own."""

    def __init__(self, folder: str | Path, rank: int = 0) -> None:
        self.folder = Path(folder)
        self.path = self.folder / (PART.format(rank) if rank else SAMPLES)
        self.records: list[dict[str, Any]] = []

    def load(self) -> None:
        """Read what an interrupted run has left; a last line that was cut off is dropped from the file."""
        self.records, good = read(self.path)
        if self.path.is_file():
            with self.path.open("r+b") as file:
                file.truncate(good)

    def append(self, record: dict[str, Any]) -> None:
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        except OSError as error:
            raise OSError(
                f"{self.path} cannot be written ({error.strerror}); free some space, then --resume"
            ) from error
        self.records.append(record)

    def done(self) -> set[tuple[Any, ...]]:
        """Return the keys of what has been measured."""
        return {key(record) for record in self.records}

    def collect(self) -> None:
        """Take up what other processes have written, as far as it is whole; what is there twice counts once."""
        known = self.done()
        for path in parts(self.folder):
            for record in read(path)[0]:
                if key(record) not in known:
                    known.add(key(record))
                    self.records.append(record)

    def merge(self, order: Mapping[tuple[Any, ...], int]) -> None:
        """Bring all that was written into one file, in the order of an evaluation without interruption."""
        before = len(self.records)
        self.collect()
        for record in self.records:
            if key(record) not in order:
                raise ValueError(
                    f"{self.path} has an answer to what is not asked here ({record['task']}, sample "
                    f"{record['index']}, method {record['method']}); mend the file, or use --overwrite to start again"
                )
        ranks = [order[key(record)] for record in self.records]
        if len(self.records) > before or ranks != sorted(ranks):
            self.records.sort(key=lambda record: order[key(record)])
            lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in self.records]
            write_text(self.path, "".join(lines))
        for path in parts(self.folder):
            path.unlink()


def parts(folder: Path) -> list[Path]:
    """Return the files of the processes but the first."""
    return sorted(folder.glob(PART.format("*")))


def read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the records of a file, which need not exist, and its bytes up to the end of the last whole one."""
    records: dict[tuple[Any, ...], dict[str, Any]] = {}
    lines = path.read_bytes().split(b"\n") if path.is_file() else []
    good = 0
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last line break was cut off
        try:
            record = {"protocol": AWARE, **json.loads(line)}  # the first toolkits knew no other
            name = key(record)
            twice = name in records
        except (ValueError, TypeError, KeyError):
            if not any(lines[number:]):
                break
            raise ValueError(
                f"{path}, line {number} is no record of an evaluation; mend the file, or use --overwrite to start again"
            ) from None
        if twice:
            raise ValueError(
                f"{path}, line {number} answers what an earlier line has answered ({record['task']}, sample "
                f"{record['index']}, method {record['method']}); delete one of them, or use --overwrite to start again"
            )
        records[name] = record
        good += len(line) + 1
    return list(records.values()), good


CONFIGURATION = "configuration.json"
METHODS = "methods"
"""The setting that may grow when a run goes on, as what a method answers does not depend on the others."""
VERSIONS = "versions"
"""What that file holds besides the settings: what the first process that wrote here ran on."""


def fingerprint(settings: dict[str, Any]) -> str:
    """Return the hash of the resolved configuration."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def check_output(output: str, settings: dict[str, Any], *, resume: bool, overwrite: bool) -> None:
    """Refuse a folder that holds something else; nothing is written."""
    folder = Path(output)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output {output} is a file; name a folder")
    if not visible(folder):
        return
    if not (folder / CONFIGURATION).is_file():
        raise ValueError(f"--output {output} holds something else than an evaluation; choose another folder")
    if overwrite:
        return
    stored, here = _configuration(folder), json.loads(json.dumps(settings))
    different = [
        name
        for name, value in here.items()
        if stored.get(name, value) != value and not (resume and name == METHODS and set(stored[name]) <= set(value))
    ]
    if different:
        raise ValueError(
            f"--output {output} holds an evaluation of another configuration (other {', '.join(different)}); choose "
            "another folder, or --overwrite it"
        )
    if not resume:
        raise ValueError(f"--output {output} holds this evaluation already; --resume goes on, --overwrite starts again")


def open_output(output: str, settings: dict[str, Any], *, overwrite: bool) -> SampleLog:
    """Return the records of a folder that `check_output` has passed, making it if need be."""
    folder, here = Path(output), versions()
    log = SampleLog(folder)
    if (folder / CONFIGURATION).is_file() and not overwrite:
        log.load()
        before = _configuration(folder)
        if (recorded := before.get(VERSIONS, here)) != here:
            changed = [f"{n} {recorded.get(n)} is now {here[n]}" for n in here if recorded.get(n) != here[n]]
            warn_user(f"--resume mixes answers of different versions ({', '.join(changed)}); --overwrite starts again")
        here = recorded
    else:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # The configuration goes last: a folder without it is nobody's.
            parted = [path.name for path in parts(folder)]
            for name in (SAMPLES, *parted, RESULTS, TABLE, CONFIGURATION):
                (folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise OSError(f"--output {output} cannot be written ({error.strerror}); choose another folder") from error
    write_text(folder / CONFIGURATION, json.dumps({**settings, VERSIONS: here}, indent=1) + "\n")
    return log


def _configuration(folder: Path) -> dict[str, Any]:
    path = folder / CONFIGURATION
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        raise ValueError(f"{path} is broken; --overwrite starts again, or choose another folder") from None
