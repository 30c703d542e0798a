"""What a backbone is to a cache: its layers, what each of them remembers, and their heads and widths."""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, fields
from functools import cached_property
from typing import Any

import torch

FULL, SLIDING, RECURRENT, BOTH, NONE = "full", "sliding", "recurrent", "both", "none"
KINDS = (FULL, SLIDING, RECURRENT, BOTH, NONE)
"""What a layer remembers; see `Backbone.kinds`."""


@dataclass(frozen=True)
class LayerShape:
    """Shape of one layer's attention, as this process computes it."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Width of a key, as it is held."""
    value_dim: int = 0
    """Width of a value, as it is held; where 0 is given, that of a key."""
    query_dim: int = 0
    """Width of a query head, as it is projected; where 0 is given, that of a key."""

    def __post_init__(self) -> None:
        for name in ("value_dim", "query_dim"):
            object.__setattr__(self, name, getattr(self, name) or self.head_dim)

    @property
    def feature_dim(self) -> int:
        """Width of one token's concatenated q, k and v."""
        return self.num_heads * self.query_dim + self.num_kv_heads * self.unit_dim

    @property
    def unit_dim(self) -> int:
        """Numbers of a cache unit: those of its key and its value."""
        return self.head_dim + self.value_dim

    @property
    def plain(self) -> bool:
        """Whether queries, keys and values are equally wide."""
        return self.head_dim == self.value_dim == self.query_dim

    @property
    def latent(self) -> bool:
        """Whether queries attend to keys and values side by side; see `locret.backbone.latent`."""
        return self.query_dim != self.head_dim


@dataclass(frozen=True)
class Backbone:
    """Shape of a causal LM, as far as its key-value cache is concerned."""

    model_type: str
    num_layers: int
    layers: tuple[int, ...]
    """Layers with full attention, whose cache is bounded by eviction; what the others remember is bounded already."""
    num_heads: int
    """Of the first layer with full attention, as the two numbers that follow; `shape` tells those of any layer."""
    num_kv_heads: int
    head_dim: int
    hidden_act: str
    initializer_range: float
    max_positions: int
    window: int | None
    """Tokens a sliding-window layer sees, if there are such layers."""
    kinds: tuple[str, ...] = ()
    """What each layer remembers: "full" (keys and values of all tokens), "sliding" (those of a window), "recurrent" (a
    state of fixed size: linear attention, state space, short convolution), "both" (a state, and the keys and values of
    all tokens) or "none"."""
    state_numbers: tuple[int, ...] = (0, 0)
    """How many numbers the states of one row have: in the backbone's dtype, and in float32."""
    sources: tuple[int, ...] = ()
    """The layer whose units each layer attends to, where some have none of their own; empty: each to its own."""
    shapes: tuple[LayerShape, ...] = ()
    """Of every layer, where they differ or a value is not as wide as a key; empty: the three numbers say all."""

    def __post_init__(self) -> None:
        """Work out what layers remember where nobody says it, as in files of earlier versions."""
        if not self.kinds:
            kinds = tuple(FULL if layer in self.layers else SLIDING for layer in range(self.num_layers))
            object.__setattr__(self, "kinds", kinds)

    def shape(self, layer: int) -> LayerShape:
        """Return the shape of one layer's attention."""
        return self.shapes[layer] if self.shapes else LayerShape(self.num_heads, self.num_kv_heads, self.head_dim)

    def borrows(self, layer: int) -> bool:
        """Return whether a layer attends to the units of an earlier one."""
        return bool(self.sources) and self.sources[layer] != layer

    @cached_property
    def lenders(self) -> frozenset[int]:
        """Layers whose units later layers attend to as well."""
        return frozenset(source for layer, source in enumerate(self.sources) if source != layer)

    @property
    def full_shapes(self) -> tuple[LayerShape, ...]:
        """Shapes of the layers with full attention, in order."""
        return tuple(map(self.shape, self.layers))

    def check_alike(self, what: str) -> LayerShape:
        """Return the one shape of all layers, with values as wide as keys."""
        first = self.shape(0)
        if not first.plain:
            raise ValueError(
                f"{what} takes keys and values of one width, but those of {self.model_type} are {first.head_dim} and "
                f"{first.value_dim} wide; answer with locret.generate"
            )
        for layer in range(self.num_layers):
            if (other := self.shape(layer)) != first:
                raise ValueError(
                    f"{what} takes layers of one shape, but layer {layer} of {self.model_type} has "
                    f"{other.num_kv_heads} KV heads of width {other.head_dim} and layer 0 has {first.num_kv_heads} of "
                    f"{first.head_dim}; answer with locret.generate"
                )
        return first

    def record(self) -> dict[str, Any]:
        """Return it as plain data, without what is as it is in most backbones."""
        values = asdict(self)
        usual = {f.name: f.default for f in fields(self) if f.default is not MISSING}
        return {name: value for name, value in values.items() if name not in usual or value != usual[name]}

    @property
    def uniform(self) -> bool:
        """Whether every layer is a full-attention layer, and nothing else remembers anything."""
        return set(self.kinds) == {FULL}

    @property
    def slides(self) -> bool:
        """Whether some layers slide over a window."""
        return SLIDING in self.kinds

    @property
    def recurrent(self) -> bool:
        """Whether some layers carry a state from token to token."""
        return RECURRENT in self.kinds or BOTH in self.kinds

    def state_bytes(self, element_size: int) -> int:
        """Return the bytes of one row's states: as they are, and as they were before the newest token."""
        own, exact = self.state_numbers
        return 2 * (own * element_size + exact * torch.float32.itemsize)
