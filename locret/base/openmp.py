"""OpenMP's workers, with which a thread that computes uses all cores."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

_SOFT = 1


@cache
def _pause() -> Callable[[int], int] | None:
    """Return what ends the workers of the thread that calls it, in GNU's OpenMP if PyTorch has loaded that."""
    if sys.platform != "linux":
        return None
    try:
        return getattr(ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD), "omp_pause_resource_all", None)
    except OSError:
        return None


def hand_back_cores() -> None:
    """End the workers of the thread that calls, which has computed for now; to start new ones takes 0.1 ms.

    GNU's OpenMP keeps workers for every thread that ever computed. While they are more than there are cores, each
    sleeps as soon as it has nothing to do, and waking takes longer than a small product: a token that one thread writes
    takes two to three times as long after another thread has read the text.
    """
    if (pause := _pause()) is not None:
        pause(_SOFT)


class Workers(ThreadPoolExecutor):
    """Threads that wait for work, and hand back their cores after each task: anything of torch may have taken them."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """See `ThreadPoolExecutor`."""

        def task() -> Any:
            try:
                return fn(*args, **kwargs)
            finally:
                hand_back_cores()

        return super().submit(task)
