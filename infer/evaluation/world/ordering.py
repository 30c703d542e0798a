"""Is the order of the methods real: the same for every seed, random at chance, the oracle at the top?

Formula:  Kendall's tau-b of two seeds' scores: (concordant - discordant) / sqrt((pairs - ties of one)(pairs - ties of
          the other)), over all pairs of methods. Two methods are told apart where their mean difference on the same
          texts is more than two standard errors of it; of those pairs none should swap with the seed.
          Chance: answers scored against the next text's question of the same task, which they know nothing of.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations
from typing import Any

TOLD_APART = 2.0
"""Standard errors from which on a difference counts."""

Text = tuple[Any, ...]
"""What tells a text from others: its seed, task, length and number."""
Scores = Mapping[str, Mapping[Text, float]]
"""By method, the score of each text: 0 to 100, the mean over its questions."""


def tau_b(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Return Kendall's tau-b of two lists of scores; None where one of them is all ties."""
    pairs = list(combinations(range(len(one)), 2))
    signs = [(_sign(one[i] - one[j]), _sign(other[i] - other[j])) for i, j in pairs]
    base = math.sqrt(sum(a != 0 for a, _ in signs) * sum(b != 0 for _, b in signs))
    return None if base == 0 else sum(a * b for a, b in signs) / base


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def difference(scores: Scores, one: str, other: str) -> tuple[float, float]:
    """Return the mean difference of two methods on the texts that both read, and its standard error (inf for one)."""
    shared = [text for text in scores[one] if text in scores[other]]
    found = [scores[one][text] - scores[other][text] for text in shared]
    if not found:
        return 0.0, math.inf
    error = statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else math.inf
    return statistics.fmean(found), error


def told_apart(scores: Scores, one: str, other: str) -> bool:
    """Return whether the first method is ahead of the other by more than chance explains."""
    mean, error = difference(scores, one, other)
    return mean > TOLD_APART * error


def stability(scores: Scores, ceilings: Collection[str] = ()) -> dict[str, Any]:
    """Return how stable the order of the methods is over the seeds.

    Args:
        scores: Of every method.
        ceilings: Those that are no methods, for they know the answers. Several that answer everything are in no order.

    Returns:
        `seeds`; `means`, by method the mean score of each seed; `tau` of every two seeds without the ceilings, and the
        `lowest`, None with one seed; `tau_with_ceilings`; of all, `told_apart`, pairs of methods whose difference
        counts, out of `pairs`; `swapped`, those among them that some seed orders the other way.
    """
    seeds = sorted({text[0] for own in scores.values() for text in own})
    means = {name: [_mean(own, seed) for seed in seeds] for name, own in scores.items()}
    taus = _taus([values for name, values in means.items() if name not in ceilings])
    known = [tau for tau in taus if tau is not None]
    pairs = list(combinations(scores, 2))
    apart = [pair if told_apart(scores, *pair) else pair[::-1] for pair in pairs if _either(scores, *pair)]
    swapped = [(a, b) for a, b in apart if any(x < y for x, y in zip(means[a], means[b], strict=True))]
    return {
        "seeds": seeds,
        "means": {name: [round(value, 3) for value in values] for name, values in means.items()},
        "tau": taus,
        "tau_with_ceilings": _taus(list(means.values())),
        "lowest": min(known, default=None),
        "pairs": len(pairs),
        "told_apart": len(apart),
        "swapped": [list(pair) for pair in swapped],
    }


def _taus(means: Sequence[Sequence[float]]) -> list[float | None]:
    """Return the tau of every two seeds, from the means that each method has."""
    found = [tau_b(one, other) for one, other in combinations(zip(*means, strict=True), 2)]
    return [None if tau is None else round(tau, 4) for tau in found]


def _either(scores: Scores, one: str, other: str) -> bool:
    return told_apart(scores, one, other) or told_apart(scores, other, one)


def _mean(own: Mapping[Text, float], seed: Any) -> float:
    return statistics.fmean([score for text, score in own.items() if text[0] == seed] or [0.0])


def above(scores: Scores, top: str, others: Sequence[str]) -> list[str]:
    """Return the methods that are ahead of the one that should be at the top, by more than chance explains."""
    return [name for name in others if name in scores and told_apart(scores, name, top)]
