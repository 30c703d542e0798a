"""Tells when a text is read at positions that the backbone has never been trained on."""

from __future__ import annotations

import warnings

from locret import RetentionCache
from locret.backbone.adapters import Backbone
from locret.policy.policy import RetentionPolicy


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
