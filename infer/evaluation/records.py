"""samples.jsonl: one line per answer, written as soon as it is known, so that an interrupted run can go on."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from locret.files import write_text

SAMPLES, RESULTS, TABLE = "samples.jsonl", "results.json", "results.md"
PART = "samples.process-{}.jsonl"
"""What another process than the first writes, until the first merges it."""
KEY = ("task", "version", "tokens", "index", "method", "budget", "chunk_size", "stabilizers")
"""What tells one run from another within an output folder."""


def key(record: dict[str, Any]) -> tuple[Any, ...]:
    """Return what tells a record from others."""
    return tuple(record[name] for name in KEY)


class SampleLog:
    """The records of an output folder; where several processes share a run, each but the first has a file of its own.

    Args:
        folder: The output folder.
        rank: Number of this process; 0 writes samples.jsonl itself.
    """

    def __init__(self, folder: str | Path, rank: int = 0) -> None:
        self.folder = Path(folder)
        self.path = self.folder / (PART.format(rank) if rank else SAMPLES)
        self.records: list[dict[str, Any]] = []

    def load(self) -> None:
        """Read what an interrupted run has left; a last line that was cut off is dropped from the file.

        Raises:
            ValueError: If a line in between is broken.
        """
        self.records, good = read(self.path)
        if self.path.is_file():
            with self.path.open("r+b") as file:
                file.truncate(good)

    def append(self, record: dict[str, Any]) -> None:
        """Add a record to the file.

        Raises:
            OSError: If it cannot be written; the message names the file.
        """
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
        """Take up what other processes have written, as far as it is whole; an answer that is there twice counts once.

        Raises:
            ValueError: If a line of theirs is broken.
        """
        known = self.done()
        for path in parts(self.folder):
            for record in read(path)[0]:
                if key(record) not in known:
                    known.add(key(record))
                    self.records.append(record)

    def merge(self, order: dict[tuple[Any, ...], int]) -> None:
        """Bring all that was written into one file, in the order of an evaluation in one process without interruption.

        Args:
            order: Place of every record by its key.

        Raises:
            ValueError: If a line is broken.
            OSError: If the file cannot be written; then all that was there is still there.
        """
        before = len(self.records)
        self.collect()
        ranks = [order.get(key(record), len(order)) for record in self.records]
        if len(self.records) > before or ranks != sorted(ranks):
            self.records.sort(key=lambda record: order.get(key(record), len(order)))
            lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in self.records]
            write_text(self.path, "".join(lines))
        for path in parts(self.folder):
            path.unlink()


def parts(folder: Path) -> list[Path]:
    """Return the files of the processes but the first."""
    return sorted(folder.glob(PART.format("*")))


def read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the records of a file, which need not exist, and its bytes up to the end of the last whole one.

    Raises:
        ValueError: If a line that is not the last one is broken.
    """
    records: list[dict[str, Any]] = []
    lines = path.read_bytes().split(b"\n") if path.is_file() else []
    good = 0
    for number, line in enumerate(lines):
        whole = number < len(lines) - 1  # what follows the last line break was cut off
        if not line:
            good += whole
            continue
        try:
            record = json.loads(line)
            hash(key(record))
            if record["score"] is not None and not math.isfinite(record["score"]):
                raise ValueError
        except (ValueError, KeyError, TypeError, RecursionError):
            if any(lines[number + 1 :]):
                raise ValueError(
                    f"{path}, line {number + 1} is not a record of an evaluation; use --overwrite to start again"
                ) from None
            break
        if not whole:
            break
        records.append(record)
        good += len(line) + 1
    return records, good


def in_order(records: Iterable[dict[str, Any]], order: dict[tuple[Any, ...], int]) -> list[dict[str, Any]]:
    """Return the records that belong to a run, in the order it would write them without interruption."""
    return sorted((record for record in records if key(record) in order), key=lambda record: order[key(record)])
