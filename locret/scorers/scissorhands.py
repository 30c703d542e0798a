"""Scissorhands: units that recent queries have often looked past go first.

Paper:     Scissorhands, arXiv 2305.17118, Algorithm 2.
Formula:   s[j] = - number of the last `history` queries i with softmax(q_i . k)[j] < 1 / (units that i sees), summed
           over the group; the `keep_recent` newest units stay.
Deviates:  the paper rates token by token and frees half the budget at once; here that is the chunk, or the policy's
           decode_interval. In passes shorter than the history, a query counts (1 - 1 / history) times as much with
           every query after it, instead of leaving after `history` of them: the same weight in all, and no record of
           units x history, nor does it matter how tokens are split among such passes. The group is undefined there.
Cost:      `history` rows of attention per chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from locret.backbone.chunk import Chunk
from locret.base.fields import Range
from locret.scorers.attention_rows import attention_sums, reduce_group
from locret.scorers.base import RevisingScorer


@dataclass(frozen=True, kw_only=True)
class ScissorhandsScorer(RevisingScorer):
    """Drop what was looked past most often."""

    name: ClassVar[str] = "scissorhands"
    by_head: ClassVar[bool] = True
    ranges = {"history": Range(1), "keep_recent": Range(0)}

    history: int = 400
    """Last queries whose attention counts (the paper: 400)."""
    keep_recent: int = 10
    """Newest units that stay (the paper: 10)."""

    @property
    def lookback(self) -> int:
        return self.history

    def score(self, chunk: Chunk) -> Tensor:
        """Return scores (B, K, S): minus the counts of low attention."""
        new, (kv_heads, slots) = chunk.new_tokens, chunk.key.shape[1:3]
        first, fade = max(0, new - self.history), 1 - 1 / self.history
        whole = new >= self.history

        def heeded(weights: Tensor, visible: Tensor, steps: Tensor) -> Tensor:
            events = (weights >= 1 / visible).float()
            return events if whole else events.mul_(fade ** (new - 1 - steps))

        scores = reduce_group(attention_sums(chunk, first, weigh=heeded), kv_heads, "sum")
        # Queries of this pass that see a unit either heed it or look past it; query i is at slot S - L + i.
        steps = torch.arange(slots, device=scores.device) - (slots - new)
        observers_S = new - steps.clamp_min(first)
        if not whole:
            observers_S = (1 - fade**observers_S) * self.history
            scores[:, :, : slots - new] += chunk.stored_scores * fade**new
        return scores - observers_S * (chunk.query.shape[1] // kv_heads)
