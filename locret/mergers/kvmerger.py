"""KVMerger's weights: an evicted unit is added to the kept unit next to it, with a Gaussian weight of their keys.

Paper:     KVMerger, arXiv 2407.08454: neighbouring tokens with similar keys form a set, which is merged into its pivot.
Formula:   i joins the nearer by cosine of the two kept units next to it, p, if cos(k_i, k_p) >= 0.75;
           g_i = exp(-|k_p - k_i|^2 / (2 s_p^2)), s_p = mean over the set (p with distance 0 included) of
           |k_p - k_i| / sqrt(2); k_p = (k_p + sum_i g_i k_i) / (1 + sum_i g_i), values likewise.
Deviates:  pivots are the units that the scorer keeps, so the number of sets is the budget; the paper first cuts the
           text into sets by similarity and takes the unit with the most attention of each. Keys are compared and
           added before rotation, because kept keys change their rotary positions here.
Cost:      two similarities per evicted unit, and one product of evicted with kept units to add them up.
"""

# B batch, K KV heads, C kept units, G those that go

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from locret.mergers.base import Merged, Merger, Units, blocks, folded_in, take


@dataclass(frozen=True, kw_only=True)
class KVMerger(Merger):
    """Add an evicted unit to a kept neighbour with a similar key."""

    name: ClassVar[str] = "kvmerger"
    over_ranks: ClassVar[bool] = True

    threshold: float = 0.75
    """Least cosine similarity of keys that are merged (the paper's)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not -1 <= self.threshold <= 1:
            raise ValueError(f"threshold={self.threshold} is not a cosine; give -1 to 1, such as 0.75")

    def fold(self, units: Units, prepared: Any) -> Merged:
        """See `Merger`."""
        keys, gone_keys = take(units.keys, units.kept), take(units.keys, units.gone)
        after = torch.searchsorted(units.kept.contiguous(), units.gone.contiguous())
        sides = (after - 1).clamp_min(0), after.clamp_max(units.kept.shape[-1] - 1)
        alike = [self._alike(units, gone_keys, keys, side) for side in sides]
        target = torch.where(alike[0] >= alike[1], *sides)
        joins = torch.maximum(*alike) >= self.threshold
        distance = (gone_keys - take(keys, target)).norm(dim=-1)
        total, count = _sums(units, target, [joins * distance, joins.float()])
        spread = take(total / (count + 1), target) / math.sqrt(2)
        # Where all keys of a set are equal, so are their weights.
        weights = torch.where(spread > 0, (-(distance**2) / (2 * spread**2)).exp(), 1.0)
        return folded_in(units, target, torch.where(joins, weights, 0.0), own=1.0)

    @staticmethod
    def _alike(units: Units, gone_keys: Tensor, keys: Tensor, side: Tensor) -> Tensor:
        """Return (B, K, G) cosines with the kept unit on one side; -inf where a slot is empty."""
        alike = cosine_similarity(gone_keys, take(keys, side), dim=-1)
        kept_positions = take(units.positions, units.kept)
        empty = (take(kept_positions, side) < 0) | (take(units.positions, units.gone) < 0)
        return alike.masked_fill(empty, -torch.inf)


def _sums(units: Units, target: Tensor, numbers: list[Tensor]) -> Tensor:
    """Return (len(numbers), B, K, C): the sums of (B, K, G) numbers over the units that share a target."""
    stacked = torch.stack(numbers)
    sums = stacked.new_zeros(len(numbers), *units.kept.shape)
    slots = torch.arange(units.kept.shape[-1], device=target.device)
    for block in blocks(units):
        mine = (target[..., block, None] == slots).to(stacked.dtype)
        sums += (stacked[..., None, block] @ mine)[..., 0, :]
    return sums
