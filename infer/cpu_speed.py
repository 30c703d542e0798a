"""What this machine's CPU is good at, measured once in some milliseconds: no list of processors would stay complete."""

from __future__ import annotations

import time
from functools import cache

import torch

FASTER = 0.75
"""Share of float32's time that bfloat16 must stay below. CPUs with bfloat16 products need half of it or less; others
emulate them and need more than all of it: nothing is near, so that a machine always decides alike."""


@cache
def bfloat16_is_faster() -> bool:
    """Return whether the CPU multiplies matrices faster in bfloat16 than in float32, with the threads it is given."""
    return _seconds(torch.bfloat16) < FASTER * _seconds(torch.float32)


def _seconds(dtype: torch.dtype, repeats: int = 5) -> float:
    """Return the shortest time of a product as large as one of a small backbone's chunk."""
    tokens, weights = torch.ones(256, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        torch.nn.functional.linear(tokens, weights)
        taken.append(time.perf_counter() - start)
    return min(taken)
