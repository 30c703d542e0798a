"""RULER's metrics: shares of references that occur in the answer.

Paper:     arXiv 2404.06654.
Source:    NVIDIA/RULER, scripts/eval/synthetic/constants.py.
Deviates:  never. Its cleaning of answers replaces control characters by newlines, which changes no score: no reference
           has one in it.
"""

from __future__ import annotations

from collections.abc import Sequence

from locret.data.tasks.metrics.retrieval import all_contained, any_contained

_MATCHES = {"all": all_contained, "part": any_contained}


def score(match: str, prediction: str, targets: Sequence[str]) -> float:
    """Return the score of an answer, from 0 to 1; case never counts.

    Args:
        match: "all" for the share of references that occur (needles, variable tracking, word extraction), "part" for 1
            if any occurs (question answering).
        prediction: The generated text.
        targets: The references.
    """
    return _MATCHES[match](prediction, targets)
