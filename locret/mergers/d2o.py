"""D2O's compensation: an evicted unit is added to the kept unit whose key is most like its own, if it is alike enough.

Paper:     D2O, arXiv 2406.13035, section 3.3 "token-level": nearest neighbours by cosine, a threshold, and weights that
           are the softmax of the similarities, with the kept unit's own similarity of 1 among them.
Formula:   u_ij = cos(k_i, k_j) for evicted i and kept j; j(i) = argmax_j u_ij; i is folded in if u_ij(i) >= t.
           k_j = (e k_j + sum_i exp(u_ij) k_i) / (e + sum_i exp(u_ij)) over the i with j(i) = j; values likewise.
Deviates:  keys are compared and added before rotation, because kept keys change their rotary positions here. The
           threshold is the mean of max_j u_ij over the units of this eviction, as in the paper's prompt phase: a chunk
           evicts many units at once, so the paper's moving average over single generated tokens has nothing to smooth.
           The budgets of layers are the policy's (`layer_budgets`), not the variance of attention.
Cost:      one product of evicted with kept keys per eviction, a block of evicted units at a time.
"""

# B batch, K KV heads, S units held, C kept ones, G those that go, b those of a block, D head dim

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from locret.mergers.base import Merged, Merger, Units, blocks, folded_in, take


@dataclass(frozen=True, kw_only=True)
class D2OMerger(Merger):
    """Add an evicted unit to the kept one with the most similar key."""

    name: ClassVar[str] = "d2o"
    over_ranks: ClassVar[bool] = True

    threshold: float | None = None
    """Least cosine similarity of keys that are merged; none: the mean of the best ones in each eviction (the
    paper's)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold is not None and not -1 <= self.threshold <= 1:
            raise ValueError(f"threshold={self.threshold} is not a cosine; give -1 to 1, such as 0.5, or leave it out")

    def fold(self, units: Units, prepared: Any) -> Merged:
        """See `Merger`."""
        alike, nearest = self._nearest(units)
        folded = alike >= self._threshold(alike)
        return folded_in(units, nearest, torch.where(folded, alike.clamp_min(-1).exp(), 0.0), own=math.e)

    def _nearest(self, units: Units) -> tuple[Tensor, Tensor]:
        """Return (B, K, G) each: the largest similarity, -inf for empty slots, and the kept slot it is with."""
        unit_keys = normalize(units.keys, dim=-1)
        kept_BKCD = take(unit_keys, units.kept)
        empty_BK1C = take(units.positions, units.kept)[:, :, None] < 0
        alike, nearest = torch.empty(units.gone.shape, device=kept_BKCD.device), torch.empty_like(units.gone)
        for block in blocks(units):
            similar = take(unit_keys, units.gone[..., block]) @ kept_BKCD.transpose(-1, -2)
            best = similar.masked_fill(empty_BK1C, -torch.inf).max(-1)
            alike[..., block], nearest[..., block] = best.values, best.indices
        return alike.masked_fill(take(units.positions, units.gone) < 0, -torch.inf), nearest

    def _threshold(self, alike_BKG: Tensor) -> Tensor:
        """Return (B, K, 1)."""
        if self.threshold is not None:
            return torch.full_like(alike_BKG[..., :1], self.threshold)
        real = alike_BKG > -torch.inf
        return torch.where(real, alike_BKG, 0.0).sum(-1, keepdim=True) / real.sum(-1, keepdim=True).clamp_min(1)
