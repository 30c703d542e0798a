"""Tells when scores decide nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable

from locret.policy.policy import RetentionPolicy


def warn_of_recency(name: str, recent: Callable[[int], int], policies: Iterable[RetentionPolicy]) -> None:
    """Say in one line with which of the budgets a method's scores decide nothing.

    Args:
        name: The method.
        recent: Newest units that it keeps itself out of a budget (`Scorer.recent`).
        policies: What it is run with.
    """
    filled: dict[int, int] = {}
    for policy in policies:
        units = policy.budget + (policy.local_len if policy.when == "prompt_end" else 0)
        if recent(units) >= units:
            filled[policy.budget] = recent(units)
    if filled:
        most = max(filled.values())
        warnings.warn(
            f"{name} keeps the {most} newest units whatever their scores, so that with --budget "
            f"{','.join(map(str, filled))} it keeps nothing else; raise --budget above {most}, or read its result as "
            "that of recency",
            stacklevel=2,
        )
