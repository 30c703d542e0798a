"""TOVA (also called MSRNN): what the newest token attends to stays, the same units in all heads of a layer.

Paper:     TOVA, arXiv 2401.06104, section 3.
Formula:   s[j] = mean over all query heads of softmax(q_last . k / sqrt(D))[j].
Deviates:  eviction follows every chunk, by its last query, as the official code does with a prompt given in pieces.
Cost:      one row of attention per forward pass. Every pass rates all units anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from locret.backbone.adapters import ranks_of
from locret.backbone.chunk import Chunk
from locret.backbone.head_ranks import HeadRanks
from locret.base.fields import Range
from locret.scorers.attention_rows import attention_sums
from locret.scorers.base import RevisingScorer


@dataclass(frozen=True, kw_only=True)
class TOVAScorer(RevisingScorer):
    """Keep what the newest token looks at."""

    name: ClassVar[str] = "tova"
    ranges = {"keep_recent": Range(0)}

    keep_recent: int = 0
    """Newest units that stay whatever their score (the paper: none; kvpress: 1). A policy's stabilizers and local
    tokens come before this."""

    def prepare(self, model: nn.Module) -> HeadRanks | None:
        return ranks_of(model)

    def score(self, chunk: Chunk) -> Tensor:
        """Return scores (B, K, S), equal in all KV heads."""
        last_BNS = attention_sums(chunk, chunk.new_tokens - 1)
        mean_B1S = last_BNS.mean(1, keepdim=True)
        if chunk.prepared is not None:
            mean_B1S = chunk.prepared.mean(mean_B1S)
        return mean_B1S.expand(-1, chunk.key.shape[1], -1)
