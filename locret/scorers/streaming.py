"""StreamingLLM: the first tokens (attention sinks) and the most recent ones stay.

Paper:     StreamingLLM, arXiv 2309.17453, section 3.2.
Formula:   s = position; the first tokens stay.
Deviates:  eviction follows every chunk instead of preceding every token; budget = sinks + window.
Cost:      none. Runs with compact positions (the official form) or original ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from locret.backbone.chunk import Chunk
from locret.base.fields import SHARE, Range
from locret.scorers.base import Scorer


@dataclass(frozen=True, kw_only=True)
class StreamingScorer(Scorer):
    """Keep the first and the most recent tokens."""

    name: ClassVar[str] = "streaming"
    over_ranks: ClassVar[bool] = True
    ranges = {"sinks": Range(0), "sink_share": SHARE}

    sinks: int = 4
    """First tokens of the text that always stay (the paper: 4)."""
    sink_share: float = 0.0
    """Share of the budget for first tokens, where that is more than `sinks` (OmniKV: 1 % of the prompt, 1/30 of a
    budget of 30 %)."""

    def sink_tokens(self, budget: int, recent: int) -> int:
        return max(self.sinks, int(self.sink_share * budget))

    def score(self, chunk: Chunk) -> Tensor:
        """Return scores (B, K, L)."""
        batch, kv_heads = chunk.key.shape[:2]
        return chunk.positions.float().expand(batch, kv_heads, -1)
