"""Bytes alive while something runs, as PyTorch's allocator hands them out: measured, not estimated.

What a kernel allocates for itself is counted too. Memory that was there before (weights, prompt) is not.
"""

from __future__ import annotations

import json
import os
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

_PHASE = "locret-phase "


@dataclass(frozen=True)
class Peaks:
    """Most bytes alive at one moment of a run on the CPU."""

    everything: int
    phases: dict[str, int] = field(default_factory=dict)
    """Of everything, during each `phase()`; what the run allocated before it and still holds counts too."""


def phase(name: str) -> AbstractContextManager[object]:
    """Return a context whose peak is reported on its own; each name is used once."""
    return record_function(_PHASE + name)


def peak_bytes(side: Callable[[], object]) -> Peaks:
    """Run something once and return the most bytes that its allocations held at a time."""
    record = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with silent():
        record.start()
    try:
        side()
    finally:
        with silent():
            record.stop()
    # Only the exported trace tells which memory an event is about.
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        record.export_chrome_trace(str(path))
        events = json.loads(path.read_text(), object_hook=_wanted)["traceEvents"]
        return _peaks(event for event in events if event is not None)


@contextmanager
def silent() -> Iterator[None]:
    """Keep from standard error what the profiler's library says there whenever it starts and stops."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _wanted(part: dict[str, Any]) -> dict[str, Any] | None:
    """Drop, while a trace is read, the events that say nothing about memory: a long run has millions."""
    name = part.get("name")
    if "ph" not in part or name == "[memory]" or (isinstance(name, str) and name.startswith(_PHASE)):
        return part
    return None


def _peaks(events: Iterable[dict[str, Any]]) -> Peaks:
    changes, phases = [], {}
    for event in events:
        if event["name"] == "[memory]":
            changes.append((event["ts"], event["args"]["Addr"], event["args"]["Bytes"]))
        elif event["ph"] == "X" and event["name"].startswith(_PHASE):
            phases[event["name"].removeprefix(_PHASE)] = (event["ts"], event["ts"] + event["dur"])
    alive: dict[int, int] = {}
    total = most = 0
    moments, totals = [], [0]
    for moment, address, size in sorted(changes, key=lambda change: change[0]):
        if size > 0:
            alive[address] = size
        elif address in alive:
            size = -alive.pop(address)
        else:  # memory from before
            continue
        total += size
        most = max(most, total)
        moments.append(moment)
        totals.append(total)
    # totals[i] is alive from change i - 1 on, so a phase begins with what its first index finds.
    peaks = {
        name: max(totals[bisect_right(moments, start) : bisect_right(moments, end) + 1])
        for name, (start, end) in phases.items()
    }
    return Peaks(most, peaks)
