"""samples.jsonl: one line per answer, written as soon as it is known, so that an interrupted run can go on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

SAMPLES, RESULTS, TABLE = "samples.jsonl", "results.json", "results.md"
KEY = ("task", "version", "tokens", "index", "method", "budget", "chunk_size", "stabilizers")
"""What tells one run from another within an output folder."""


def key(record: dict[str, Any]) -> tuple[Any, ...]:
    """Return what tells a record from others."""
    return tuple(record[name] for name in KEY)


class SampleLog:
    """The records of an output folder."""

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / SAMPLES
        self.records: list[dict[str, Any]] = []

    def load(self) -> None:
        """Read what an interrupted run has left; a last line that was cut off is dropped from the file.

        Raises:
            ValueError: If a line in between is broken.
        """
        if not self.path.is_file():
            return
        lines = self.path.read_bytes().split(b"\n")
        good = 0
        for number, line in enumerate(lines):
            if not line:
                continue
            whole = number < len(lines) - 1  # what follows the last line break was cut off
            try:
                record = json.loads(line)
                key(record)
            except (ValueError, KeyError, TypeError):
                if any(lines[number + 1 :]):
                    raise ValueError(
                        f"{self.path}, line {number + 1} is no record of an evaluation; use --overwrite to start again"
                    ) from None
                break
            if not whole:
                break
            self.records.append(record)
            good += len(line) + 1
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


def write_atomically(path: Path, text: str) -> None:
    """Write a file that appears whole or not at all.

    Raises:
        OSError: If it cannot be written; the message names the file.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        reason = error.strerror or error
        raise OSError(f"{path} cannot be written ({reason}); free some space or choose another folder") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def in_order(records: Iterable[dict[str, Any]], order: dict[tuple[Any, ...], int]) -> list[dict[str, Any]]:
    """Return the records that belong to a run, in the order it would write them without interruption."""
    return sorted((record for record in records if key(record) in order), key=lambda record: order[key(record)])
