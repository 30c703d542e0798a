"""samples.jsonl: one line per answer, written as soon as it is known, so that an interrupted run can go on."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locret.base.files import write_text

if TYPE_CHECKING:
    from locret.cache.memory import CacheMemory

SAMPLES, RESULTS, TABLE = "samples.jsonl", "results.json", "results.md"
PART = "samples.process-{}.jsonl"
"""What another process than the first writes, until the first merges it."""
KEY = ("task", "version", "tokens", "index", "method", "budget", "chunk_size", "stabilizers")
"""What tells one run from another within an output folder."""
PROTOCOLS = AWARE, AGNOSTIC = "aware", "agnostic"
"""The question stands in the prompt while that is read; or the document is read and evicted to the budget first, and
the question comes afterwards, on a fork."""
_AGAIN = "mend the file, or use --overwrite to start again"


_COUNT, _TEXT, _UNITS, _OBJECT = "a whole number", "a text", "a whole number or null", "an object"
_FIELDS = {
    **dict.fromkeys(("task", "method", "prediction"), _TEXT),
    **dict.fromkeys(("version", "tokens", "index", "prompt_tokens", "generated_tokens"), _COUNT),
    **dict.fromkeys(("kept_units", "peak_units", "cache_bytes", "peak_bytes"), _COUNT),
    **dict.fromkeys(("budget", "chunk_size", "stabilizers"), _UNITS),
    "score": "a number from 0 to 1",
    "targets": "a list of texts",
    **dict.fromkeys(("prefill_seconds", "decode_seconds"), "a number, 0 or more"),
}
"""What every record has, in words."""
_OPTIONAL = {
    "depth": "a number from 0 to 1",
    "budget_share": "a number from 0 to 1",
    "protocol": _TEXT,
    "compared": _OBJECT,
    **dict.fromkeys(("tokens_before", "tokens_after", "document_tokens", "question", "protected"), _COUNT),
    **dict.fromkeys(("host_bytes", "moved_bytes", "kv_ranks"), _COUNT),
}


def problem(record: Any) -> str | None:
    """Return what keeps an object from being a record of an evaluation, None if nothing does."""
    if not isinstance(record, dict):
        return "is no object"
    for name, kind in (_FIELDS | {name: kind for name, kind in _OPTIONAL.items() if name in record}).items():
        if name not in record:
            return f"has no field {name!r}"
        if not _is(record[name], kind):
            return f"has {_short(record[name])} in field {name!r}, which must be {kind}"
    return None


def _is(value: Any, kind: str) -> bool:
    if kind == _OBJECT:
        return isinstance(value, dict)
    if kind == _TEXT:
        return isinstance(value, str)
    if kind == "a list of texts":
        return isinstance(value, list) and all(isinstance(entry, str) for entry in value)
    if value is None:
        return kind == _UNITS
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        return False
    return value <= 1 if kind == "a number from 0 to 1" else type(value) is int or kind == "a number, 0 or more"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def key(record: dict[str, Any]) -> tuple[Any, ...]:
    """Return what tells a record from others."""
    varying = record.get("budget_share"), protocol_of(record), record.get("question")
    return (*(record[name] for name in KEY), *varying)


def protocol_of(found: dict[str, Any]) -> str:
    """Return the protocol of a record or cell; the first toolkits knew one only."""
    return str(found.get("protocol", AWARE))


def shown(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return records or cells for people: the method's name says its protocol where that is not the usual one."""
    return [
        one if protocol_of(one) == AWARE else {**one, "method": f"{one['method']}, {one['protocol']}"} for one in found
    ]


def second_tier(memory: CacheMemory) -> dict[str, int]:
    """Return what a record says of a second tier, if there is one."""
    return {"host_bytes": memory.host, "moved_bytes": memory.moved} if memory.host_planned else {}


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

    def check(self, order: dict[tuple[Any, ...], int], seed: int) -> None:
        """Refuse records of another run: a folder's plan may get more methods, and nothing else changes.

        Args:
            order: Place of every record of the run by its key.
            seed: Of the run's samples.

        Raises:
            ValueError: If a record answers no question of the run, or one of samples with another seed.
        """
        written = [(self.path, record) for record in self.records]
        written += [(path, record) for path in parts(self.folder) for record in read(path)[0]]
        for path, record in written:
            where = f"{record['task']}, {record['tokens']} tokens, sample {record['index']}, method {record['method']}"
            if key(record) not in order:
                raise ValueError(f"{path} has an answer to what is not asked here ({where}); {_AGAIN}")
            if record.get("seed", seed) != seed:
                raise ValueError(f"{path} has an answer with seed {_short(record['seed'])} ({where}); {_AGAIN}")

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

    An answer that is there twice counts once.

    Raises:
        ValueError: If a line that is not the last one is broken, or two lines give different answers to one question.
    """
    records: dict[tuple[Any, ...], tuple[int, dict[str, Any]]] = {}
    lines = path.read_bytes().split(b"\n") if path.is_file() else []
    good = 0
    for number, line in enumerate(lines, start=1):
        whole = number < len(lines)  # what follows the last line break was cut off
        if not line:
            good += whole
            continue
        try:
            record = json.loads(line)
            wrong = problem(record)
        except (ValueError, RecursionError):
            wrong = "is not JSON"
        if wrong is not None:
            if any(lines[number:]):
                raise ValueError(f"{path}, line {number} is not a record of an evaluation: it {wrong}; {_AGAIN}")
            break
        if not whole:
            break
        first, before = records.setdefault(key(record), (number, record))
        if (before["prediction"], before["score"]) != (record["prediction"], record["score"]):
            raise ValueError(f"{path}, lines {first} and {number} answer one question in different ways; {_AGAIN}")
        good += len(line) + 1
    return [record for _, record in records.values()], good


def in_order(records: Iterable[dict[str, Any]], order: dict[tuple[Any, ...], int]) -> list[dict[str, Any]]:
    """Return the records that belong to a run, in the order it would write them without interruption."""
    return sorted((record for record in records if key(record) in order), key=lambda record: order[key(record)])
