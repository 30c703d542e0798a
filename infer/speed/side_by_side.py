"""Running several things side by side in one process, and the quantiles of what came out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from tqdm import tqdm

K = TypeVar("K")
T = TypeVar("T")


def in_turns(sides: Mapping[K, Callable[[], T]], rounds: int) -> dict[K, list[T]]:
    """Run every side once per round, one after the other; return what each came to, round by round."""
    found: dict[K, list[T]] = {name: [] for name in sides}
    for _ in tqdm(range(rounds), desc="measuring", disable=None):
        for name, side in sides.items():
            found[name].append(side())
    return found


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Return p20, p50 and p80, to six digits."""
    points = torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64))
    return {name: float(f"{value:.6g}") for name, value in zip(("p20", "p50", "p80"), points.tolist(), strict=True)}
