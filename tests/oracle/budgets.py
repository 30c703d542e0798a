"""PyramidKV's layer budgets, the schedules of IM / IMDC, Ada-KV's split and protected spans, slowly."""

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


def select_over_heads(
    scores_KU: list[list[float]],
    positions_KU: list[list[int]],
    budget: int,
    protected: int = 0,
    floor: int = 0,
    relative: bool = False,
) -> list[list[int]]:
    """Return the kept slots of each head, ascending.

    Args:
        scores_KU: per head, the score of each of its units; heads may hold different numbers of them.
        positions_KU: the units' places in the text.
        budget: units to keep per head, on average.
        protected: newest units of each head that stay whatever their score.
        floor: units that each head keeps at least, protected ones included.
        relative: compare heads by the softmax of their scores.
    """
    kept: list[set[int]] = []
    left = budget * len(scores_KU)
    for scores, positions in zip(scores_KU, positions_KU, strict=True):
        slots = sorted(range(len(scores)), key=lambda s: positions[s])
        newest = slots[max(len(slots) - min(protected, budget), 0) :]
        others = sorted(set(slots) - set(newest), key=lambda s: (scores[s], positions[s]), reverse=True)
        wanted = max(0, min(floor, budget) - len(newest))
        kept.append(set(newest) | set(others[:wanted]))
        left -= len(kept[-1])
    rest = []
    for head, (scores, positions) in enumerate(zip(scores_KU, positions_KU, strict=True)):
        total = math.log(sum(math.exp(score) for score in scores)) if relative and scores else 0.0
        for slot in range(len(scores)):
            if slot not in kept[head]:
                rest.append((scores[slot] - total, positions[slot], head, slot))
    for _, _, head, slot in sorted(rest, reverse=True)[: max(left, 0)]:
        kept[head].add(slot)
    return [sorted(slots) for slots in kept]


def kept_with_protection(
    scores: list[float],
    chunks: list[int],
    budgets: list[int],
    stabilizers: list[int],
    pins: list[tuple[int, int]],
    shares: list[tuple[int, int, int]],
) -> list[list[int]]:
    """Return the positions held after each chunk, where a unit's score does not change.

    Args:
        scores: Of each token.
        chunks: Tokens of each chunk; what is left of the text is read after the last eviction.
        budgets: Units that stay after each chunk.
        stabilizers: Newest units that stay after each chunk, as far as what is protected leaves room.
        pins: Start and end of tokens that all stay.
        shares: Start, end, and how many units stay at least.

    Returns:
        Ascending positions after each chunk, and with the rest of the text at last.
    """
    held: list[int] = []
    history, read = [], 0
    for size, most, newest in zip(chunks, budgets, stabilizers, strict=True):
        held += range(read, read + size)
        read += size
        stays = {token for token in held if any(start <= token < end for start, end in pins)}
        for start, end, units in shares:
            mine = [token for token in held if start <= token < end]
            mine.sort(key=lambda token: (token in stays, scores[token], token), reverse=True)
            stays |= set(mine[:units])
        assert len(stays) <= most
        stays |= set(held[len(held) - min(newest, most - len(stays)) :])
        others = sorted(
            (token for token in held if token not in stays), key=lambda token: (scores[token], token), reverse=True
        )
        held = sorted([*stays, *others[: max(0, most - len(stays))]])
        history.append(list(held))
    history.append([*held, *range(read, len(scores))])
    return history
