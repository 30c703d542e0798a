"""Attention rows for scorers: what chosen queries look at, recomputed in blocks of rows, next to the fused kernel.

The kernel that attends keeps no weights. A block of rows is one product of the queries of all heads with the keys and
one softmax, both over the units that its last row sees; the workspace never exceeds heads x block x units, whatever the
chunk. The row maximum and sum are computed anew: PyTorch's public attention function keeps its log-sum-exp to itself.
"""

# B batch, N query heads, K KV heads, G = N / K, L new tokens, R rows of a block, S units

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from locret.backbone.attention import attention_weights, by_kv_head
from locret.backbone.chunk import Chunk

_LEAST_ROWS = 16
_LOGITS_CPU, _LOGITS_GPU = 2**16, 2**25
"""Logits of a block: as many as stay in a CPU's cache, and 128 MiB of a GPU."""

REDUCTIONS = ("mean", "max", "sum")
"""How the query heads of a group vote."""

Weigh = Callable[[Tensor, Tensor, Tensor], Tensor]


def attention_sums(chunk: Chunk, first: int = 0, *, weigh: Weigh | None = None) -> Tensor:
    """Sum the attention that the queries from `first` on pay to every unit.

    Args:
        chunk: What a layer has just computed.
        first: First query, 0 .. L - 1; the queries from it to the last one count.
        weigh: Called with a block's attention (B, K, G, R, S), the number of units that each of its queries sees,
            (1 or B, 1, 1, R, 1), and which queries of the L they are, (R, 1); returns what is summed instead. S leaves
            out units that none of these queries sees.

    Returns:
        (B, N, S) float32 sums of post-softmax attention, 0 where nobody may look.
    """
    batch, heads, new, _ = chunk.query.shape
    kv_heads, slots = chunk.key.shape[1:3]
    total = torch.zeros(batch, kv_heads, heads // kv_heads, slots, device=chunk.key.device)
    sinks = by_kv_head(chunk.learned_sinks, kv_heads)
    most = _LOGITS_GPU if chunk.query.is_cuda else _LOGITS_CPU
    step = max(_LEAST_ROWS, most // (batch * heads * slots))
    for start in range(first, new, step):
        end = min(start + step, new)
        weights = attention_weights(_logits(chunk, start, end), sinks)
        if weigh is not None:
            steps = torch.arange(start, end, device=weights.device)
            weights = weigh(weights, _visible(chunk, steps), steps[:, None])
        total[..., : weights.shape[-1]] += weights.sum(-2)
        del weights  # or it would be alive together with the next block
    return total.reshape(batch, heads, slots)


def last_logits(chunk: Chunk) -> Tensor:
    """Return (B, N, S) float32 logits of the last query, scaled and capped; -inf for empty slots."""
    return _logits(chunk, chunk.new_tokens - 1, chunk.new_tokens)[..., 0, :].flatten(1, 2)


def reduce_group(scores_BNS: Tensor, kv_heads: int, how: str) -> Tensor:
    """Return (B, K, S): the "mean", "max" or "sum" over the query heads of each KV head."""
    batch, _, slots = scores_BNS.shape
    grouped = scores_BNS.reshape(batch, kv_heads, -1, slots)
    if how == "max":
        return grouped.amax(2)
    return grouped.mean(2) if how == "mean" else grouped.sum(2)


def _logits(chunk: Chunk, start: int, end: int) -> Tensor:
    """Return (B, K, G, R, S) float32 logits of the queries start .. end - 1 over the units that the last one sees."""
    batch, heads, new, dim = chunk.query.shape
    kv_heads, slots = chunk.key.shape[1:3]
    seen = slots - new + end
    rows = chunk.query[:, :, start:end].reshape(batch, kv_heads, -1, dim)
    # Half-precision queries are scaled after the product, so that scaling rounds nothing.
    whole = rows.dtype == torch.float32
    product = (rows * chunk.scaling if whole else rows) @ chunk.key[:, :, :seen].transpose(-1, -2)
    logits = product if whole else product.float().mul_(chunk.scaling)
    if chunk.softcap is not None:
        logits = logits.div_(chunk.softcap).tanh_().mul_(chunk.softcap)
    logits = logits.view(batch, kv_heads, heads // kv_heads, end - start, seen)
    if end - start > 1:
        later = torch.ones(end - start, end - start, dtype=torch.bool, device=logits.device).triu(1)
        logits[..., start - end :].masked_fill_(later, -torch.inf)
    if chunk.padded:
        empty_BS = torch.arange(seen, device=logits.device) < chunk.row_start[:, None]
        logits.masked_fill_(empty_BS[:, None, None, None], -torch.inf)
    return logits


def _visible(chunk: Chunk, steps_R: Tensor) -> Tensor:
    """Return (1 or B, 1, 1, R, 1): how many units each of these queries sees."""
    visible_R = chunk.key.shape[2] - chunk.new_tokens + 1 + steps_R
    visible_BR = visible_R - chunk.row_start[:, None] if chunk.padded else visible_R[None]
    return visible_BR[:, None, None, :, None]
