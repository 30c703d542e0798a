"""Budgets given as bytes or as a share of the prompt, turned into units; and the bytes that a plan comes to."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from locret.backbone.shape import Backbone, LayerShape

_SCORE_AND_POSITION_BYTES = 8
_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def unit_bytes(head_dim: int, value_dim: int, element_size: int, column_bytes: int) -> int:
    """Return the bytes of a cache unit: its key, its value, its score, its position and a method's own columns."""
    return (head_dim + value_dim) * element_size + _SCORE_AND_POSITION_BYTES + column_bytes


def workspace_bytes(
    backbone: Backbone, capacities: Sequence[int], element_size: int, forms: Sequence[Any], *, still: bool
) -> int:
    """Return the bytes beside a row's units in full-attention layers: other layers, states, and a shared workspace.

    Where units are `still`, neither moved nor turned, only those in codes need one. `forms` are those of `forms_of`.
    """
    others = [backbone.shape(index) for index in range(backbone.num_layers) if backbone.kinds[index] == "sliding"]
    sliding = ((backbone.window or 0) + 1) * sum(shape.num_kv_heads * shape.unit_dim for shape in others)
    layers = zip(backbone.full_shapes, capacities, forms, strict=True)
    copied = (slots * shape.num_kv_heads * _copied(shape, form, still) for shape, slots, form in layers)
    return element_size * (max(copied, default=0) + sliding) + backbone.state_bytes(element_size)


def _copied(shape: LayerShape, form: Any, still: bool) -> int:
    """Return how many numbers of a unit are in the workspace at once: keys turned, units moved, or codes decoded."""
    if shape.latent:
        return shape.unit_dim
    if form is not None:
        return shape.unit_dim if form.states > 1 else shape.head_dim
    return 0 if still else max(shape.head_dim, shape.value_dim)


def full_bytes(backbone: Backbone, tokens: int, element_size: int) -> int:
    """Return the bytes of the keys and values of all tokens in full-attention layers: what no eviction would hold."""
    return tokens * element_size * sum(shape.num_kv_heads * shape.unit_dim for shape in backbone.full_shapes)


def units_bytes(
    backbone: Backbone, slots: Sequence[int], size: int, columns: int = 0, forms: Sequence[Any] | None = None
) -> int:
    """Return the bytes of so many slots per KV head in each layer; see `workspace_bytes` and `column_bytes`."""
    total = 0
    for shape, own, form in zip(backbone.full_shapes, slots, forms or [None] * len(slots), strict=True):
        sizes = shape.head_dim, shape.value_dim, size
        unit = (unit_bytes if form is None else form.unit_bytes)(*sizes, columns)
        once = 0 if form is None or not own else form.head_bytes(*sizes)
        total += shape.num_kv_heads * (own * unit + once)
    return total


def parse_bytes(text: str, where: str = "") -> int:
    """Return the bytes of `2GiB`, `1.5 GB`, `800MiB` or `1048576`; KiB is 1024 bytes, kB 1000; messages say `where`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if match is None or (match[3] and not match[2]):
        raise ValueError(f"{where}{text} is not an amount of memory; write it like 2GiB, 800MB or 1048576")
    count = int(Fraction(match[1]) * (1024 if match[3] else 1000) ** _UNITS[match[2].upper()])
    if count < 1:
        raise ValueError(f"{where}{text} is less than one byte; give at least 1 byte")
    return count


def share_of(share: float | str, where: str = "") -> Fraction:
    """Return the share of a prompt that somebody writes, such as 0.25 or 25%; messages say `where`."""
    text = str(share).strip()
    try:
        part = Fraction(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except (ValueError, ZeroDivisionError):
        part = Fraction(0)
    if not 0 < part <= 1:
        rule = "is not a share of the prompt; give more than 0 and at most 1, such as 0.25 or 25%"
        raise ValueError(f"{where}{share} {rule}")
    return part


def units_of_share(share: float | str, tokens: int) -> int:
    """Return the budget that is this share of a prompt, rounded down, at least 1 unit."""
    return max(1, int(share_of(share) * tokens))


def largest_budget(planned_bytes: Callable[[int], int], memory: int, least: int, most: int) -> int | None:
    """Return the largest budget whose planned bytes fit in `memory`, or None if the least does not fit.

    Bytes grow with the budget, but for the rounding of pyramids and chunks, where the result fits all the same.
    """
    if planned_bytes(least) > memory:
        return None
    low, high = least, max(least, most)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if planned_bytes(middle) <= memory else (low, middle - 1)
    return low
