"""Random scores: the floor that every policy must beat at the same budget.

Formula:   s ~ U(0, 1), drawn from the seed, the layer, the KV head and the unit's original position.
Cost:      O(L) per chunk. The draw does not depend on chunking, batch or device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from locret.backbone.adapters import ranks_of
from locret.backbone.chunk import Chunk
from locret.base.fields import Range
from locret.scorers.base import Scorer

SEED = Range(1 - 2**32, 2**32 - 1)
"""Seeds that the arithmetic of the draw can hold."""
_MASK = (1 << 31) - 1


@dataclass(frozen=True, kw_only=True)
class RandomScorer(Scorer):
    """Keep units drawn at random."""

    name: ClassVar[str] = "random"
    over_ranks: ClassVar[bool] = True
    ranges = {"seed": SEED, "sinks": Range(0)}

    seed: int = 0
    """Seed of the draw."""
    sinks: int = 0
    """First tokens of the text that always stay: with 4, the protection that other methods come with."""

    def prepare(self, model: nn.Module) -> int:
        """Return which process this is of those that share the KV heads, from 0."""
        ranks = ranks_of(model)
        return 0 if ranks is None else ranks.rank

    def score(self, chunk: Chunk) -> Tensor:
        """Return scores (B, K, L)."""
        batch, kv_heads = chunk.key.shape[:2]
        first = (chunk.prepared or 0) * kv_heads
        draw = uniform_draw(chunk.positions, self.seed, chunk.layer_idx, kv_heads, first)
        return draw.float().expand(batch, -1, -1)


def uniform_draw(positions: Tensor, seed: int, layer_idx: int, kv_heads: int, first: int = 0) -> Tensor:
    """Draw (B, K, S) float64 numbers from [0, 1): a function of seed, layer, KV head and original position alone.

    The first of these heads is the layer's KV head number `first`.
    """
    heads = torch.arange(first, first + kv_heads, device=positions.device)[:, None]
    # Two rounds of a multiplicative integer hash in 31 bits; products stay below 2**62.
    state = positions.long() * 2 + seed * 7919 + layer_idx * 104729 + heads * 1299709
    for multiplier in (0x2C1B3C6D, 0x297A2D39):
        state = ((state ^ (state >> 15)) & _MASK) * multiplier & _MASK
    state = state ^ (state >> 13)
    return state.double() / (_MASK + 1)
