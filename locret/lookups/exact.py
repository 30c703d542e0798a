"""Exact logits: each query recalls the units of the second tier that it would attend to the most.

Formula:   per KV head the units with the largest q . k of any query head of its group.
Cost:      one product with all keys of the tier per query; no index. Codes are decoded a block of units at a time, and
           the best so far are all that a block leaves.
"""

# B batch, N query heads, K KV heads, G query heads per KV head, L queries, H units of the tier, R recalled, D head dim

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from locret.lookups.base import Ask, KeysOfHeads, Lookup, blocks

_LOGITS = 1 << 24
"""Logits that exist at once, over all heads."""


@dataclass(frozen=True, kw_only=True)
class ExactLookup(Lookup):
    """Scan all keys of the second tier for the largest logits."""

    name: ClassVar[str] = "exact"
    over_ranks: ClassVar[bool] = True
    uneven: ClassVar[bool] = True

    def choose(self, ask: Ask) -> Tensor:
        """See `Lookup`; ranks are (B, K, L, R)."""
        query, keys = ask.query.to(ask.keys.device), ask.keys
        if isinstance(keys, KeysOfHeads):
            return _by_head(keys, query.unflatten(1, (keys.shape[1], -1)), ask.count)
        batch, heads, length, dim = query.shape
        kv_heads, rows = keys.shape[1], 0
        best: list[tuple[Tensor, Tensor]] = []
        for span, part in blocks(keys):
            turned, units = part.transpose(-1, -2), part.shape[2]
            rows = rows or max(1, _LOGITS // (batch * heads * units))
            for nth, start in enumerate(range(0, length, rows)):
                block = query[:, :, start : start + rows].reshape(batch, kv_heads, -1, dim)
                logits = (block @ turned).view(batch, kv_heads, heads // kv_heads, -1, units).amax(2)
                if ask.padded:
                    logits = logits.masked_fill(ask.positions[:, :, None, span] < 0, -torch.inf)
                found, ranks = logits.topk(min(ask.count, units), dim=-1)
                if not span.start:
                    best.append((found, ranks))
                    continue
                both = torch.cat([best[nth][0], found], dim=-1).topk(min(ask.count, span.stop), dim=-1)
                ranks = torch.cat([best[nth][1], ranks + span.start], dim=-1).gather(-1, both.indices)
                best[nth] = both.values, ranks
        chosen = [ranks for _, ranks in best]
        return chosen[0] if len(chosen) == 1 else torch.cat(chosen, dim=2)


def _by_head(keys: KeysOfHeads, query: Tensor, count: int) -> Tensor:
    """Return what (B, K, G, L, D) queries recall of KV heads that hold different numbers of units, none empty."""
    batch, kv_heads, group, length, _ = query.shape
    chosen = torch.full((batch, kv_heads, length, count), -1, device=query.device)
    for row, head in itertools.product(range(batch), range(kv_heads)):
        units, own = keys.heads[row][head], chosen[row, head]
        first = keys.shape[2] - len(units)
        rows = max(1, _LOGITS // max(1, group * len(units)))
        for start in range(0, length, rows):
            logits = (query[row, head, :, start : start + rows] @ units.T).amax(0)
            ranks = logits.topk(min(count, len(units)), dim=-1).indices
            own[start : start + rows, : ranks.shape[1]] = ranks + first
    return chosen
