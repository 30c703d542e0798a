"""Tells when scores decide nothing, and when a text is read at positions that the backbone was never trained on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from locret.policy.policy import RetentionPolicy

if TYPE_CHECKING:
    from locret import RetentionCache
    from locret.backbone.adapters import Backbone


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


class PositionWarning:
    """Says once, as early as it is known, that a text goes beyond the positions the backbone was trained on."""

    def __init__(self, backbone: Backbone, policy: RetentionPolicy) -> None:
        self.backbone, self.policy, self.said = backbone, policy, False

    def __call__(self, cache: RetentionCache) -> None:
        """Look at how far the cache's positions reach now."""
        limit, true = self.backbone.max_positions, self.policy.positions == "original" or not self.backbone.uniform
        reach = cache.next_position
        if self.said or reach <= limit:
            return
        self.said = True
        way_out = (
            "use --positions compact, which numbers the kept units only"
            if self.policy.positions == "original" and self.backbone.uniform
            else "shorten the prompt"
            if true
            else "lower --budget or --chunk-size"
            if self.policy.when == "chunk"
            else "use --when chunk, which holds fewer units"
        )
        warnings.warn(
            f"rotary positions reach beyond {limit}, the longest context of this backbone, where its answers usually "
            f"fall apart; reading goes on, but {way_out}",
            stacklevel=2,
        )
