"""SAGE-KV: the last token of the prompt selects once, query head by query head; answers roll a recent window.

Paper:     SAGE-KV, arXiv 2503.08879, section 3.
Formula:   B/4 first units, B/4 newest units, and of those between, per query head, the B/(2G) with the largest
           q_last . k; the lists of a group are joined, and filled up to B/2 by the largest of the group's
           log-softmax. Generated tokens enter the recent window, and its oldest unit leaves first.
Deviates:  the paper selects after a whole prompt (when="prompt_end"); by chunks, the last query of each one selects.
           It does not say what becomes of a unit in several lists: here it is held once, and the places go to the next
           best. Holding it several times (concatenated lists) would attend to it several times, which no cache of
           distinct units can do; it is not offered.
Cost:      one row of attention and a sort per chunk; nothing while answering.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from locret.backbone.attention import by_kv_head, log_total
from locret.backbone.chunk import Chunk
from locret.base.fields import SHARE, Range
from locret.scorers.attention_rows import last_logits
from locret.scorers.base import RevisingScorer

_BELOW_ALL = 2.0**24
"""Recent units score their position less this, exact in float32 for texts of 16 million tokens."""
_SINK = 3.0


@dataclass(frozen=True, kw_only=True)
class SageKVScorer(RevisingScorer):
    """Keep what the prompt's last token looks at, every query head on its own."""

    name: ClassVar[str] = "sage_kv"
    ranges = {"sink_share": SHARE, "recent_share": SHARE, "k": Range(0)}

    sink_share: float = 0.25
    """Share of the budget for the first tokens (the paper: a quarter)."""
    recent_share: float = 0.25
    """Share of the budget for the newest units (the paper: a quarter; 2,560 of 8,192 for Qwen2.5)."""
    k: int | None = None
    """Units in the list of each query head; none: an equal part of what sinks and newest units leave (the paper: 1,024
    of 8,192 for Llama-3, 512 for Qwen2.5). Places that shorter lists leave go to the next best units."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sink_share + self.recent_share > 1:
            self.refuse(
                f"sink_share={self.sink_share} and recent_share={self.recent_share} are more than the budget; lower "
                "one of them"
            )

    def recent(self, budget: int) -> int:
        return int(budget * self.recent_share)

    def sink_tokens(self, budget: int, recent: int) -> int:
        """Return the first part; where the policy protects more recent units, the selection gives way."""
        return max(0, min(int(budget * self.sink_share), budget - recent))

    def score(self, chunk: Chunk) -> Tensor:
        """Return scores (B, K, S) where units are selected, else (B, K, L): new units enter the recent window."""
        batch, kv_heads = chunk.key.shape[:2]
        if chunk.generating or not chunk.selects:
            return (chunk.positions.float() - _BELOW_ALL).expand(batch, kv_heads, -1)
        return self._selected(chunk)

    def _selected(self, chunk: Chunk) -> Tensor:
        positions, (kv_heads, slots) = chunk.unit_positions, chunk.key.shape[1:3]
        places = chunk.budget - chunk.recent - chunk.sinks
        newest = torch.arange(slots, device=positions.device) >= slots - chunk.recent
        first = (positions >= 0) & (positions < chunk.sinks)
        between = (positions >= 0) & ~first & ~newest
        logits = last_logits(chunk).unflatten(1, (kv_heads, -1))
        group = logits.shape[2]
        each = min(places // group if self.k is None else self.k, slots)
        lists = logits.masked_fill(~between[:, :, None], -torch.inf).topk(each, dim=-1).indices
        listed = torch.zeros_like(between).scatter_(-1, lists.flatten(2), True) & between
        # 1 / (1 - x) keeps the order of log-probabilities and lies in 0 .. 1, between recent and listed units.
        learned = by_kv_head(chunk.learned_sinks, kv_heads)
        log_weights = logits - log_total(logits, None if learned is None else learned[..., 0])
        best = 1 / (1 - log_weights.amax(2))
        scores = torch.where(newest & ~first, positions.float() - _BELOW_ALL, best + listed)
        # Sinks come before listed units while answering too, when the budget may be smaller.
        return scores.masked_fill(first, _SINK)
