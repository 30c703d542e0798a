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
        return best_of(ask.query.to(ask.keys.device), ask.keys, ask.count, ask.positions if ask.padded else None)


def best_of(query: Tensor, keys: Tensor, count: int, positions: Tensor | None = None) -> Tensor:
    """Return the units with the largest logits.

    Args:
        query: (B, N, L, D).
        keys: (B, K, H, D).
        count: Units for each query and KV head, at most H.
        positions: (B, K, H); those with a negative one are no units. None: all are.

    Returns:
        (B, K, L, count) int64 ranks.
    """
    batch, heads, length, dim = query.shape
    kv_heads, units = keys.shape[1:3]
    keys, group = keys.transpose(-1, -2), heads // kv_heads
    rows = max(1, _LOGITS // (batch * heads * units))
    found = []
    for start in range(0, length, rows):
        block = query[:, :, start : start + rows].reshape(batch, kv_heads, -1, dim)
        logits = (block @ keys).view(batch, kv_heads, group, -1, units).amax(2)
        if positions is not None:
            logits = logits.masked_fill(positions[:, :, None] < 0, -torch.inf)
        found.append(logits.topk(count, dim=-1).indices)
    return found[0] if len(found) == 1 else torch.cat(found, dim=2)
