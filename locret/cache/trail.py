"""The features of the newest tokens of a layer, for a scorer that looks at the tokens before the one that it rates.

They are what outlives a chunk besides units: bounded, planned and counted, copied, reordered and saved with the cache.
"""

# B batch, L new tokens, W tokens that are looked at, F features of a token

from __future__ import annotations

import torch
from torch import Tensor

from locret.cache.units import Units

TRAIL, FEATURES = "newest_", "features"
"""What the name of a trail's tensor begins with among those of its layer, in a file, and how it ends."""
NEWEST_FEATURES = TRAIL + FEATURES


class Trail(Units):
    """What one layer's scorer will want of the newest tokens, of which it looks at so many."""

    once, counter = None, ""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.tensors = tokens, {}

    @property
    def newest(self) -> Tensor | None:
        """(B, W + 1, F): a token more than is looked at, since the newest may be taken back; zeros before the first."""
        return self.tensors.get(FEATURES)

    def follow(self, features_BLF: Tensor) -> Tensor:
        """Take note of new tokens with (B, L, F) features; return those of the tokens before, (B, W, F)."""
        batch, new, width = features_BLF.shape
        held = features_BLF.new_zeros(batch, self.tokens + 1, width) if self.newest is None else self.newest
        self.tensors[FEATURES] = torch.cat([held[:, new:], features_BLF[:, -self.tokens - 1 :]], dim=1)
        return held[:, 1:]

    def take_back(self) -> None:
        """Forget the newest token."""
        for name, held in self.tensors.items():
            self.tensors[name] = torch.cat([torch.zeros_like(held[:, :1]), held[:, :-1]], dim=1)
