"""Attention to two ranges in one softmax: a window at true distances, and everything older at a distance of its own.

Paper:     InfLLM, arXiv 2402.04617, section 3.1 (one softmax) and the positions of its released code.
"""

# B batch, N query heads, K KV heads, G query heads per KV head, L new tokens, S near slots, F far slots, D head dim

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from locret.backbone.learned_sinks import attention_weights, by_kv_head

if TYPE_CHECKING:
    from locret.backbone.attention import MaskMemo

_ROWS = 64
"""Query rows whose logits exist at a time."""


@dataclass(frozen=True)
class Far:
    """What a view has besides its own slots, which are the near ones: units that lie behind the window."""

    near_query: Tensor
    """(B, N, L, D) queries, rotated as the view's keys are."""
    query: Tensor
    """(B, N, L, D) the same queries as the far units see them."""
    keys: Tensor
    """(B, K, F, D): `held` slots that leave the window while the new tokens pass, then those that all of them see."""
    values: Tensor
    """Shaped like the keys."""
    held: int
    """The slots of the first kind; new token i of L sees the first `held` - L + i + 1 of them."""
    window: int
    """Tokens that a query sees as near, its own included."""
    empty: Tensor | None
    """(B, 1 or K, S + F) bool, near slots first: those that hold nothing; None if all hold units."""
    tell: Callable[[Tensor, Tensor], None]
    """Called with the (B, N, S) attention of the near slots and the (B, N, F) of the far ones, summed over queries."""


def attend_near_and_far(
    keys: Tensor,
    values: Tensor,
    far: Far,
    scaling: float,
    memo: MaskMemo,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend causally to (B, K, S, D) near slots, the new tokens last, and to the far ones, in one softmax.

    The other arguments are those of `locret.backbone.attention.attend`.

    Returns:
        (B, N, L, D).
    """
    batch, heads, new, dim = far.query.shape
    kv_heads, near = keys.shape[1:3]
    near_query, query = (states.view(batch, kv_heads, -1, new, dim) for states in (far.near_query, far.query))
    near_mask = memo.causal(new, near, far.window, keys)
    held_mask = memo.causal(new, far.held, None, keys)
    out = query.new_empty(*query.shape[:-1], values.shape[-1])
    near_mass = keys.new_zeros(batch, kv_heads, query.shape[2], near, dtype=torch.float32)
    far_mass = keys.new_zeros(batch, kv_heads, query.shape[2], far.keys.shape[2], dtype=torch.float32)
    for start in range(0, new, _ROWS):
        rows = slice(start, min(start + _ROWS, new))
        # Slots that no query of the block sees are left out: those behind its window, and those that come after it.
        span = slice(max(near - new + rows.start - far.window + 1, 0), near - new + rows.stop)
        logits = torch.cat(
            [
                _logits(near_query[..., rows, :], keys[:, :, span], scaling, softcap) + near_mask[rows, span],
                _logits(query[..., rows, :], far.keys, scaling, softcap),
            ],
            dim=-1,
        )
        width = span.stop - span.start
        logits[..., width : width + far.held] += held_mask[rows]
        if far.empty is not None:
            empty = torch.cat([far.empty[..., span], far.empty[..., near:]], dim=-1)
            logits.masked_fill_(empty[:, :, None, None], -torch.inf)
        weights = attention_weights(logits, by_kv_head(sinks, kv_heads))
        near_mass[..., span] += weights[..., :width].sum(-2)
        far_mass += weights[..., width:].sum(-2)
        weights = weights.to(values.dtype)
        out[..., rows, :] = (
            weights[..., :width] @ values[:, :, None, span] + weights[..., width:] @ far.values[:, :, None]
        )
    far.tell(near_mass.flatten(1, 2), far_mass.flatten(1, 2))
    return out.flatten(1, 2)


def _logits(query_BKGLD: Tensor, keys_BKSD: Tensor, scaling: float, softcap: float | None) -> Tensor:
    logits = (query_BKGLD @ keys_BKSD[:, :, None].transpose(-1, -2)).float() * scaling
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
