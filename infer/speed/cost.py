"""What a method must compute and move at the least: floating-point operations and bytes, counted from the shape.

Counted is what the backbone does with the units that a forward pass looks at:

    operations   two per weight of every matrix and token, the language-model head where logits are asked for; four per
                 query head, dimension and pair of token and unit it sees (logits and their sum over values)
    bytes        every weight once per forward pass, every key and value that is looked at once, new ones once more

Scores, evictions, rotations, norms and activations are left out: what they cost shows as a lower rate, for no method
counts work that full attention over the same units would not do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from locret.backbone.adapters import Backbone, LayerShape, describe, find_decoder
from locret.loading.plan import sketch_of


@dataclass(frozen=True)
class Pass:
    """One forward pass."""

    tokens: int
    """New tokens, L."""
    held: tuple[int, ...]
    """Units per KV head that each full-attention layer holds before it."""
    seen: int
    """Tokens of the text before it."""
    logits: int = 0
    """Tokens whose logits are computed."""


@dataclass(frozen=True)
class Cost:
    """Work of one or more forward passes."""

    flops: int
    bytes: int


@dataclass(frozen=True)
class Sizes:
    """What a backbone's cost follows from."""

    backbone: Backbone
    linear: int
    """Weights that every token meets in a matrix product."""
    lm_head: int
    weight_bytes: int
    """All parameters and buffers."""
    element_size: int
    """Bytes of a number of a weight, key or value."""


def sizes_of(config: Any, dtype: torch.dtype) -> Sizes:
    """Count a backbone's weights from its config, without allocating any.

    Raises:
        ValueError: For a backbone without keys and values to evict.
    """
    model: Any = sketch_of(config, dtype)
    linear = sum(m.weight.numel() for m in find_decoder(model).modules() if isinstance(m, nn.Linear))
    return Sizes(
        backbone=describe(model),
        linear=linear,
        lm_head=model.get_output_embeddings().weight.numel(),
        weight_bytes=sum(t.nbytes for t in [*model.parameters(), *model.buffers()]),
        element_size=dtype.itemsize,
    )


def cost(sizes: Sizes, passes: Iterable[Pass]) -> Cost:
    """Return the least work of some forward passes of one row."""
    backbone, flops, moved = sizes.backbone, 0, 0
    others = [backbone.shape(index) for index in range(backbone.num_layers) if backbone.kinds[index] == "sliding"]
    for one in passes:
        new = one.tokens
        products = sum(
            _products(shape) * _pairs(new, held) for shape, held in zip(backbone.full_shapes, one.held, strict=True)
        )
        states = sum(
            _numbers(shape) * (held + 2 * new) for shape, held in zip(backbone.full_shapes, one.held, strict=True)
        )
        if others:
            assert backbone.window is not None
            products += sum(map(_products, others)) * _window_pairs(new, one.seen, backbone.window)
            states += sum(map(_numbers, others)) * (min(one.seen, backbone.window - 1) + 2 * new)
        flops += 2 * sizes.linear * new + 2 * sizes.lm_head * one.logits + 2 * products
        weights = sizes.linear + (sizes.lm_head if one.logits else 0)
        moved += sizes.element_size * (weights + states)
    return Cost(flops, moved)


def _products(shape: LayerShape) -> int:
    """Return the products of two numbers that a layer makes for a token and a unit that it sees."""
    return shape.num_heads * (shape.query_dim + shape.value_dim)


def _numbers(shape: LayerShape) -> int:
    """Return the numbers of the units of one token."""
    return shape.num_kv_heads * shape.unit_dim


def _pairs(new: int, held: int) -> int:
    """Return how many (token, unit) pairs causal attention of new tokens over held units and each other has."""
    return new * held + new * (new + 1) // 2


def _window_pairs(new: int, seen: int, window: int) -> int:
    """Return the same for tokens that see `window` tokens each, the own one included."""
    growing = max(0, min(new, window - seen))
    return _pairs(growing, seen) + (new - growing) * window
