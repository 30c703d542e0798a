"""Quest: pages of consecutive tokens, rated by a bound of what any of their keys could have as a logit.

Paper:     Quest (ICML 2024), arXiv 2406.10774, section 3.3.
Formula:   u = sum_d max(q_d low_d, q_d high_d) with the page's smallest and largest key, channel by channel; every
           query head attends to its own min(max(3, units // page), pages) best pages.
Deviates:  pages are those of the prompt; generated tokens, and the newest of the prompt, are in none and always seen.
Cost:      one product with 2 / page of the keys per query; pages are moved whole. The first layers are dense.
"""

# B batch, N query heads, K KV heads, H units of the tier, P pages, R recalled units, D head dim

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from locret.base.fields import Range
from locret.lookups.base import WHOLE, Ask, Keys, Lookup, blocks


class _Pages(NamedTuple):
    low: Tensor
    """(B, K, P, D) smallest keys."""
    high: Tensor
    first: list[int]
    """Empty slots in front of each row: its pages begin behind them."""
    counts: list[int]
    """Pages of each row."""


@dataclass(frozen=True, kw_only=True)
class QuestLookup(Lookup):
    """Recall the pages whose keys could have the largest logits (Quest)."""

    name: ClassVar[str] = "quest"
    over_ranks: ClassVar[bool] = True
    reading: ClassVar[bool] = True
    ranges = {"page": Range(1), "tokens": Range(1), "dense": Range(0)}

    page: int = 16
    """Tokens of a page (16)."""
    tokens: int | None = None
    """Units that each query head attends to, in whole pages and at least three; none: as many as recall says."""
    dense: int = 2
    """First layers, which attend to everything (2); their units stay in fast memory."""
    last_page: bool = False
    """Whether the last page is always one of those chosen, as Quest's kernels have it."""

    def resident(self, nth: int, layers: int) -> bool:
        if self.dense >= layers:
            self.refuse(f"dense={self.dense} leaves no layer of {layers} to choose pages in; lower dense")
        return nth < self.dense

    def as_method(self) -> dict[str, Any]:
        return {**WHOLE, "recall": self.tokens or 1024}

    def index(self, keys: Keys, positions: Tensor) -> _Pages:
        units = keys.shape[2]
        first = (positions[:, 0] < 0).sum(-1).tolist()
        counts = [-(-(units - start) // self.page) for start in first]
        bounds: list[Tensor] = []
        for row, start in enumerate(first):
            done = 0
            for _, part in blocks(keys, self.page, start):
                if not bounds:
                    bounds = [part.new_zeros(*keys.shape[:2], max(counts), keys.shape[3]) for _ in range(2)]
                # The last page is filled up with its last key, which changes no bound.
                own, missing = part[row], -part.shape[2] % self.page
                filled = torch.cat([own, own[:, -1:].expand(-1, missing, -1)], dim=1).unflatten(1, (-1, self.page))
                pages = slice(done, done + filled.shape[1])
                bounds[0][row, :, pages], bounds[1][row, :, pages] = filled.amin(2), filled.amax(2)
                done = pages.stop
        return _Pages(bounds[0], bounds[1], first, counts)

    def choose(self, ask: Ask) -> Tensor | None:
        """See `Lookup`; ranks are (B, N, 1, R)."""
        if not ask.generating or ask.fed or ask.nth < self.dense:
            return None
        found: _Pages = ask.index
        batch, heads, units = len(ask.query), ask.query.shape[1], ask.keys.shape[2]
        query = ask.query[:, :, -1].to(ask.keys.device).unflatten(1, (ask.keys.shape[1], -1))
        bounds = query.clamp_min(0) @ found.high.transpose(-1, -2) + query.clamp_max(0) @ found.low.transpose(-1, -2)
        bounds = bounds.flatten(1, 2).float()  # (B, N, P)
        for row, pages in enumerate(found.counts):
            bounds[row, :, pages:] = -torch.inf
            if self.last_page:
                bounds[row, :, pages - 1] = torch.inf
        tokens, wanted = self.tokens or ask.count, bounds.shape[-1]
        if tokens < units:
            wanted = min(max(3, tokens // self.page), wanted)
        chosen = bounds.topk(wanted, dim=-1).indices.sort(dim=-1).values
        first = torch.tensor(found.first, device=chosen.device)[:, None, None, None]
        within = torch.arange(min(self.page, units), device=chosen.device)
        ranks: Tensor = first + chosen[..., None] * self.page + within
        return ranks.masked_fill(ranks >= units, -1).view(batch, heads, 1, -1)
