"""A layer's budget split over its heads by score (Ada-KV), slowly."""

# K KV heads, S slots, U units

from __future__ import annotations

import math


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
