"""H2O: units that have gathered the most attention so far, the heavy hitters, and the most recent ones stay.

Paper:     H2O, arXiv 2306.14048, Algorithm 1.
Formula:   s[j] = sum over all queries i that saw j of softmax(q_i . k / sqrt(D))[j], reduced over the group.
           accumulate=False: the sum over the queries of the last chunk alone (the heavy hitters of LoCoCo).
Deviates:  eviction follows every chunk instead of every token (the official real-drop code: the whole prompt), by what
           has been accumulated over all chunks; the official code has one KV head per query head, so no reduction.
Cost:      one more product and softmax over chunk x units, in blocks; a unit's score grows with every later query.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from locret.backbone.chunk import Chunk
from locret.base.fields import SHARE
from locret.scorers.attention_rows import REDUCTIONS, attention_sums, reduce_group
from locret.scorers.base import RevisingScorer


@dataclass(frozen=True, kw_only=True)
class H2OScorer(RevisingScorer):
    """Keep what has been attended most."""

    name: ClassVar[str] = "h2o"
    by_head: ClassVar[bool] = True
    ranges = {"reduce": REDUCTIONS, "recent_share": SHARE}

    reduce: str = "mean"
    """How the query heads of a KV head vote: "mean" (kvpress, KVCache-Factory), "max" (OmniKV) or "sum"."""
    recent_share: float = 0.5
    """Share of the budget that goes to the newest units (the paper: half); 0 leaves them to the policy alone."""
    accumulate: bool = True
    """Count the queries of all chunks (the paper), not only those of the last one (LoCoCo, arXiv 2406.05317)."""

    def recent(self, budget: int) -> int:
        return int(budget * self.recent_share)

    def score(self, chunk: Chunk) -> Tensor:
        """Return scores (B, K, S): attention accumulated until now."""
        totals = reduce_group(attention_sums(chunk), chunk.key.shape[1], self.reduce)
        if self.accumulate:
            totals[:, :, : -chunk.new_tokens] += chunk.stored_scores
        return totals
