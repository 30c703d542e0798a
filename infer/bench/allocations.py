"""Bytes alive while something runs, as PyTorch's allocator hands them out: measured, not estimated.

What a kernel allocates for itself is counted too. Memory that was there before (weights, prompt) is not.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "locret-marked"


@dataclass(frozen=True)
class Peaks:
    """Most bytes alive at one moment of a run on the CPU."""

    marked: int
    """Of what was allocated inside `marked()`, wherever it was freed."""
    everything: int


def marked() -> AbstractContextManager[object]:
    """Return a context whose allocations are counted on their own. Contexts must not be nested."""
    return record_function(_MARK)


def peak_bytes(side: Callable[[], object]) -> Peaks:
    """Run something once and return the most bytes that its allocations held at a time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        side()
    # Only the exported trace tells which memory an event is about.
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        record.export_chrome_trace(str(path))
        return _peaks(json.loads(path.read_text())["traceEvents"])


def _peaks(events: Iterable[dict[str, Any]]) -> Peaks:
    spans, changes = [], []
    for event in events:
        if event["name"] == _MARK and event["ph"] == "X":
            spans.append((event["ts"], event["ts"] + event["dur"]))
        elif event["name"] == "[memory]":
            changes.append((event["ts"], event["args"]["Addr"], event["args"]["Bytes"]))
    spans.sort()
    starts = [start for start, _ in spans]
    alive: dict[int, tuple[int, bool]] = {}
    total = inside = most_total = most_inside = 0
    for moment, address, size in sorted(changes, key=lambda change: change[0]):
        if size > 0:
            span = bisect_right(starts, moment) - 1
            mark = span >= 0 and moment <= spans[span][1]
            alive[address] = (size, mark)
        elif address in alive:
            size, mark = -alive[address][0], alive.pop(address)[1]
        else:  # memory from before
            continue
        total += size
        inside += size if mark else 0
        most_total, most_inside = max(most_total, total), max(most_inside, inside)
    return Peaks(most_inside, most_total)
