"""The offline search: which of MInference's patterns serves a head best, on the attention of one text.

Paper:     MInference 1.0, arXiv 2407.02490, section 3.2; sizes, late rows and both ratings as in the published code.
Formula:   Recovered attention: the mass that a pattern leaves of the softmax, mean over the late queries. Or by output:
           the share of the output's numbers that a pattern changes by no more than 5e-3.
Deviates:  The published search calls every A-shape vertical-slash, and every block-sparse head vertical-slash with
           (1000, 6096); here the winner is written as it is. Of patterns that do equally well the one that computes
           least wins. The published sizes cost unlike amounts; with a share they are scaled, for every head, until
           each computes that share of dense attention, block by block (the paper's kernel-aware search space).
"""

# G query heads of a KV head, L queries and keys, D head dim, Q blocks of queries, P patterns

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from locret.backbone.chunk import Attended
from locret.prefill_attention.base import ROWS, PrefillAttention, capped
from locret.prefill_attention.blocked import chosen_slots, computed_share
from locret.prefill_attention.minference import AShape, BlockSparse, VerticalSlash

CANDIDATES: tuple[PrefillAttention, ...] = (
    AShape(sinks=100, window=800),
    VerticalSlash(vertical=30, slash=800),
    VerticalSlash(vertical=100, slash=800),
    VerticalSlash(vertical=100, slash=750),
    VerticalSlash(vertical=500, slash=700),
    VerticalSlash(vertical=3500, slash=100),
    VerticalSlash(vertical=1000, slash=4096),
    BlockSparse(blocks=100),
)
"""The published sizes."""
RATINGS = ("mass", "output")
LATE = 2500
"""First query whose attention counts: earlier ones see nearly everything by any pattern."""
_DEVIATION = 5e-3


@dataclass(frozen=True)
class Found:
    """The best pattern of one head."""

    pattern: PrefillAttention
    score: float
    """Recovered attention, or share of the output that stays, 0 to 1."""
    share: float
    """What it computes of the text, as a share of dense attention."""


def scaled(pattern: PrefillAttention, keys: int) -> PrefillAttention:
    """Return one of MInference's patterns with as many columns and diagonals, in the same proportion, as `keys` says.

    Raises:
        ValueError: For another strategy.
    """
    if isinstance(pattern, AShape):
        sinks = min(keys - 1, round(keys * pattern.sinks / (pattern.sinks + pattern.window)))
        return AShape(sinks=sinks, window=keys - sinks)
    if isinstance(pattern, VerticalSlash):
        vertical = round(keys * pattern.vertical / (pattern.vertical + pattern.slash))
        return VerticalSlash(vertical=vertical, slash=keys - vertical)
    if isinstance(pattern, BlockSparse):
        return BlockSparse(blocks=max(1, keys // ROWS))
    raise ValueError(f"{pattern.name} has no sizes to scale; choose a_shape, vertical_slash or block_sparse")


def search_layer(
    layer: Attended,
    patterns: Sequence[PrefillAttention] = CANDIDATES,
    *,
    late: int = LATE,
    by: str = "mass",
    share: float | None = None,
) -> list[Found]:
    """Return the best pattern of every query head, by one layer's attention to a text read in one pass.

    Args:
        layer: What the layer has computed: queries and keys of the same L tokens, one row.
        patterns: Candidates, which share the queries of a block.
        late: First query that counts.
        by: "mass", attention recovered; or "output", outputs that stay.
        share: Scale every candidate, for every head, until it computes at most this share of dense attention.

    Raises:
        ValueError: If the text has no late query, or the rating is unknown.
    """
    length, kv_heads = layer.query.shape[2], layer.key.shape[1]
    if by not in RATINGS:
        raise ValueError(f'by="{by}" is unknown; choose one of {", ".join(RATINGS)}')
    if length <= late:
        raise ValueError(f"the text has {length} tokens, but only those from {late} on count; give more, or lower late")
    group = layer.query.shape[1] // kv_heads
    found = []
    for head, query_LD in enumerate(layer.query[0]):
        key_LD, value_LD = layer.key[0, head // group], layer.value[0, head // group]

        def choose(pattern: PrefillAttention, query_LD: Tensor = query_LD, key_LD: Tensor = key_LD) -> _Choice:
            chosen_1QL, _ = chosen_slots([pattern], query_LD[None], key_LD, layer.scaling, layer.softcap)
            return _Choice(pattern, chosen_1QL, computed_share(chosen_1QL, ROWS, length))

        made = [choose(one) if share is None else _matched(one, share, length, choose) for one in patterns]
        if share is not None:  # a text may be too short for the least that a pattern takes
            made = [one for one in made if one.share <= share] or [min(made, key=lambda one: one.share)]
        chosen = torch.cat([one.chosen_1QL for one in made])
        scores = _rated(query_LD, key_LD, value_LD, chosen, layer.scaling, layer.softcap, late, by)
        best = max(range(len(made)), key=lambda nth: (scores[nth], -made[nth].share))
        found.append(Found(made[best].pattern, scores[best], made[best].share))
    return found


class _Choice(NamedTuple):
    pattern: PrefillAttention
    chosen_1QL: Tensor
    share: float


def _matched(
    pattern: PrefillAttention, share: float, length: int, choose: Callable[[PrefillAttention], _Choice]
) -> _Choice:
    """Return the largest of a pattern's sizes that computes at most a share, or the smallest one."""
    least, most = 1, length + ROWS
    best = choose(scaled(pattern, least))
    while most - least > max(1, least // 32):
        middle = choose(scaled(pattern, (least + most) // 2))
        if middle.share <= share:
            best, least = middle, (least + most) // 2
        else:
            most = (least + most) // 2
    return best


def _rated(
    query_LD: Tensor,
    key_LD: Tensor,
    value_LD: Tensor,
    chosen_PQL: Tensor,
    scaling: float,
    softcap: float | None,
    late: int,
    by: str,
) -> list[float]:
    """Return the score of each pattern; attention exists for one block of queries at a time."""
    length, total = len(query_LD), torch.zeros(len(chosen_PQL), dtype=torch.float64, device=key_LD.device)
    key_LD, value_LD = key_LD.float(), value_LD.float()
    for start in range(late // ROWS * ROWS, length, ROWS):
        end = min(start + ROWS, length)
        rows = torch.arange(max(start, late), end, device=key_LD.device)
        logits = capped(query_LD[rows].float() @ key_LD[:end].T * scaling, softcap)
        behind = torch.arange(end, device=key_LD.device) > rows[:, None]
        weights = logits.masked_fill_(behind, -torch.inf).softmax(-1)
        seen_PL = chosen_PQL[:, start // ROWS, :end].float()
        mass_PR = seen_PL @ weights.T
        if by == "mass":
            total += mass_PR.sum(-1)
            continue
        exact = weights @ value_LD[:end]
        for nth, seen in enumerate(seen_PL):
            sparse = (weights * seen) @ value_LD[:end] / mass_PR[nth, :, None]
            total[nth] += ((sparse - exact).abs() <= _DEVIATION).float().mean(-1).sum()
    return [float(one) for one in (total / (length - late)).tolist()]
