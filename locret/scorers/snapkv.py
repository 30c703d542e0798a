"""SnapKV: units that the last queries, the observation window, attend to, and their neighbours, stay.

Paper:     SnapKV, arXiv 2404.14469, Algorithm 1; `queries="chunk"`: IMDC's pruner of that name.
Formula:   s[j] = pool over slots of the sum over the window's queries of softmax(q . k / sqrt(D))[j], then the group's.
           queries="chunk": the sum over all queries of the chunk, average-pooled, over the queries that saw j.
Deviates:  the paper compresses once, after a whole prompt (when="prompt_end"); by chunks, the window is the last
           queries of each chunk. Slots pooled together are neighbours in the cache, after an eviction not in the text.
           The official code stores every query head's own selection; here the group decides together (as in kvpress).
Cost:      `window` rows of attention per chunk (all rows: "chunk"). Generated tokens are not rated, and score 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from locret.backbone.chunk import Chunk
from locret.base.fields import Range
from locret.scorers.attention_rows import REDUCTIONS, attention_sums, reduce_group
from locret.scorers.base import RevisingScorer


@dataclass(frozen=True, kw_only=True)
class SnapKVScorer(RevisingScorer):
    """Keep what the last queries look at, and its neighbours."""

    name: ClassVar[str] = "snapkv"
    rates_answers: ClassVar[bool] = False
    by_head: ClassVar[bool] = True
    ranges = {
        "window": Range(1),
        "kernel": Range(1, 2**20),
        "sinks": Range(0),
        "pooling": ("avg", "max"),
        "reduce": REDUCTIONS,
        "queries": ("window", "chunk"),
    }

    window: int = 32
    """Last queries that vote; their own units stay by right (official default and LongBench configuration: 32)."""
    kernel: int = 5
    """Slots pooled together, odd; 1 pools nothing (official default: 5; its LongBench configurations: 7)."""
    pooling: str = "avg"
    """"avg" (official default) or "max" (its LongBench configurations)."""
    reduce: str = "mean"
    """How the query heads of a KV head vote: "mean" (kvpress), "max" or "sum" (IMDC)."""
    queries: str = "window"
    """Who votes: the "window"; or all queries of the "chunk", none of them kept by right (IMDC)."""
    sinks: int = 0
    """First tokens of the text that always stay (the paper: none; IMDC: 4)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel % 2 == 0:
            self.refuse(f"kernel={self.kernel} has no middle slot; choose an odd number")
        if self.kernel == 1:
            self.check_effect("a kernel above 1", "pooling")

    @property
    def lookback(self) -> int:
        return self.window

    def recent(self, budget: int) -> int:
        return self.window if self.queries == "window" else 0

    def score(self, chunk: Chunk) -> Tensor:
        """Return scores (B, K, S); (B, K, L) zeros where nothing is selected by them."""
        batch, kv_heads, slots = chunk.key.shape[:3]
        new = chunk.new_tokens
        if not (chunk.selects or chunk.last):
            return torch.zeros(batch, kv_heads, new, device=chunk.key.device)
        if self.queries == "chunk":
            sums_BNS = self._pooled(attention_sums(chunk))
            observers_S = torch.full((slots,), float(new), device=sums_BNS.device)
            observers_S[slots - new :] -= torch.arange(new, device=sums_BNS.device)
            return reduce_group(sums_BNS / observers_S, kv_heads, self.reduce)
        window = min(self.window, new)
        sums_BNS = attention_sums(chunk, new - window)
        # The window's own columns are partly filled and stay anyway; they must not leak into what lies before them.
        before = slots - window
        sums_BNS[..., :before] = self._pooled(sums_BNS[..., :before])
        return reduce_group(sums_BNS, kv_heads, self.reduce)

    def _pooled(self, sums_BNS: Tensor) -> Tensor:
        if self.kernel == 1 or not sums_BNS.shape[-1]:
            return sums_BNS
        pool = F.avg_pool1d if self.pooling == "avg" else F.max_pool1d
        return pool(sums_BNS, self.kernel, stride=1, padding=self.kernel // 2)
