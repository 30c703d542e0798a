"""What the file of a cache may hold: units of the shapes and types that its backbone, policy and counters say.

What was damaged on its way is told by the checksum of the file.
"""

# B batch, K KV heads, S slots, U units of all heads and rows

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor

from locret.backbone.shape import BOTH, FULL, SLIDING, Backbone
from locret.cache.layer import HOST
from locret.cache.ragged import mean_units
from locret.cache.rounding import forms_of, packed_bytes
from locret.cache.store import COLUMNS, STATES
from locret.heads.fingerprint import crc
from locret.policy.policy import RetentionPolicy

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""How safetensors spells dtypes."""
_FLOATS = ("F64", "F32", "BF16", "F16")


def checksum(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Return a CRC-32 of a text and of tensors on the CPU: it tells damage, not a forgery."""
    total = zlib.crc32(text.encode())
    for name in sorted(tensors):
        total = crc(tensors[name], zlib.crc32(name.encode(), total))
    return f"{total:08x}"


def check_units(
    shapes: Mapping[str, tuple[tuple[int, ...], str]],
    numbers: Mapping[str, Any],
    backbone: Backbone,
    policy: RetentionPolicy,
    columns: Mapping[str, str],
) -> None:
    """Refuse keys, values and columns of other shapes and types than counters, backbone and policy say."""
    if len(numbers["layers"]) != backbone.num_layers:
        raise ValueError(f"it has counters of {len(numbers['layers'])} layers instead of {backbone.num_layers}")
    rows = next((shape[0] for name, (shape, _) in sorted(shapes.items()) if name.endswith("counts")), 0)
    for name, wanted, dtypes in _wanted(numbers, backbone, policy, columns):
        if name not in shapes:
            raise ValueError(f"it lacks {name}")
        found, dtype = shapes[name]
        if len(wanted) > 2:  # all but packed units say how many rows there are
            rows = rows or found[0]
        sizes = [rows if size == "rows" else size for size in wanted]
        same = len(found) == len(sizes) and all(size in (here, None) for size, here in zip(sizes, found, strict=True))
        if not same or dtype not in dtypes:
            raise ValueError(f"{name} is {list(found)} of {dtype} instead of {sizes} of {' or '.join(dtypes)}")
    if not rows:
        raise ValueError("it has no rows")


def check_counts(tensors: Mapping[str, Tensor], numbers: Mapping[str, Any], backbone: Backbone, spacing: int) -> None:
    """Refuse numbers of units per KV head that are not those of the units there are, and distances that are none."""
    for tier, (index, counters) in product(("", HOST), enumerate(numbers["layers"])):
        if (counts_BK := tensors.get((own := f"layers.{index}.{tier}") + "counts")) is not None:
            heads, units = backbone.shape(index).num_kv_heads, {len(tensors[own + name]) for name in STATES}
            right = counts_BK.dtype == torch.int64 and counts_BK.shape[1:] == (heads,) and bool((counts_BK >= 0).all())
            fills = units, mean_units(counts_BK)
            if not right or fills != ({int(counts_BK.sum())}, counters["host_fill" if tier else "fill"]):
                raise ValueError(f"KV heads of layer {index} are said to hold other units than there are")
            apart_BK = tensors.get(own + "apart", 0 * counts_BK)
            known = (apart_BK.dtype, apart_BK.shape) == (counts_BK.dtype, counts_BK.shape)
            if not known or bool(((apart_BK < 0) | (apart_BK > spacing)).any()):
                raise ValueError(f"layers.{index}.apart is no number of places, up to {spacing}, for each KV head")


def _wanted(
    numbers: Mapping[str, Any], backbone: Backbone, policy: RetentionPolicy, columns: Mapping[str, str]
) -> Iterator[tuple[str, tuple[Any, ...], tuple[str, ...]]]:
    """Yield name, shape and types of what there must be; of a size None anything goes."""
    columns = {**{name: DTYPES[dtype] for name, dtype in COLUMNS.items()}, **columns}
    forms = dict(zip(backbone.layers, forms_of(policy, len(backbone.layers)), strict=True))
    for index, (counters, kind) in enumerate(zip(numbers["layers"], backbone.kinds, strict=True)):
        shape, form, full = backbone.shape(index), forms.get(index), kind in (FULL, BOTH)
        if kind not in (FULL, BOTH, SLIDING):
            continue
        for tier in ("", HOST) if full and counters.get("host_fill") else ("",):
            units = counters["host_fill" if tier else "fill"] if full else None
            packed = full and policy.head_budgets != "uniform"
            lead = (None,) if packed else ("rows", shape.num_kv_heads, units)
            for name, dim in {"keys": shape.head_dim, "values": shape.value_dim}.items():
                coder = None if form is None else form.keys if name == "keys" else form.values
                coded = coder is not None and not coder.exact
                wide = packed_bytes(dim, coder.bits) if coder is not None and coded else dim
                yield f"layers.{index}.{tier}{name}", (*lead, wide), ("U8",) if coded else _FLOATS
            for name, dtype in columns.items() if full else ():
                yield f"layers.{index}.{tier}{name}", lead, (dtype,)
