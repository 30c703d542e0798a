"""MInference's three patterns, and the choice of one per head.

Paper:     MInference 1.0, arXiv 2407.02490, sections 3 and 4; numbers as in the published code and configs.
Formula:   A-shape: the first slots and the nearest diagonals. Vertical-slash: A = softmax of the last 64 queries; the
           columns and diagonals of A with the largest sums, the first 30 columns and the nearest 100 diagonals always.
           Block-sparse: the blocks of 64 keys whose mean has the largest product with the mean of 64 queries.
Deviates:  The paper reads a prompt in one pass. In chunks the last 64 queries of each chunk estimate, and diagonals
           and blocks are counted from the chunk, so that they need not be aligned to what an eviction has left. A
           diagonal costs the 64 keys that it crosses in a block, as in the published kernel, and all of the block's
           queries see them; that kernel then widens some groups of diagonals, this one does not. Means are taken over
           the keys that a block has, where the published code counts missing ones as zeros.
Cost:      Estimate O(64 S) per chunk for vertical-slash, O(L S / 64^2) for block-sparse, nothing for A-shape.
"""

# G query heads, L new tokens, S slots, R last queries, D head dim, Q blocks of queries, C blocks of keys

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from locret.backbone.attention import capped
from locret.backbone.shape import Backbone
from locret.base.fields import Range
from locret.base.files import read_json
from locret.prefill_attention.base import ROWS, PrefillAttention, front_gap, largest, on_slots

LAST_QUERIES = 64
FIRST_COLUMNS, NEAREST_DIAGONALS = 30, 100
"""Always among the chosen ones."""
LEAST_VERTICAL, LEAST_SLASH = 30, 50


@dataclass(frozen=True, kw_only=True)
class AShape(PrefillAttention):
    """The first slots and the nearest ones."""

    name: ClassVar[str] = "a_shape"
    ranges = {"sinks": Range(0), "window": Range(1)}

    sinks: int = 128
    """First slots (MInference's baseline: 128; its search: 100)."""
    window: int = 3968
    """Nearest slots, the own one included (MInference's baseline: 3968; its search: 800)."""

    def covers(self, slots: int) -> bool:
        return self.sinks + self.window >= slots

    def choose(self, query_GLD: Tensor, key_SD: Tensor, scaling: float, softcap: float | None) -> Tensor:
        slots = torch.arange(len(key_SD), device=key_SD.device)[None]
        return _crossed(slots < self.sinks, slots < self.window, query_GLD.shape[1])


@dataclass(frozen=True, kw_only=True)
class VerticalSlash(PrefillAttention):
    """The columns and diagonals that the last queries look at most."""

    name: ClassVar[str] = "vertical_slash"
    ranges = {"vertical": Range(0), "slash": Range(0)}

    vertical: int = 1000
    """Columns (MInference, where a head has no entry: 1000; at least 30)."""
    slash: int = 6096
    """Diagonals (MInference, where a head has no entry: 6096; at least 50)."""

    def covers(self, slots: int) -> bool:
        return max(self.vertical, LEAST_VERTICAL, self.slash, LEAST_SLASH) >= slots

    def choose(self, query_GLD: Tensor, key_SD: Tensor, scaling: float, softcap: float | None) -> Tensor:
        weights_GRS = _last_attention(query_GLD, key_SD, scaling, softcap)
        columns_GS, diagonals_GS = weights_GRS.sum(1), _diagonal_sums(weights_GRS)
        columns_GS[:, :FIRST_COLUMNS] = torch.inf
        diagonals_GS[:, :NEAREST_DIAGONALS] = torch.inf
        columns = largest(columns_GS, max(self.vertical, LEAST_VERTICAL))
        return _crossed(columns, largest(diagonals_GS, max(self.slash, LEAST_SLASH)), query_GLD.shape[1])


@dataclass(frozen=True, kw_only=True)
class BlockSparse(PrefillAttention):
    """The blocks of keys whose means are nearest to the mean of a block of queries."""

    name: ClassVar[str] = "block_sparse"
    ranges = {"blocks": Range(1)}

    blocks: int = 100
    """Blocks of 64 keys per block of 64 queries (MInference: 100)."""

    def covers(self, slots: int) -> bool:
        return (self.blocks - 1) * ROWS >= slots  # the first block may have one key only

    def choose(self, query_GLD: Tensor, key_SD: Tensor, scaling: float, softcap: float | None) -> Tensor:
        new, slots = query_GLD.shape[1], len(key_SD)
        queries_GQD = _means(query_GLD.float(), 0)
        keys_CD = _means(key_SD.float()[None], slots - new)[0]
        products_GQC = queries_GQD @ keys_CD.T
        held = len(keys_CD) - queries_GQD.shape[1]
        behind = torch.ones(products_GQC.shape[1:], dtype=torch.bool, device=key_SD.device).triu_(held + 1)
        chosen = largest(products_GQC.masked_fill_(behind, -torch.inf), self.blocks) & ~behind
        return on_slots(chosen, ROWS, slots - new, slots)


@dataclass(frozen=True, kw_only=True)
class MInference(VerticalSlash):
    """For every query head the pattern that a search has found for it, else vertical-slash."""

    name: ClassVar[str] = "minference"

    patterns: str | None = None
    """JSON file with a pattern per layer and query head, as MInference publishes it; without one every head has
    `vertical` and `slash`."""

    def check_file(self) -> None:
        if self.patterns is not None:
            read_patterns(self.patterns)

    def by_head(self, backbone: Backbone) -> Sequence[Sequence[PrefillAttention]]:
        usual = VerticalSlash(vertical=self.vertical, slash=self.slash)
        if self.patterns is None:
            return usual.by_head(backbone)
        layers = read_patterns(self.patterns)
        if len(layers) != backbone.num_layers:
            self.refuse(
                f"{self.patterns} has {len(layers)} layers, but the backbone has {backbone.num_layers}; give the "
                "patterns that were searched for it"
            )
        found = []
        for layer, named in enumerate(layers):
            heads = backbone.shape(layer).num_heads
            if beyond := [head for head in named if not 0 <= head < heads]:
                self.refuse(
                    f"{self.patterns} has a head {beyond[0]} in layer {layer}, but the backbone has {heads} heads; "
                    "give the patterns that were searched for it"
                )
            found.append([named.get(head, usual) for head in range(heads)])
        return found


PUBLISHED: Mapping[str, Callable[[int, int], PrefillAttention]] = {
    "stream_llm": lambda columns, diagonals: AShape(sinks=columns, window=diagonals),
    "vertical_and_slash": lambda columns, diagonals: VerticalSlash(vertical=columns, slash=diagonals),
    "block_sparse": lambda blocks, _: BlockSparse(blocks=blocks),
}
"""Patterns by the names that MInference's files use."""


def read_patterns(file: str) -> list[dict[int, PrefillAttention]]:
    """Return what a file of patterns says: per layer the pattern of each query head that it names.

    The file is a list over layers of `{"HEAD": [NAME, COLUMNS, DIAGONALS, SCORE]}`, as MInference publishes it.
    """
    if not Path(file).is_file():
        raise ValueError(f"prefill_attention minference: there is no file {file}; give one that MInference publishes")
    layers, found = read_json(Path(file), "a file of patterns, as MInference publishes it"), list[dict[int, Any]]()
    try:
        for heads in layers:
            found.append({int(head): PUBLISHED[name](*sizes[:2]) for head, (name, *sizes) in heads.items()})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{file} is no list of layers with [{' or '.join(PUBLISHED)}, COLUMNS, DIAGONALS, SCORE] by head (layer "
            f"{len(found)}: {error}); give a file of patterns"
        ) from None
    return found


def _last_attention(query_GLD: Tensor, key_SD: Tensor, scaling: float, softcap: float | None) -> Tensor:
    """Return (G, R, S) causal attention of the chunk's last queries."""
    last = query_GLD[:, -LAST_QUERIES:].float()
    logits_GRS = capped(last @ key_SD.float().T * scaling, softcap)
    behind = torch.ones(logits_GRS.shape[1:], dtype=torch.bool, device=key_SD.device)
    behind.triu_(len(key_SD) - last.shape[1] + 1)
    return logits_GRS.masked_fill_(behind, -torch.inf).softmax(-1)


def _diagonal_sums(weights_GRS: Tensor) -> Tensor:
    """Return (G, S) sums over the diagonals of causal attention: number o joins each query to the slot o before it."""
    heads, rows, slots = weights_GRS.shape
    # Rows from the last to the first, each moved one to the right: diagonals become columns, the nearest one last.
    padded = F.pad(weights_GRS.flip(1), (0, rows)).flatten(1)
    moved = padded[:, : rows * (slots + rows - 1)].view(heads, rows, slots + rows - 1)
    return moved[..., :slots].sum(1).flip(-1)


def _crossed(columns_GS: Tensor, diagonals_GS: Tensor, new: int) -> Tensor:
    """Return (G, Q, S): chosen columns, and in each block of queries the keys that chosen diagonals cross there."""
    heads, slots = diagonals_GS.shape
    # A block that begins in slot b sees slot j if one of the diagonals b - j to b - j + 63 is chosen.
    counts = F.pad(diagonals_GS.to(torch.int32), (ROWS, ROWS)).cumsum(-1)
    near_GX = counts[:, ROWS:] > counts[:, :-ROWS]  # number x is for the diagonals x - 63 to x
    falling = near_GX.flip(-1)
    starts = range(slots - new, slots, ROWS)
    chosen = columns_GS[:, None].repeat(heads // len(columns_GS), len(starts), 1)
    for nth, start in enumerate(starts):
        end = min(start + ROWS, slots)
        first = slots - start
        chosen[:, nth, :end] |= falling[:, first : first + end]
        chosen[:, nth, end:] = False
    return chosen


def _means(states_GLD: Tensor, gap_of: int) -> Tensor:
    """Return the means of blocks of 64 tokens, a grid of which has a line after the first `gap_of` ones."""
    gap, length = front_gap(gap_of, ROWS), states_GLD.shape[1]
    back = -(gap + length) % ROWS
    blocks: Tensor = F.pad(states_GLD, (0, 0, gap, back)).unflatten(1, (-1, ROWS))
    held = torch.ones(length, device=states_GLD.device)
    counts = F.pad(held, (gap, back)).view(-1, ROWS).sum(-1)
    return blocks.sum(2) / counts[:, None]
