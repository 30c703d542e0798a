"""What a strategy for reading is: options, and one method that says which slots each block of a chunk's queries sees.

A pattern lives on slots, not on text: the cache in front of a chunk may have lost units, and then slot j holds another
token in each KV head. Causality is not the pattern's business; whoever attends sees to it.
"""

# G query heads, N all query heads, L new tokens, S slots, D head dim, Q blocks of queries

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from locret.backbone.shape import Backbone
from locret.base.registry import Chosen

ROWS = 64
"""Queries that share a set of slots (MInference's kernels)."""


class PrefillAttention(Chosen):
    """Chooses what the queries of one head attend to while a prompt is read. Subclasses are frozen dataclasses."""

    kind: ClassVar[str] = "prefill_attention"
    over_ranks: ClassVar[bool] = True

    @property
    def rows(self) -> int:
        """Queries of a block, which see the same slots."""
        return ROWS

    def by_head(self, backbone: Backbone) -> Sequence[Sequence[PrefillAttention]]:
        """Return the pattern of every layer and query head.

        Raises:
            ValueError: If what the options name does not fit the backbone.
        """
        return [[self] * backbone.shape(layer).num_heads for layer in range(backbone.num_layers)]

    @abstractmethod
    def covers(self, slots: int) -> bool:
        """Return whether all of so many slots are chosen whatever they hold, so that nothing need be estimated."""

    @abstractmethod
    def choose(self, query_GLD: Tensor, key_SD: Tensor, scaling: float, softcap: float | None) -> Tensor:
        """Choose slots for L new tokens, the last ones of S slots.

        Args:
            query_GLD: Post-rotary queries of heads that share a KV head.
            key_SD: Post-rotary keys of that head.
            scaling: Factor of the logits.
            softcap: Bound of the logits, as in Gemma-2.

        Returns:
            (G or 1, Q, S) bool: what every query of a block may see, as far as it is not behind the query.
        """


def largest(scores_GS: Tensor, count: int) -> Tensor:
    """Return (G, S) bool: the `count` largest of each head; of equal ones the first."""
    order = scores_GS.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return torch.zeros_like(scores_GS, dtype=torch.bool).scatter_(-1, order, True)


def front_gap(held: int, block: int) -> int:
    """Return how many slots a grid of blocks lacks in front, if one of its lines is where the chunk begins."""
    return -held % block


def on_slots(blocks_GQC: Tensor, block: int, held: int, slots: int) -> Tensor:
    """Return (G, Q, S): the slots of (G, Q, C) chosen blocks of a grid that `front_gap` describes."""
    gap = front_gap(held, block)
    return blocks_GQC.repeat_interleave(block, dim=-1)[..., gap : gap + slots]
