"""PyramidKV's layer budgets and the schedules of IM / IMDC, slowly and with fractions."""

from __future__ import annotations

import math


def pyramid_budgets(cap: int, window: int, tokens: int, layers: int, beta: int = 20) -> list[int]:
    """Return the units of every layer, window included, as PyramidKV's code computes them."""
    if tokens < cap or tokens < 2 * (cap - window):
        return [cap] * layers
    least = (cap - window) // beta
    most = 2 * (cap - window) - least
    if most >= tokens - window:
        most = tokens - window
        least = 2 * (cap - window) - most
    step = (most - least) // (layers - 1)
    return [most - layer * step + window for layer in range(layers)]


def memory_sizes(growth: str, steps: int, most: int) -> list[int]:
    """Return m_0 .. m_{n-1} of IM's formulas, truncated, with m_0 = m_max / n truncated."""
    first = most // steps
    sizes = []
    for i in range(steps):
        passed = i / (steps - 1)
        share = {"linear": passed, "square": passed**2, "sqrt": math.sqrt(passed)}[growth]
        sizes.append(math.floor((most - first) * share + first + 1e-9))
    return sizes


def decremental_chunks(chunk: float, memory: list[int]) -> list[float]:
    """Return IMDC's chunk sizes as the paper writes them, which may be fractions, or below zero."""
    before = memory[:-1]
    mean = sum(before) / len(before)
    return [chunk] + [chunk + mean - units for units in before]


def adaptive_sizes(base: list[int], old: list[set[int]], new: list[set[int]]) -> list[float]:
    """Return each layer's share N b_j p_j / sum p, where p_j is the part of its memory it held a step ago already."""
    ratios = [len(a & b) / len(b) for a, b in zip(old, new, strict=True)]
    return [len(base) * units * ratio / sum(ratios) for units, ratio in zip(base, ratios, strict=True)]
