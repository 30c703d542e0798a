"""Attention to chosen slots only, which are gathered for one block of queries after the other."""

# B batch, N query heads, K KV heads, G query heads of a KV head, L new tokens, S slots, D head dim, Q blocks of queries

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from locret.backbone.attention import View, attention_weights, capped
from locret.prefill_attention.base import PrefillAttention


@dataclass(frozen=True)
class SparseAttention:
    """How the queries of one layer attend: each head by its own pattern."""

    patterns: Sequence[PrefillAttention]
    """Of each query head."""

    def covers(self, slots: int) -> bool:
        """Return whether all of so many slots are seen, so that this is dense attention."""
        return all(pattern.covers(slots) for pattern in set(self.patterns))

    def __call__(
        self, query: Tensor, view: View, scaling: float, softcap: float | None, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend causally, as `locret.backbone.attention.attend` does, to what the patterns choose.

        Returns:
            (B, N, L, D).
        """
        batch, heads, new, _ = query.shape
        kv_heads = view.keys.shape[1] if view.segments is None else len(view.segments[0])
        starts = [0] * batch if view.row_start is None else view.row_start.tolist()
        group = heads // kv_heads
        out = query.new_empty(*query.shape[:-1], view.values.shape[-1])
        for row, head in ((row, head) for row in range(batch) for head in range(kv_heads)):
            if view.segments is None:
                # Queries of padding see padding, as something has to be seen.
                units, where = slice(min(starts[row], view.keys.shape[2] - new), None), head
            else:
                units, where = view.segments[row][head], 0
            asking = slice(head * group, (head + 1) * group)
            key, value = view.keys[row, where, units], view.values[row, where, units]
            chosen, rows = chosen_slots(self.patterns[asking], query[row, asking], key, scaling, softcap)
            own = None if sinks is None else sinks[asking]
            out[row, asking] = by_gathering(query[row, asking], key, value, chosen, rows, scaling, softcap, sinks=own)
        return out


def chosen_slots(
    patterns: Sequence[PrefillAttention], query_GLD: Tensor, key_SD: Tensor, scaling: float, softcap: float | None
) -> tuple[Tensor, int]:
    """Return (G, Q, S) what the heads' patterns choose, and how many queries a block has."""
    (rows,) = {pattern.rows for pattern in patterns}
    blocks = -(-query_GLD.shape[1] // rows)
    chosen = torch.ones(len(patterns), blocks, len(key_SD), dtype=torch.bool, device=key_SD.device)
    for pattern in dict.fromkeys(patterns):
        if not pattern.covers(len(key_SD)):
            heads = [nth for nth, other in enumerate(patterns) if other == pattern]
            chosen[heads] = pattern.choose(query_GLD[heads], key_SD, scaling, softcap)
    return chosen, rows


def by_gathering(
    query_GLD: Tensor,
    key_SD: Tensor,
    value_SD: Tensor,
    chosen: Tensor,
    rows: int,
    scaling: float,
    softcap: float | None,
    *,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return (G, L, D): each block of queries attends to a copy of its chosen slots alone."""
    heads, new, _ = query_GLD.shape
    slots = len(key_SD)
    out = query_GLD.new_empty(heads, new, value_SD.shape[-1])
    mask = query_GLD.new_zeros(rows, slots)
    for nth, start in enumerate(range(0, new, rows)):
        end = min(start + rows, new)
        before, seen = slots - new + start, slots - new + end
        own = torch.arange(before, seen, device=key_SD.device)
        for head in range(heads):
            units = chosen[head, nth, :seen].nonzero()[:, 0]
            count = len(units)
            if count == seen:  # everything: no copy
                keys, values = key_SD[:seen], value_SD[:seen]
            else:
                keys, values = key_SD.index_select(0, units), value_SD.index_select(0, units)
            # Chosen slots ascend, so only the last few can be behind a query.
            late = units[count - int(chosen[head, nth, before:seen].sum()) :]
            corner = mask[: end - start, count - len(late) : count]
            corner.masked_fill_(late > own[:, None], -torch.inf)
            asking, seen_mask = query_GLD[head, start:end], mask[: end - start, :count]
            if softcap is None and sinks is None:
                query, key, value = (states[None, None] for states in (asking, keys, values))
                attended = F.scaled_dot_product_attention(query, key, value, seen_mask[None, None], scale=scaling)
                found = attended[0, 0]
            else:
                logits = capped(asking @ keys.T * scaling, softcap) + seen_mask
                found = attention_weights(logits, None if sinks is None else sinks[head]).to(asking.dtype) @ values
            out[head, start:end] = found
            corner.zero_()
    return out
