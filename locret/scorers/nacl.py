"""NACL: units that proxy queries attend to, and units drawn by lot, stay, as do the first and the newest ones.

Paper:     NACL, arXiv 2408.03675, sections 3.1 and 3.2, Table 4.
Formula:   s[j] = sum over the proxies, the last queries, of softmax(q . k / sqrt(D))[j], summed over the group. Of
           `budget` units, `protect_share` stay by right (sinks and newest), `random_share` are drawn without
           replacement with P proportional to softmax(s) from those that s does not choose, s chooses the others.
Deviates:  the paper selects once, after a whole prompt (when="prompt_end"); by chunks, proxies are the last queries of
           each chunk. While answering, the newest token is the only proxy, every `decode_interval` tokens. Draws are a
           function of seed, layer, KV head and position (Gumbel top-k), so that chunks and batches do not matter. The
           official code never evicts while answering, scores KV head j by query head j alone, lets proxies see later
           proxies, and breaks below 25,600 tokens, where its recent window vanishes; none of that is repeated here.
Cost:      `proxy_share` of the chunk's rows of attention, and two sorts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from locret.backbone.adapters import ranks_of
from locret.backbone.chunk import Chunk
from locret.base.fields import SHARE, Range
from locret.base.warned import warn_user
from locret.scorers.attention_rows import attention_sums, reduce_group
from locret.scorers.base import RevisingScorer
from locret.scorers.random import SEED, uniform_draw


@dataclass(frozen=True, kw_only=True)
class NACLScorer(RevisingScorer):
    """Keep what proxies look at, and a random sample of the rest."""

    name: ClassVar[str] = "nacl"
    ranges = {
        **dict.fromkeys(("proxy_share", "protect_share", "random_share"), SHARE),
        "most_proxies": Range(1),
        "most_sinks": Range(0),
        "seed": SEED,
    }

    proxy_share: float = 0.1
    """Proxies, as a share of the chunk, or of the prompt at its end (the paper: about 0.1 is best; its code: 0.01)."""
    most_proxies: int = 256
    """Most proxies, whatever `proxy_share` asks for; with when="prompt_end" that many tokens are read in one pass."""
    protect_share: float = 0.1
    """Share of the budget for the first and the newest units (Table 4: 0.05 to 0.1), half of it at most for sinks."""
    random_share: float = 0.7
    """Share of the budget that is drawn by lot (the paper: 0.7 is best; its code: 0.35)."""
    most_sinks: int = 256
    """Most first units that stay by right, out of the protected share (the paper's code: 256)."""
    seed: int = 0
    """Seed of the draw."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.random_share == 0:
            self.check_effect("a random_share above 0", "seed")

    @property
    def lookback(self) -> int:
        return self.most_proxies

    def recent(self, budget: int) -> int:
        """Return the newest units that stay: what the sinks leave of the protected share, at least one."""
        return max(1, int(budget * self.protect_share) - self.sink_tokens(budget, 0))

    def sink_tokens(self, budget: int, recent: int) -> int:
        """Return the sinks: half of the protected share at most."""
        return min(self.most_sinks, int(budget * self.protect_share) // 2)

    def _proxies(self, chunk: Chunk) -> int:
        tokens = chunk.new_tokens
        if chunk.last:
            tokens = int(chunk.positions.max()) + 1
        wanted = math.ceil(self.proxy_share * tokens)
        if wanted > self.most_proxies:
            warn_user(
                f"scorer {self.name}: proxy_share={self.proxy_share:g} asks for more than most_proxies="
                f"{self.most_proxies} queries, and gets so many; raise most_proxies, or lower proxy_share"
            )
        return max(1, min(wanted, self.most_proxies, chunk.new_tokens))

    def prepare(self, model: nn.Module) -> int:
        """Return which process this is of those that share the KV heads, from 0."""
        ranks = ranks_of(model)
        return 0 if ranks is None else ranks.rank

    def score(self, chunk: Chunk) -> Tensor:
        """Return scores (B, K, S): the proxies' attention, raised for units that stay by score or by lot."""
        kv_heads, slots = chunk.key.shape[1:3]
        sums_BNS = attention_sums(chunk, chunk.new_tokens - self._proxies(chunk))
        sums_BKS = reduce_group(sums_BNS, kv_heads, "sum")
        return self._selected(chunk, sums_BKS) if slots > chunk.budget else sums_BKS

    def _selected(self, chunk: Chunk, sums_BKS: Tensor) -> Tensor:
        positions, pinned, budget = chunk.unit_positions, chunk.pinned, chunk.budget
        free = (positions >= 0) & ~pinned
        places = (budget - pinned.sum(-1, keepdim=True)).clamp_min(0)
        # What the policy protects beyond the method's own share comes off before the budget is split.
        own = budget - (chunk.recent - self.recent(budget))
        by_lot = places.clamp_max(round(self.random_share * own))
        best = free & (_ranks(sums_BKS.masked_fill(~free, -torch.inf)) < places - by_lot)
        first = (chunk.prepared or 0) * positions.shape[1]
        draw = uniform_draw(positions, self.seed, chunk.layer_idx, positions.shape[1], first).clamp_min(2.0**-32)
        luck = sums_BKS - torch.log(-torch.log(draw))
        drawn = free & ~best & (_ranks(luck.masked_fill(~free | best, -torch.inf)) < by_lot)
        above_all = sums_BKS.amax(-1, keepdim=True) + 1
        scores = torch.where(best | drawn, sums_BKS + above_all, sums_BKS)
        # Sinks come first while answering too, when the budget, and the sinks' share of it, may be smaller.
        return torch.where((positions >= 0) & (positions < chunk.sinks), sums_BKS + 2 * above_all, scores)


def _ranks(values_BKS: Tensor) -> Tensor:
    """Return (B, K, S) int64: 0 for the largest; among equals the newer one ranks first."""
    order = values_BKS.flip(-1).argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places).flip(-1)
