"""Running several things side by side in one process, and the quantiles of what came out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from tqdm.auto import tqdm

K = TypeVar("K")
T = TypeVar("T")


def in_turns(sides: Mapping[K, Callable[[], T]], rounds: int, bar: Any = None) -> dict[K, list[T]]:
    """Run every side once per round, one after the other; return what each came to, round by round.

    Args:
        sides: What to run, by name.
        rounds: How often.
        bar: A progress bar of tqdm to move by one per run; one of its own if None.
    """
    found: dict[K, list[T]] = {name: [] for name in sides}
    own = tqdm(total=rounds * len(sides), desc="measuring", disable=None) if bar is None else nullcontext(bar)
    with own as shown:
        for name, side in list(sides.items()) * rounds:
            found[name].append(side())
            shown.update()
    return found


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Return p20, p50 and p80, to six digits."""
    points = torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64))
    return {name: float(f"{value:.6g}") for name, value in zip(("p20", "p50", "p80"), points.tolist(), strict=True)}
