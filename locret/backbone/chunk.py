"""What a layer has just computed: the record that label code reads, and the one that every scorer reads."""

# B batch, N query heads, K KV heads, L new tokens, S slots, D head dim, F features of a token

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from locret.backbone.adapters import FUSED, hidden_size
from locret.backbone.latent import Latent
from locret.backbone.shape import Backbone, LayerShape

PROJECTIONS, HIDDEN, RESIDUAL = SOURCES = ("projections", "hidden", "residual")
"""What features of a token are: its q, k and v before rotation; the hidden states that the attention module is given;
those that the decoder layer is given, before its norm."""


def feature_widths(model: nn.Module, backbone: Backbone, source: str) -> list[int]:
    """Return how wide the features of one of `SOURCES` are, in each layer with full attention."""
    if source == PROJECTIONS:
        return [shape.feature_dim for shape in backbone.full_shapes]
    return [hidden_size(model)] * len(backbone.layers)


@dataclass
class Projections:
    """Outputs of one layer's projections, before the rotary embedding and after q/k norms where there are any."""

    shape: LayerShape
    parts: dict[str, Tensor] = field(default_factory=dict)
    latent: Latent | None = None
    """How queries are compared with what is held, where that is a latent."""
    hidden: Tensor | None = None
    """(B, L, E) hidden states that the attention module was given; None where nobody noted them."""
    residual: Tensor | None = None
    """(B, L, E) hidden states that the decoder layer was given, before its norm."""

    def features(self, source: str = PROJECTIONS) -> Tensor:
        """Return (B, L, F) of one of `SOURCES`: by default all query, key and value heads before rotation."""
        parts = self.feature_parts(source)
        return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]

    def feature_parts(self, source: str = PROJECTIONS) -> list[Tensor]:
        """Return what the features of one of `SOURCES` are made of, to be put side by side."""
        if source != PROJECTIONS:
            given: Tensor = getattr(self, source)
            return [given]
        return [self.parts[FUSED]] if FUSED in self.parts else [self.parts[name] for name in ("q", "k", "v")]

    def first(self, tokens: int) -> Projections:
        """Return what belongs to the first tokens."""
        parts = {name: part[:, :tokens] for name, part in self.parts.items()}
        hidden, residual = (None if x is None else x[:, :tokens] for x in (self.hidden, self.residual))
        return replace(self, parts=parts, hidden=hidden, residual=residual)

    def query(self) -> Tensor:
        """Return the un-rotated queries, (B, N, L, D)."""
        query = self._heads("q", self.shape.num_heads)
        return query if self.latent is None else self.latent.raw_query(query)

    def key(self) -> Tensor:
        """Return the un-rotated keys, (B, K, L, D)."""
        return self._heads("k", self.shape.num_kv_heads)

    def _heads(self, name: str, heads: int) -> Tensor:
        """Return the (B, heads, L, ...) part of that name."""
        part, start, width = self._place(name)
        flat = self.parts[part][..., start : start + heads * width]
        return flat.reshape(*flat.shape[:-1], heads, width).transpose(1, 2)

    def _place(self, name: str) -> tuple[str, int, int]:
        """Return which part q, k or v is in, where it begins there, and how wide a head of it is."""
        shape = self.shape
        width = {"q": shape.query_dim, "k": shape.head_dim, "v": shape.value_dim}[name]
        if FUSED not in self.parts:
            return name, 0, width
        queries, keys = shape.num_heads * shape.query_dim, shape.num_kv_heads * shape.head_dim
        return FUSED, {"q": 0, "k": queries, "v": queries + keys}[name], width

    def of_head(self, row: int, head: int) -> Projections:
        """Return what belongs to one KV head of one row and its query heads."""
        group = self.shape.num_heads // self.shape.num_kv_heads
        parts = {}
        for name, heads in (("q", group), ("k", 1), ("v", 1)):
            part, start, width = self._place(name)
            first = start + head * heads * width
            parts[name] = self.parts[part][row : row + 1, :, first : first + heads * width]
        hidden, residual = (None if x is None else x[row : row + 1] for x in (self.hidden, self.residual))
        shape = replace(self.shape, num_heads=group, num_kv_heads=1)
        return Projections(shape, parts, self.latent, hidden, residual)

    def clear(self) -> None:
        """Free the tensors once the layer is done."""
        self.parts.clear()
        self.hidden = self.residual = None


@dataclass(frozen=True, kw_only=True)
class Attended:
    """What one full-attention layer has just computed for L new tokens."""

    layer_idx: int
    query: Tensor
    """(B, N, L, D), post-rotary."""
    key: Tensor
    """(B, K, S, D), post-rotary, the new tokens last."""
    value: Tensor
    """(B, K, S, D)."""
    scaling: float
    softcap: float | None
    """Bound of the logits (Gemma-2); None where the backbone has none."""
    projections: Projections
    learned_sinks: Tensor | None = None
    """(N,) logits of learned sinks (gpt-oss), which take part in the softmax; None where the backbone has none."""

    @property
    def new_tokens(self) -> int:
        """L."""
        return self.query.shape[-2]


@dataclass(frozen=True, kw_only=True)
class Chunk(Attended):
    """What a layer has computed, with what the cache knows about it: the one input of every scorer."""

    positions: Tensor
    """(1 or B, 1, L) original positions of the new tokens."""
    unit_positions: Tensor
    """(B, K, S) original positions of all units, new ones included; -1 in empty slots."""
    stored_scores: Tensor
    """(B, K, S - L) float32 scores of the units that were there before, as the scorer gave them last."""
    columns: Mapping[str, Tensor]
    """(B, K, S) for every column that the scorer declares: what it gave last, zeros for new units."""
    next_position: int
    """Rotary position of the token to come, on the scale by which queries and keys were rotated."""
    row_start: Tensor
    """(B,) first slot of each row that holds a unit; all zero unless `padded`."""
    padded: bool
    """Whether some rows begin with empty slots."""
    selects: bool
    """Whether units are selected by these scores, now or before the next generated token."""
    budget: int
    """Units of this layer that stay per KV head, on average, by these scores; all S where nothing is selected."""
    recent: int
    """Newest units that stay whatever their score, out of `budget`: the policy's or the scorer's, if those are more."""
    sinks: int
    """First tokens of the text whose units stay whatever their score, out of `budget`."""
    last: bool
    """Whether these are the last tokens of the prompt."""
    generating: bool
    """Whether the tokens are of an answer, or the prompt's last one that `generate` feeds itself."""
    prepared: Any
    """What the scorer's `prepare` returned for this backbone."""

    @property
    def pinned(self) -> Tensor:
        """(B, K, S) bool: units that stay whatever their score."""
        return pinned_units(self.unit_positions, self.recent, self.sinks).expand(self.unit_positions.shape)


@lru_cache(8)
def counting(count: int, device: torch.device) -> Tensor:
    """Return 0, 1, 2, ..., to be read only: all layers ask for the same ones."""
    with torch.inference_mode(False):
        return torch.arange(count, device=device)


def pinned_units(positions: Tensor, recent: int, sinks: int) -> Tensor:
    """Return which units stay whatever their score: the newest ones, and those of the text's first tokens.

    Args:
        positions: (..., S) original positions, ascending; -1 in empty slots.
        recent: Newest slots.
        sinks: First tokens of the text.

    Returns:
        Bool, (..., S), or (S,) where there are no sinks and all heads agree.
    """
    slots = positions.shape[-1]
    newest = counting(slots, positions.device) >= slots - recent
    return newest if not sinks else newest | ((positions >= 0) & (positions < sinks))
