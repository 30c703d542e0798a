"""Softmax with learned sinks: per query head a logit that takes its share of the attention and adds nothing (gpt-oss).

No fused kernel of PyTorch has them, so where a backbone has sinks attention is computed by products, a few rows at a
time, and this is the softmax of all of them: of what attends, of what scorers read, and of what values are fitted to.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attention_weights(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax over the last dimension, in float32.

    Args:
        logits: (..., S), -inf for what is not seen.
        sinks: Logits of the sinks, which broadcast against (..., 1); None: there are none.
    """
    if sinks is None:
        return logits.softmax(-1, dtype=torch.float32)
    logits = logits.float()
    return (logits - log_total(logits, sinks)).exp()


def log_total(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Return (..., 1): the logarithm of what `attention_weights` divides by."""
    total = logits.logsumexp(-1, keepdim=True)
    return total if sinks is None else torch.logaddexp(total, sinks.float())


def by_kv_head(sinks: Tensor | None, kv_heads: int) -> Tensor | None:
    """Return (N,) sinks as (K, N / K, 1, 1), beside logits (B, K, N / K, queries, S)."""
    return None if sinks is None else sinks.view(kv_heads, -1, 1, 1)
