"""Bytes alive while something runs, as PyTorch's allocator hands them out: measured, not estimated.

What a kernel allocates for itself is counted too. Memory that was there before (weights, prompt) is not.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from torch.profiler import ProfilerActivity, profile


def peak_bytes(side: Callable[[], object]) -> int:
    """Run something once and return the most bytes that its allocations held at a time."""
    record = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with _silent():
        record.start()
    try:
        side()
    finally:
        with _silent():
            record.stop()
    # Only the exported trace tells which memory an event is about.
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        record.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = [(event["ts"], event["args"]) for event in events if event.get("name") == "[memory]"]
    alive: dict[int, int] = {}
    total = most = 0
    for _, change in sorted(changes, key=lambda one: one[0]):
        size = change["Bytes"]
        if size > 0:
            alive[change["Addr"]] = size
        else:  # memory from before is not in there
            size = -alive.pop(change["Addr"], 0)
        total += size
        most = max(most, total)
    return most


@contextmanager
def _silent() -> Iterator[None]:
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
