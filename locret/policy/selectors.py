"""The one place where it is decided which cache units stay, and the names of what is decided."""

# B batch, K KV heads, S slots, C kept slots, U units of all heads of a row

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from locret.backbone.chunk import counting, pinned_units
from locret.policy.protection import Guarantee
from locret.policy.sizes import EVERY_UNIT, divided

SAMPLED, BEST = 0.5, 8
"""KV heads with a smaller share keep a sample, and so many best units."""
_CIRCLE, _GOLDEN = 2**32, 2654435769
"""A circle in whole numbers, and its part that divides it by the golden ratio."""
_INT32_MAX = 2**31 - 1


class Stay(NamedTuple):
    """How many units of a layer stay, and which of them whatever their score."""

    budget: int
    """Units per KV head, on average."""
    recent: int
    """Newest of them that stay whatever their score."""
    sinks: int
    """First tokens of the text whose units stay whatever their score."""
    guarantees: tuple[Guarantee, ...] = ()
    """What else stays, of each row or of all rows alike."""
    guaranteed: int = 0
    """How many units per KV head that is at most; `recent` and `sinks` are beside them."""
    shares: tuple[float, ...] = ()
    """Of each KV head of the backbone, layer by layer, where they have shares."""

    def of_row(self, row: int) -> Stay:
        """Return what stays of one row."""
        return self._replace(guarantees=self.guarantees[row : row + 1]) if len(self.guarantees) > 1 else self


@dataclass(frozen=True)
class KeptPerHead:
    """As many units in every head."""

    units: Tensor
    """(B, K, C) int64 ranks of those that stay, ascending."""
    held: int
    """S, units per head before."""

    def gone(self) -> Tensor:
        """Return (B, K, S - C) int64 ranks of those that go, ascending."""
        stays = torch.zeros(*self.units.shape[:2], self.held, dtype=torch.int8, device=self.units.device)
        order = stays.scatter_(-1, self.units, 1).argsort(dim=-1, stable=True)
        return order[..., : self.held - self.units.shape[-1]]


@dataclass(frozen=True)
class KeptOverHeads:
    """Heads with different numbers of units."""

    units: tuple[Tensor, ...]
    """Per row, (U,) int64 ranks of those that stay, ascending, counted through all heads."""
    counts: Tensor
    """(B, K) int64 on the CPU: how many of them are in each head."""
    held: tuple[int, ...]
    """Per row, units of all heads before."""

    def gone(self) -> tuple[Tensor, ...]:
        """Return, per row, the ranks of those that go."""
        masks = [torch.ones(n, dtype=torch.bool, device=u.device) for n, u in zip(self.held, self.units, strict=True)]
        return tuple(mask.index_fill(0, u, False).nonzero()[:, 0] for mask, u in zip(masks, self.units, strict=True))


Kept = KeptPerHead | KeptOverHeads
"""Which units of a layer stay, by their rank in it, and which go."""


@dataclass(frozen=True)
class PerHead:
    """Every KV head keeps its own best units (Locret, Algorithm 1)."""

    store: ClassVar[str] = "dense"
    """Name of the store that can hold what it chooses."""

    def select(self, units: Any, stay: Stay) -> KeptPerHead:
        """Choose among the units of a store, of which a column is asked, (B, K, S)."""
        scores, pinned = units.held("scores"), None
        if stay.recent or stay.sinks or stay.guarantees:
            pinned = staying(scores, units.held("positions"), stay)
        return KeptPerHead(select_kept(scores, stay.budget, pinned), scores.shape[-1])


class _ByRow(ABC):
    store: ClassVar[str] = "ragged"

    def select(self, units: Any, stay: Stay) -> KeptOverHeads:
        """Choose in each row of a store, which gives scores and positions, (U,), and how many units each head has."""
        rows = list(units.rows())
        found = [
            self.of_row(scores, positions, numbers, stay.of_row(row))
            for row, (scores, positions, numbers) in enumerate(rows)
        ]
        counts = torch.stack([units_K.to("cpu") for _, units_K in found])
        return KeptOverHeads(tuple(units_U for units_U, _ in found), counts, tuple(len(scores) for scores, *_ in rows))

    @abstractmethod
    def of_row(self, scores: Tensor, positions: Tensor, numbers: list[int], stay: Stay) -> tuple[Tensor, Tensor]:
        """Return the ranks that stay of one row, and how many are in each head."""


@dataclass(frozen=True)
class OverHeads(_ByRow):
    """The heads of a layer compete for its budget (Ada-KV)."""

    floor: float
    """Share of the budget that every head keeps."""
    relative: bool
    """See `select_over_heads`."""

    def of_row(self, scores: Tensor, positions: Tensor, numbers: list[int], stay: Stay) -> tuple[Tensor, Tensor]:
        """Return the ranks that stay of one row, and how many are in each head."""
        sinks = positions < stay.sinks if stay.sinks else None
        if stay.guarantees:
            sinks = staying_in_heads(scores, positions, numbers, stay._replace(recent=0))
        floor = int(self.floor * stay.budget)
        return select_over_heads(scores, positions, numbers, stay.budget, stay.recent, floor, self.relative, sinks)


@dataclass(frozen=True)
class ByShares(_ByRow):
    """Every KV head keeps its own best units, as many as its share of the layer's budget says.

    Finding what is asked is the work of a few heads (DuoAttention, arXiv 2410.10819); the others need little of a text.
    Those with less than half of the mean share keep their few best units and an even sample of the others: what they
    do is weigh all they see, and a few hundred loud units would outweigh it. The newest units that stay whatever their
    score are at most a quarter of what a head keeps. Every head holds what is guaranteed, and a share of the rest.
    """

    heads: slice
    """The layer's, among those of the backbone."""
    most: int = EVERY_UNIT
    """Units that a head holds at most, as long as the others have a use for more: positions that a backbone has."""

    def of_row(self, scores: Tensor, positions: Tensor, numbers: list[int], stay: Stay) -> tuple[Tensor, Tensor]:
        """Return the ranks that stay of one row, and how many are in each head."""
        units, bounded = stay.budget * len(numbers), [min(count, self.most) for count in numbers]
        held = bounded if sum(bounded) >= min(units, sum(numbers)) else numbers
        shares, mean = stay.shares[self.heads], sum(stay.shares) / len(stay.shares)
        parts, quotas = [], divided(units, shares, held, least=max(1, stay.guaranteed))
        for span, quota, share in zip(_spans(numbers), quotas, shares, strict=True):
            scores_11S, positions_11S = scores[None, None, span], positions[None, None, span]
            if share < SAMPLED * mean:
                scores_11S = _sampled(scores_11S, positions_11S)
            recent = min(stay.recent, quota // 4, quota - stay.guaranteed)
            own = stay._replace(recent=recent, sinks=min(stay.sinks, quota - stay.guaranteed - recent))
            pinned = staying(scores_11S, positions_11S, own)
            parts.append(select_kept(scores_11S, quota, pinned)[0, 0] + span.start)
        return torch.cat(parts), torch.tensor(quotas)


Selector = PerHead | OverHeads | ByShares
"""Decides from scores which units stay."""


def _sampled(scores_11S: Tensor, positions_11S: Tensor) -> Tensor:
    """Return scores by which the `BEST` best units stay, and as even a sample of the others as there is room for."""
    # Multiples of the golden ratio fill a circle evenly, however many of the largest are taken.
    drawn = (positions_11S.long() * _GOLDEN).remainder(_CIRCLE).float()
    best = _keys(score_order(scores_11S)).topk(min(BEST, scores_11S.shape[-1])).indices
    # Best first, for there may be no room for all.
    return drawn.scatter(-1, best, _CIRCLE * (2.0 + counting(best.shape[-1], best.device).flip(0)).expand_as(best))


def _keys(order_BKS: Tensor) -> Tensor:
    """Return keys of slots, no two alike: in the order of their scores, and of equal ones the newer is larger."""
    return torch.add(counting(order_BKS.shape[-1], order_BKS.device), order_BKS, alpha=1 << 32)


def staying(scores_BKS: Tensor, positions_BKS: Tensor, stay: Stay) -> Tensor:
    """Return which units stay whatever the others are: the newest, the first, and what is guaranteed.

    Returns:
        Bool, (B, K, S), or (S,) where all heads agree.
    """
    pinned = pinned_units(positions_BKS, stay.recent, stay.sinks)
    if not stay.guarantees:
        return pinned
    rows = stay.guarantees * (len(scores_BKS) if len(stay.guarantees) == 1 else 1)
    held = zip(score_order(scores_BKS), positions_BKS.expand_as(scores_BKS), rows, strict=True)
    return pinned | torch.stack([_guaranteed(*row) for row in held])


def staying_in_heads(scores_U: Tensor, positions_U: Tensor, counts: Sequence[int], stay: Stay) -> Tensor:
    """Return (U,) what `staying` says of a row whose heads, one after the other, have so many units."""
    parts = zip(scores_U.split(list(counts)), positions_U.split(list(counts)), strict=True)
    stays = [staying(one[None, None], its[None, None], stay).expand(1, 1, len(one)) for one, its in parts]
    return torch.cat(stays, dim=-1)[0, 0]


def _guaranteed(order_KS: Tensor, positions_KS: Tensor, guarantee: Guarantee) -> Tensor:
    """Return (K, S) which units of a row are guaranteed: those of pinned tokens, and the best of each share's."""
    pinned = _span_of(positions_KS, guarantee.pins) < len(guarantee.pins)
    if not guarantee.shares:
        return pinned
    device = order_KS.device
    slots = torch.arange(order_KS.shape[-1], device=device).expand_as(order_KS)
    # Best first, those that stay anyway before all; then, in this order, span by span.
    keys = (order_KS.to(torch.int64).masked_fill(pinned, _INT32_MAX) << 32) + slots
    by_score = keys.argsort(dim=-1, descending=True)
    spans = _span_of(positions_KS, [(start, end) for start, end, _ in guarantee.shares]).gather(-1, by_score)
    in_spans = spans.sort(dim=-1, stable=True)
    rank = slots - torch.searchsorted(in_spans.values, in_spans.values)
    least = torch.tensor([*(units for *_, units in guarantee.shares), 0], device=device)
    best = rank < least[in_spans.values]
    return pinned.scatter(-1, by_score.gather(-1, in_spans.indices), best) | pinned


def _span_of(positions: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    """Return which of ascending spans each position is in; their number where it is in none."""
    starts, ends = torch.tensor([*spans, (0, 0)], device=positions.device).T.contiguous()
    at = torch.searchsorted(starts[:-1].contiguous(), positions.to(torch.int64).contiguous(), right=True) - 1
    return torch.where((at >= 0) & (positions < ends[at]), at, len(spans))


def select_kept(scores_BKS: Tensor, budget: int, protected_S: Tensor | None = None) -> Tensor:
    """Choose the `budget` best slots of every KV head on its own (Locret, Algorithm 1).

    Scores are compared in float32. Among equal scores the newer slot, the one further right, wins, so a selection
    never depends on the backend's top-k. NaN counts as the worst score.

    Args:
        scores_BKS: (batch, kv_heads, slots), any float dtype; larger means keep.
        budget: Slots to keep per KV head.
        protected_S: (slots,) or (batch, kv_heads, slots) bool; these slots stay whatever their score, the newest first
            if there are too many.

    Returns:
        (batch, kv_heads, min(budget, slots)) int64 slot indices, strictly ascending.
    """
    slots = scores_BKS.shape[-1]
    slot_S = counting(slots, scores_BKS.device)
    if budget >= slots:
        return slot_S.expand(*scores_BKS.shape[:-1], slots)
    order = score_order(scores_BKS)
    if protected_S is not None:
        order = order.masked_fill(protected_S, _INT32_MAX)
    best = _keys(order).topk(budget, dim=-1, sorted=False).indices
    # Ascending without a sort, which starts thirty kernels on CUDA: each goes where as many are before it.
    kept = torch.zeros_like(order, dtype=torch.bool).scatter_(-1, best, True)
    ascending = best.new_empty(*best.shape[:-1], budget + 1)
    return ascending.scatter_(-1, kept.cumsum(-1) * kept, slot_S.expand_as(order))[..., 1:]


def select_over_heads(
    scores_U: Tensor,
    positions_U: Tensor,
    counts: Sequence[int],
    budget: int,
    protected: int = 0,
    floor: int = 0,
    relative: bool = False,
    sinks_U: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose the best units of one row over all KV heads together (Ada-KV, arXiv 2407.11550, Algorithm 1).

    Every head has its newest `protected` units and its own best ones, `floor` units in all; the rest of the budget goes
    to the best units that are left, whichever heads they are in. Scores are compared as `select_kept` does; among equal
    ones the later position wins, then the later head.

    Args:
        scores_U: (units,) of the first head, then of the second, and so on.
        positions_U: (units,) original positions, ascending in each head.
        counts: Units of each head.
        budget: Units to keep per head, on average.
        protected: Newest units of each head that stay whatever their score.
        floor: Units that each head keeps at least, the protected ones included.
        relative: Scores are logarithms up to a constant of each head, so heads are compared by their softmax.
        sinks_U: (units,) bool; these stay whatever their score too, after the newest ones if there are too many.

    Returns:
        (min(heads x budget, units),) int64 kept indices, ascending; and (heads,) int64, how many are in each head.
    """
    heads, units = len(counts), scores_U.shape[0]
    bounds = torch.tensor(counts, device=scores_U.device).cumsum(0)
    if heads * budget >= units:
        return torch.arange(units, device=scores_U.device), bounds.diff(prepend=bounds.new_zeros(1))
    protected = min(protected, budget)
    guaranteed = max(protected, min(floor, budget))
    order, compared = score_order(scores_U), scores_U.float()
    if sinks_U is not None:
        order = order.masked_fill(sinks_U, _INT32_MAX)
    head_U = torch.repeat_interleave(torch.tensor(counts, device=scores_U.device), output_size=units)
    tie_U = positions_U.to(torch.int64) * heads + head_U
    own, stays = (order.to(torch.int64) << 32) + tie_U, torch.zeros_like(head_U, dtype=torch.bool)
    if relative:
        compared = compared.clone()
    for span in _spans(counts):
        if relative:
            compared[span] -= compared[span].logsumexp(0)
        newest = max(span.start, span.stop - protected)
        stays[newest : span.stop] = True
        left = min(guaranteed - (span.stop - newest), newest - span.start)
        if left > 0:
            stays[span.start + own[span.start : newest].topk(left, sorted=False).indices] = True
    if relative:
        order = score_order(compared)
        order = order if sinks_U is None else order.masked_fill(sinks_U, _INT32_MAX)
    keys = (order.to(torch.int64) << 32) + tie_U
    keys = keys.masked_fill(stays, torch.iinfo(torch.int64).max)
    kept = keys.topk(heads * budget, sorted=False).indices.sort().values
    ends = torch.searchsorted(kept, bounds)
    return kept, ends.diff(prepend=ends.new_zeros(1))


def _spans(counts: Sequence[int]) -> list[slice]:
    return [slice(end - count, end) for count, end in zip(counts, accumulate(counts), strict=True)]


def score_order(scores: Tensor) -> Tensor:
    """Return int32 numbers in the order of the scores; NaN counts as the worst score."""
    # A float's bits, read as an integer, order like the float once negative numbers are mirrored; adding zero turns
    # -0.0 into 0.0. Score and slot index together form one integer key, so that no two keys tie.
    bits = (torch.nan_to_num(scores.float(), -torch.inf, torch.inf, -torch.inf) + 0.0).view(torch.int32)
    return torch.where(bits >= 0, bits, bits ^ _INT32_MAX)
