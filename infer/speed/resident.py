"""Memory that this process holds in RAM, as the system counts it."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_FORGET_PEAK = "5"


def resident_growth(call: Callable[[], object]) -> int | None:
    """Run something and return by how many bytes it raised the process's resident memory at most.

    Returns:
        None where the system keeps no such record (only Linux does).
    """
    give_back()
    try:
        _CLEAR.write_text(_FORGET_PEAK)
        before = _status_bytes("VmRSS")
    except (OSError, ValueError):
        return None
    call()
    return max(0, _status_bytes("VmHWM") - before)


def give_back() -> None:
    """Return freed memory to the system, where its allocator can be asked to."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


def _status_bytes(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"{_STATUS} has no {name}")
