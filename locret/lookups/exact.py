"""Exact logits: each query recalls the units of the second tier that it would attend to the most.

Formula:   per KV head the units with the largest q . k of any query head of its group.
Cost:      one product with all keys of the tier per query; no index.
"""

# B batch, N query heads, K KV heads, G query heads per KV head, L queries, H units of the tier, R recalled, D head dim

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from locret.lookups.base import Ask, Lookup

_LOGITS = 1 << 24
"""Logits that exist at once, over all heads."""


@dataclass(frozen=True, kw_only=True)
class ExactLookup(Lookup):
    """Scan all keys of the second tier for the largest logits."""

    name: ClassVar[str] = "exact"

    def choose(self, ask: Ask) -> Tensor:
        """See `Lookup`; ranks are (B, K, L, R)."""
        return best_of(ask.query.to(ask.keys.device), ask.keys, ask.positions, ask.count)


def best_of(query: Tensor, keys: Tensor, positions: Tensor, count: int) -> Tensor:
    """Return the units with the largest logits.

    Args:
        query: (B, N, L, D).
        keys: (B, K, H, D).
        positions: (B, K, H); those with a negative one are no units.
        count: Units for each query and KV head, at most H.

    Returns:
        (B, K, L, count) int64 ranks.
    """
    batch, heads, length, dim = query.shape
    kv_heads, units = keys.shape[1:3]
    grouped = query.view(batch, kv_heads, heads // kv_heads, length, dim)
    empty = (positions < 0)[:, :, None]
    rows = max(1, _LOGITS // (batch * heads * units))
    found = []
    for start in range(0, length, rows):
        block = grouped[:, :, :, start : start + rows].flatten(2, 3)
        logits = (block @ keys.transpose(-1, -2)).view(batch, kv_heads, heads // kv_heads, -1, units).amax(2)
        found.append(logits.masked_fill(empty, -torch.inf).topk(count, dim=-1).indices)
    return torch.cat(found, dim=2)
