"""Formulas that say how much each layer keeps, how memory grows with the chunks, and how chunks shrink in return.

Papers:    PyramidKV, arXiv 2406.02069 (pyramids of layer budgets); IM / IMDC, "incremental memory, decremental chunk"
           (the rest, but for shares of layers, which are ours).
Deviates:  Sizes are never below 1 unit; chunks never below a minimum, what they lack is taken from the earlier ones
           (the papers' formula goes below zero where the budget is about twice the chunk or more).
All arithmetic is in whole numbers, so every machine plans the same sizes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import islice
from math import isqrt, ulp
from operator import le, mul

EVERY_UNIT = 1 << 40
"""More tokens, or units of a KV head, than a text has: as a budget, nothing is evicted."""
_LARGEST = 10**9
FEW = 4
"""Units that small KV heads have at least where shares are squared: most attention is for a text's first tokens."""


def pyramid_budgets(budget: int, layers: int, tokens: int | None, window: int = 0, beta: int = 20) -> tuple[int, ...]:
    """Return units per layer, falling linearly from the first layer to the last (PyramidKV's code).

    Rounding down the slope leaves the mean up to layers / 2 units above the budget.

    Args:
        budget: Mean units per KV head, window included ("cap").
        layers: Number of layers.
        tokens: Tokens that compete for the budget; None: more than matter.
        window: Units that every layer keeps whatever their score; the rest forms the pyramid.
        beta: The last layer keeps about 1 / beta of the mean, window aside.

    Returns:
        Units of each layer, window included. The budget for all of them where the text is short (below the budget, or
        2 (budget - window) tokens) or the window takes everything.
    """
    mean = budget - window
    if layers == 1 or mean < 1 or (tokens is not None and tokens < max(budget, 2 * mean)):
        return (budget,) * layers
    least = mean // beta
    most = 2 * mean - least
    if tokens is not None and most >= tokens - window:
        most = tokens - window
        least = 2 * mean - most
    slope = (most - least) // (layers - 1)
    return tuple(max(1, most - layer * slope + window) for layer in range(layers))


def check_shares(shares: Sequence[float]) -> None:
    """Refuse numbers that are no shares of KV heads."""
    if not (shares and all(0 < share <= _LARGEST for share in shares)):
        raise ValueError(
            f"head_shares={list(shares)} are no shares; give a number above 0, up to {_LARGEST:,}, for every KV head "
            "of every full-attention layer, such as [0.5, 1.5]"
        )


def steepened(shares: Sequence[float], budget: int, room: int) -> tuple[float, ...]:
    """Return shares as near to their squares as leaves no KV head with more than `room` units, of `budget` on average.

    The less of a text stays, the fewer heads are worth having it: where there is room for their squares, these find
    more (docs/heads.md), beside `FEW` units for each head, or a 16th. Where there is none, shares stay as they are.
    """
    exact = [Fraction(share) for share in shares]
    mean, square = sum(exact) / len(exact), sum(share * share for share in exact) / len(exact)
    few, most = Fraction(min(FEW, budget // 16), budget), Fraction(room, budget)
    pairs = [(share / mean, few + (1 - few) * share * share / square) for share in exact]
    if most <= max(exact) / mean:
        return tuple(shares)
    part = min([Fraction(1), *((most - own) / (steep - own) for own, steep in pairs if steep > most)])
    return tuple(float(own + part * (steep - own)) or ulp(0.0) for own, steep in pairs)


def shared_budgets(budget: int, shares: Sequence[float], heads: Sequence[int]) -> tuple[int, ...]:
    """Return units per KV head of each layer, one at least, in proportion to their shares, `budget` on average."""
    exact, every = [Fraction(share) for share in shares], sum(heads)
    mean = sum(map(mul, exact, heads)) / every
    own = [(budget - 1) * share / mean for share in exact]
    parts = [1 + int(part) for part in own]
    left = budget * every - sum(map(mul, parts, heads))
    for nth in sorted(range(len(own)), key=lambda nth: (-(own[nth] % 1), nth)):
        if heads[nth] <= left:  # the largest remainders are rounded up
            parts[nth], left = parts[nth] + 1, left - heads[nth]
    return tuple(parts)


def lifted(
    budgets: Sequence[int], shares: Sequence[float], most: Sequence[int], heads: Sequence[int]
) -> tuple[int, ...]:
    """Return units per layer, as many in all, where no KV head has more than it will hold.

    What the large heads have no use for goes to where the smallest are, so that these could have as many as another.
    Within a layer shares divide what it has.

    Args:
        budgets: Units per KV head of each layer, as its heads' shares say.
        shares: Of each KV head, layer by layer.
        most: Units that each head of a layer will hold, one at least.
        heads: KV heads of each layer.
    """
    bounds, parts = [bound for bound, count in zip(most, heads, strict=True) for _ in range(count)], list[Fraction]()
    for units, count in zip(budgets, heads, strict=True):
        own = [Fraction(share) for share in shares[len(parts) : len(parts) + count]]
        parts += [units * count * share / sum(own) for share in own]
    if all(map(le, parts, bounds)):
        return tuple(budgets)

    def poured(level: int) -> list[int]:
        return [min(bound, max(int(part), level)) for part, bound in zip(parts, bounds, strict=True)]

    total = sum(map(mul, budgets, heads))
    level = bisect_right(range(1, max(bounds) + 1), total, key=lambda level: sum(poured(level)))
    if not level:  # less than a unit for each
        return tuple(map(min, budgets, most))
    units_of = poured(level)
    low = [nth for nth, units in enumerate(units_of) if units == level < bounds[nth]]
    for nth in low[: total - sum(units_of)]:
        units_of[nth] += 1
    layers, over, rest = list[int](), 0, iter(units_of)
    for count in heads:
        units, over = divmod(over + sum(islice(rest, count)), count)
        layers.append(units)
    return tuple(layers)


def divided(units: int, shares: Sequence[float], held: Sequence[int], least: int = 0) -> list[int]:
    """Divide units among heads, or texts, in proportion to shares, and none more than it holds.

    What one has no use for goes to the others, in the same proportion.

    Returns:
        Units of each, in all min(units, sum of held).
    """
    parts, left = [0] * len(held), min(units, sum(held))
    if left >= least * len(held):
        parts = [min(least, most) for most in held]
        left -= sum(parts)
    while left:
        free = [nth for nth, most in enumerate(held) if parts[nth] < most]
        total = sum(Fraction(shares[nth]) for nth in free)
        own = {nth: left * Fraction(shares[nth]) / total for nth in free}
        given = {nth: min(int(own[nth]), held[nth] - parts[nth]) for nth in free}
        if not any(given.values()):  # less than a unit for each: the largest parts have one
            given = dict.fromkeys(sorted(free, key=lambda one: (-own[one], one))[:left], 1)
        for nth, more in given.items():
            parts[nth] += more
        left -= sum(given.values())
    return parts


def memory_sizes(growth: str, steps: int, most: int, first: int | None = None) -> tuple[int, ...]:
    """Return the units kept after each of `steps` chunks, from `first` (`most / steps` if None) up to `most`."""
    if growth == "fixed" or steps == 1:
        return (most,) * steps
    first = max(1, most // steps) if first is None else min(first, most)
    rise, last = most - first, steps - 1
    if growth == "linear":
        return tuple(first + rise * i // last for i in range(steps))
    if growth == "square":
        return tuple(first + rise * i * i // last**2 for i in range(steps))
    assert growth == "sqrt"
    return tuple(first + isqrt(rise * rise * i * last) // last for i in range(steps))


def decremental_chunks(tokens: int, memory: Sequence[int], min_chunk: int, held: int = 0) -> tuple[int, ...]:
    """Return chunk sizes that sum to `tokens`, each as much smaller as memory has grown before it.

    The first chunk is the average one. From the second on, chunk and memory together have a constant length, but for
    chunks that would fall below `min_chunk`, or below what memory is to grow by: those are that large, and the length
    of the others is lower in return. What rounding leaves over goes to the first chunk, as far as that is no longer
    with its memory than the others with theirs, and else to the next ones, one token each.

    Args:
        tokens: Tokens to read, at least `min_chunk` for each chunk (or a single chunk).
        memory: Units kept after each chunk, ascending; as many numbers as there are chunks.
        min_chunk: Smallest chunk.
        held: Units held before the first chunk.
    """
    average, before = tokens // len(memory), memory[:-1]
    floors = [max(min_chunk, new - old) for old, new in zip(memory, memory[1:], strict=False)]
    if average + sum(floors) > tokens:
        floors = [min_chunk] * len(before)

    def sizes(length: int) -> list[int]:
        return [max(floor, length - units) for floor, units in zip(floors, before, strict=True)]

    low, high = 0, tokens + memory[-1]  # the longest constant length that leaves an average chunk for the start
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if average + sum(sizes(middle)) <= tokens else (low, middle - 1)
    later, longer = sizes(low), sizes(low + 1)
    left = tokens - average - sum(later)
    first = average + min(left, max(0, low - held - average)) if later else tokens
    left -= first - average
    for number, (short, long) in enumerate(zip(later, longer, strict=True)):
        if left > 0 and long > short:
            later[number], left = long, left - 1
    return (first, *later)


def adaptive_sizes(base: Sequence[int], ratios: Sequence[float], caps: Sequence[int]) -> tuple[int, ...]:
    """Share a step's memory over the layers by how much of their old memory each kept last time (IM, adaptive).

    Args:
        base: Units per layer of the linear growth, b_i.
        ratios: Retention ratio per layer after the step before, |M_{i-1} and M_i| / |M_i|.
        caps: Most units per layer.

    Returns:
        Units per layer: layers x base x ratio / sum of ratios, at least 1 and at most the cap.
    """
    total = sum(ratios)
    if total <= 0:
        return tuple(base)
    return tuple(
        max(1, min(cap, int(len(base) * units * ratio / total)))
        for units, ratio, cap in zip(base, ratios, caps, strict=True)
    )
