"""Block means: each query recalls the blocks of the second tier whose mean key it would attend to the most.

Paper:     the simplest representative of a block; InfLLM (arXiv 2402.04617) takes the mean of a few chosen keys.
Formula:   per KV head the blocks with the largest q . mean(k) of any query head of its group.
Deviates:  blocks are of units that were evicted, not of consecutive tokens; the last block is cut to what is asked for.
Cost:      an index of 1 / page of the keys is read for each query; no key is read that is not recalled.
"""

# B batch, N query heads, K KV heads, G query heads per KV head, L queries, H units of the tier, P blocks, D head dim

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from locret.lookups.base import Ask, Keys, Lookup
from locret.lookups.pages import check_page, in_pages, units_first, units_of_best


@dataclass(frozen=True, kw_only=True)
class MeansLookup(Lookup):
    """Recall the blocks whose mean key has the largest logit."""

    name: ClassVar[str] = "means"
    over_ranks: ClassVar[bool] = True

    page: int = 4
    """Units of a block."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_page(self.name, self.page)

    def index(self, keys: Keys, positions: Tensor) -> Tensor:
        """Return (B, K, P, D) mean keys."""
        means = []
        for part, empty in units_first(keys, positions, self.page):
            counts = in_pages((~empty).to(part.dtype), self.page, 0).sum(3)
            means.append(in_pages(part.masked_fill(empty, 0), self.page, 0).sum(3) / counts.clamp_min(1))
        return torch.cat(means, dim=2)

    def index_bytes(self, units: int, head_dim: int, element_size: int) -> int:
        """Return the bytes of the means."""
        return -(-units // self.page) * head_dim * element_size

    def choose(self, ask: Ask) -> Tensor:
        """See `Lookup`; ranks are (B, K, L, R)."""
        means: Tensor = ask.index
        query = ask.query.to(means.device).unflatten(1, (means.shape[1], -1))  # (B, K, G, L, D)
        ratings = (query @ means[:, :, None].transpose(-1, -2)).amax(2)
        return units_of_best(ratings, ask.positions, self.page, ask.count)
