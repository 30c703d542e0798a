"""Page bounds: each query recalls the pages of the second tier that could hold the largest logits.

Paper:     Quest (ICML 2024), arXiv 2406.10774, section 3.3.
Formula:   u = sum_d max(q_d low_d, q_d high_d), with a page's smallest and largest key, channel by channel.
Deviates:  one choice per KV head (its group's largest bound) and exactly as many units as asked for, the last page cut;
           pages are of units that were evicted, not of consecutive tokens. `quest` is the paper's own.
Cost:      an index of 2 / page of the keys is read for each query; no key is read that is not recalled.
"""

# B batch, N query heads, K KV heads, G query heads per KV head, L queries, H units of the tier, P pages, D head dim

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from locret.lookups.base import Ask, Keys, Lookup, blocks, keys_at, spans

_BOUNDS = 1 << 24
"""Bounds that exist at once, over all heads."""


class Bounds(NamedTuple):
    """Pages of a second tier."""

    low: Tensor
    """(B, K, P, D) smallest keys, channel by channel."""
    high: Tensor


@dataclass(frozen=True, kw_only=True)
class PagesLookup(Lookup):
    """Recall the pages whose keys could have the largest logits."""

    name: ClassVar[str] = "pages"
    over_ranks: ClassVar[bool] = True

    page: int = 16
    """Units of a page (Quest: 16)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_page(self.name, self.page)

    def index(self, keys: Keys, positions: Tensor) -> Bounds:
        """Return the bounds of all pages."""
        lows, highs = [], []
        for part, empty in units_first(keys, positions, self.page):
            low = in_pages(part.masked_fill(empty, torch.inf), self.page, torch.inf).amin(3)
            high = in_pages(part.masked_fill(empty, -torch.inf), self.page, -torch.inf).amax(3)
            lows.append(low.nan_to_num(posinf=0.0))  # pages without a unit are never chosen
            highs.append(high.nan_to_num(neginf=0.0))
        return Bounds(torch.cat(lows, dim=2), torch.cat(highs, dim=2))

    def index_bytes(self, units: int, head_dim: int, element_size: int) -> int:
        """Return the bytes of the bounds."""
        return 2 * -(-units // self.page) * head_dim * element_size

    def choose(self, ask: Ask) -> Tensor:
        """See `Lookup`; ranks are (B, K, L, R)."""
        low, high = (bound[:, :, None].transpose(-1, -2) for bound in ask.index)
        query = ask.query.to(ask.keys.device).unflatten(1, (ask.keys.shape[1], -1))  # (B, K, G, L, D)
        rows, found = max(1, _BOUNDS // (query[..., 0, 0].numel() * low.shape[-1])), []
        for block in query.split(rows, dim=3):
            ratings = (block.clamp_min(0) @ high + block.clamp_max(0) @ low).amax(2)
            found.append(units_of_best(ratings, ask.positions, self.page, ask.count))
        return torch.cat(found, dim=2)


def check_page(name: str, page: int) -> None:
    """Refuse a page without units.

    Raises:
        ValueError: Naming it.
    """
    if page < 1:
        raise ValueError(f"lookup {name}: page={page} is too small; it must be 1 or more")


def units_first(keys: Keys, positions: Tensor, page: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield keys and, (B, K, units, 1), which of them are none, by whole pages.

    Empty slots of short rows are behind the units, so that pages begin with a unit.
    """
    units, empty = positions.shape[-1], (positions < 0).sum(-1, keepdim=True)
    slots = torch.arange(units, device=positions.device)
    if not empty.any():
        for span, part in blocks(keys, page):
            yield part, (slots[span] < 0)[None, None, :, None]
        return
    for span in spans(keys, page):
        yield keys_at(keys, (slots[span] + empty) % units), (slots[span] >= units - empty)[..., None]


def in_pages(keys: Tensor, page: int, padding: float) -> Tensor:
    """Return (B, K, H, D) keys as (B, K, P, page, D); the last page is filled up with `padding`."""
    missing = -keys.shape[2] % page
    if missing:
        keys = torch.cat([keys, keys.new_full((*keys.shape[:2], missing, keys.shape[3]), padding)], dim=2)
    pages: Tensor = keys.unflatten(2, (-1, page))
    return pages


def units_of_best(ratings: Tensor, positions: Tensor, page: int, count: int) -> Tensor:
    """Return the units of the best pages, as many as asked for: the last page is cut.

    Args:
        ratings: (B, K, L, P) of the pages, larger is better.
        positions: (B, K, H) of the units; -1 for what is none, in front of short rows.
        page: Units of a page.
        count: Units for each query and KV head, at most H.

    Returns:
        (B, K, L, count) int64 ranks, those of no unit last.
    """
    units, empty = positions.shape[-1], (positions < 0).sum(-1)[:, :, None, None]
    slots = torch.arange(-(-units // page) * page, device=positions.device).unflatten(0, (-1, page))
    ratings = ratings.masked_fill(slots[:, 0] >= units - empty, -torch.inf)
    pages = ratings.topk(min(-(-count // page) + 1, ratings.shape[-1]), dim=-1).indices  # the last page may be short
    ranks: Tensor = (pages[..., None] * page + slots[0]).flatten(3)
    order = (ranks >= units - empty).int() + (ranks >= units).int()
    ranks = ranks.gather(3, order.sort(dim=3, stable=True).indices[..., :count])
    return (ranks + empty) % units
