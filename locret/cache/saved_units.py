"""What a saved cache may hold: counters and tensor shapes checked before a unit is read, units before they are used.

Everything here is checked against the backbone and against itself, because a cache that is read wrongly still answers.
"""

# B batch, K KV heads, S slots, U units of all heads and rows, D head dim

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from locret.backbone.adapters import BOTH, NONE, RECURRENT, SLIDING, Backbone, LayerShape
from locret.backbone.recurrence import CONV, SCAN, States
from locret.base.fields import shown
from locret.cache.layer import HOST
from locret.cache.rounding import Form
from locret.cache.states import BEFORE, STATES
from locret.cache.store import COLUMNS
from locret.cache.trail import NEWEST_FEATURES
from locret.cache.units import NO_UNIT, POSITIONS, SCORES
from locret.heads.fingerprint import crc
from locret.policy.protection import spans_from

_Rule = tuple[tuple[int, ...], tuple[str, ...]]
"""Shape of a tensor, and the dtypes it may have."""

Shapes = Mapping[str, tuple[tuple[int, ...], str]]
"""Shape and dtype of every tensor of a file by name, dtypes as safetensors spells them."""

_FLOATS = ("F64", "F32", "BF16", "F16")
_DTYPES = {
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
MOST_TOKENS = 2**31 - 1
"""Positions, and ids of tokens, are int32."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What the units of a file must agree with."""

    backbone: Backbone
    ragged: bool
    """Whether heads hold different numbers of units."""
    compact: bool
    vocab_size: int
    hidden_size: int
    columns: Mapping[str, str]
    """Columns besides `scores` and `positions`, with dtypes as safetensors spells them."""
    forms: Sequence[Form | None] = ()
    """How each full-attention layer holds its units, where not all hold them as they are."""
    host_budget: int | str | None = None
    """Of the policy."""
    windows: Mapping[int, int] = field(default_factory=dict)
    """Newest queries that a layer's second tier remembers, where it does."""
    states: States | None = None
    """Shapes of the states of layers that carry any; None: only a backbone says them."""
    neighbours: int | None = None
    """Of the scorer; None: only a scorer says it."""

    def most_evicted(self, seen: int) -> int:
        """Return the most units that a second tier may hold per KV head."""
        return min(seen, self.host_budget) if isinstance(self.host_budget, int) else seen if self.host_budget else 0


def dtype_name(dtype: torch.dtype) -> str:
    """Return how safetensors spells a dtype; itself where it has no name for it."""
    return _DTYPES.get(dtype, str(dtype))


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype that safetensors spells so.

    Raises:
        ValueError: If there is none.
    """
    for dtype, spelt in _DTYPES.items():
        if spelt == name:
            return dtype
    raise ValueError(f"a column has the type {shown(name)}, which is none")


def checksum(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Return a CRC-32 of a text and of tensors on the CPU: it tells damage, not a forgery."""
    total = zlib.crc32(text.encode())
    for name in sorted(tensors):
        total = zlib.crc32(name.encode(), total)
        total = crc(tensors[name], total)
    return f"{total:08x}"


def of_a_ledger(name: str) -> bool:
    """Return whether a tensor belongs to what earlier versions remembered for evidence, which is left out."""
    return name.endswith(".ledger")


def check_counters(numbers: Mapping[str, Any], backbone: Backbone) -> None:
    """Check the numbers beside the tensors, for themselves.

    Raises:
        ValueError: For the first that is missing, of another type or out of range.
    """
    for name in ("seen", "next_position"):
        _whole(numbers.get(name), name, 1, MOST_TOKENS)
    for name in ("held_back", "fed_again"):
        # `fed_again` is newer than the first files.
        if not isinstance(numbers.get(name, False if name == "fed_again" else None), bool):
            raise ValueError(f"{name} is {shown(numbers.get(name))} instead of true or false")
    _whole(
        numbers.get("text_end", numbers["seen"]), "text_end", 0, numbers["seen"] + 1
    )  # its last token may be held back
    if numbers["next_position"] > numbers["seen"]:
        raise ValueError(f"next_position is {numbers['next_position']} after {numbers['seen']} tokens")
    spans_from(numbers.get("protected", []))
    layers = numbers.get("layers")
    if not isinstance(layers, list) or len(layers) != backbone.num_layers:
        held = len(layers) if isinstance(layers, list) else "no"
        raise ValueError(f"it has counters of {held} layers instead of {backbone.num_layers}")
    for index, counters in enumerate(layers):
        if not isinstance(counters, dict) or not isinstance(counters.get("rotated"), bool):
            raise ValueError(f"the counters of layer {index} are {shown(counters)}")
        kind = backbone.kinds[index]
        least, most = {SLIDING: (numbers["seen"],) * 2, RECURRENT: (0, 0), NONE: (0, 0)}.get(kind, (0, numbers["seen"]))
        _whole(counters.get("fill"), f"fill of layer {index}", least, most)
        if kind in (RECURRENT, BOTH) and not isinstance(counters.get("marked"), bool):
            raise ValueError(f"marked of layer {index} is {shown(counters.get('marked'))} instead of true or false")
        if index in backbone.layers and counters["fill"] > numbers["next_position"]:
            raise ValueError(
                f"next_position is {numbers['next_position']} after {counters['fill']} units of layer {index}"
            )
    if len({layers[index]["rotated"] for index in backbone.layers}) > 1:
        raise ValueError("the keys of some layers are rotated and those of others are not")


def check_shapes(shapes: Shapes, numbers: Mapping[str, Any], reading: Reading) -> None:
    """Check name, shape and dtype of every tensor, against checked counters.

    Raises:
        ValueError: For the first tensor that is missing, of another shape or dtype, or not part of a cache.
    """
    if not reading.compact and any(counters["rotated"] for counters in numbers["layers"]):
        raise ValueError('its keys are rotated to slots, but its policy has positions="original"')
    for index, counters in enumerate(numbers["layers"]):
        most = reading.most_evicted(numbers["seen"] - counters["fill"]) if index in reading.backbone.layers else 0
        _whole(counters.get("host_fill", 0), f"host_fill of layer {index}", 0, most)
    first = _first(reading)
    if first not in shapes or not shapes[first][0] or not shapes[first][0][0]:
        raise ValueError(f"it has no {first} with a row")
    wanted: dict[str, _Rule] = {}
    rows = shapes[first][0][0]
    for index, counters in enumerate(numbers["layers"]):
        layer = _layer(index, counters, rows, shapes, reading)
        layer |= _host(index, counters, rows, shapes, reading)
        layer |= _states(index, counters, rows, shapes, reading)
        layer |= _trail(index, rows, shapes, reading)
        wanted |= {f"layers.{index}.{name}": rule for name, rule in layer.items()}
    wanted |= _row_tensors(rows, shapes, reading)
    missing, foreign = sorted(wanted.keys() - shapes.keys()), sorted(shapes.keys() - wanted.keys())
    if missing or foreign:
        raise ValueError(f"it lacks {_names(missing)} and has {_names(foreign)} too much")
    for name, (shape, dtypes) in wanted.items():
        found, dtype = shapes[name]
        if found != shape or dtype not in dtypes:
            raise ValueError(f"{name} is {list(found)} of {dtype} instead of {list(shape)} of {' or '.join(dtypes)}")
    exact = (".keys", ".values", "exact_keys", "exact_values", ".queries", "._context")
    kinds = {shapes[name][1] for name in wanted if name.endswith(exact) and shapes[name][1] in _FLOATS}
    if len(kinds) > 1:
        raise ValueError(f"its keys, values and hidden states are of several types ({', '.join(sorted(kinds))})")


def _first(reading: Reading) -> str:
    """Return the name of a tensor that has a row per row of the batch."""
    kinds = reading.backbone.kinds
    first = next(index for index, kind in enumerate(kinds) if kind not in (RECURRENT, NONE))
    return f"layers.{first}.{'counts' if reading.ragged and kinds[first] != SLIDING else 'keys'}"


def _layer(index: int, counters: Mapping[str, Any], rows: int, shapes: Shapes, reading: Reading) -> dict[str, _Rule]:
    fill, turned = counters["fill"], counters["rotated"]
    shape = reading.backbone.shape(index)
    heads, wide = shape.num_kv_heads, (("keys", shape.head_dim), ("values", shape.value_dim))
    row_start: dict[str, _Rule] = {"row_start": ((rows,), ("I64",))} if f"layers.{index}.row_start" in shapes else {}
    if reading.backbone.kinds[index] in (RECURRENT, NONE):
        return {}
    if index not in reading.backbone.layers:
        most = min(fill, reading.backbone.window or fill)
        found = shapes.get(f"layers.{index}.keys", ((), ""))[0]
        # One less once the newest token was taken back.
        slots = found[2] if len(found) == 4 and found[2] == most - 1 else most
        return {**{name: ((rows, heads, slots, dim), _FLOATS) for name, dim in wide}, **row_start}
    columns = {name: dtype_name(dtype) for name, dtype in COLUMNS.items()} | dict(reading.columns)
    if not reading.ragged:
        units: tuple[int, ...] = (rows, heads, fill)
        extra = row_start
    else:
        found = shapes.get(f"layers.{index}.keys", ((), ""))[0]
        units = (min(found[0] if found else 0, rows * heads * fill),)
        extra = {"counts": ((rows, heads), ("I64",))}
    states: dict[str, _Rule] = {name: ((*units, dim), _FLOATS) for name, dim in wide}
    form = _form(index, reading)
    if form is not None:
        extra = {**extra, **_coded(form, units, shape, turned=turned)}
    return {**states, **{name: (units, (dtype,)) for name, dtype in columns.items()}, **extra}


def _form(index: int, reading: Reading) -> Form | None:
    return reading.forms[reading.backbone.layers.index(index)] if reading.forms else None


def _coded(form: Form, units: tuple[int, ...], shape: LayerShape, *, turned: bool) -> dict[str, _Rule]:
    """Return the rules of units that are held in codes; keys or values with 16 bits are held as they are."""
    rows, heads, slots = units
    coded = form.shapes((rows, heads, slots), shape.head_dim, shape.value_dim)
    rules: dict[str, _Rule] = {name: (sizes, (dtype_name(dtype),)) for name, (sizes, dtype) in coded.items()}
    rules["exact_keys"] = ((rows, heads, form.recent, shape.head_dim), _FLOATS)
    rules["exact_values"] = ((rows, heads, form.recent, shape.value_dim), _FLOATS)
    return {**rules, "following": ((2, rows), ("I64",))} if turned else rules


def _host(index: int, counters: Mapping[str, Any], rows: int, shapes: Shapes, reading: Reading) -> dict[str, _Rule]:
    fill, shape = counters.get("host_fill", 0), reading.backbone.shape(index)
    units = (rows, shape.num_kv_heads, fill)
    keys: _Rule = ((*units, shape.head_dim), _FLOATS)
    values: _Rule = ((*units, shape.value_dim), _FLOATS)
    columns = {name: dtype_name(dtype) for name, dtype in COLUMNS.items()} | dict(reading.columns)
    held = {"keys": keys, "values": values, **{name: (units, (dtype,)) for name, dtype in columns.items()}}
    form = _form(index, reading) if index in reading.backbone.layers else None
    if form is not None:
        held |= _coded(replace(form, recent=0), units, shape, turned=counters["rotated"])
    held = held if fill else {}
    if fill and f"layers.{index}.{HOST}row_start" in shapes:
        held["row_start"] = ((rows,), ("I64",))
    if reading.windows.get(index) and f"layers.{index}.{HOST}queries" in shapes:
        window = reading.windows[index]
        held["queries"] = ((rows, shape.num_heads, window, shape.head_dim), _FLOATS)
    return {f"{HOST}{name}": rule for name, rule in held.items()}


def _states(index: int, counters: Mapping[str, Any], rows: int, shapes: Shapes, reading: Reading) -> dict[str, _Rule]:
    """Return the rules of a layer's states: where no backbone says their shapes, that they have all rows."""
    if reading.backbone.kinds[index] not in (RECURRENT, BOTH):
        return {}
    prefix = f"layers.{index}.{STATES}"
    if reading.states is not None:
        inner = {name: shape for name, (shape, _) in reading.states[index].items()}
    else:
        held = {name.removeprefix(prefix): shape for name, (shape, _) in shapes.items() if name.startswith(prefix)}
        inner = {name: shape[1:] for name, shape in held.items() if re.fullmatch(f"({CONV}|{SCAN})\\.\\d", name)}
        if not inner:
            raise ValueError(f"it has no state of layer {index}")
    rules: dict[str, _Rule] = {f"{STATES}{name}": ((rows, *shape), _FLOATS) for name, shape in inner.items()}
    # There was no state before the first token.
    if counters["marked"] and any(name.startswith(f"{prefix}{BEFORE}.") for name in shapes):
        rules |= {f"{STATES}{BEFORE}.{name}": ((rows, *shape), _FLOATS) for name, shape in inner.items()}
    return rules


def _trail(index: int, rows: int, shapes: Shapes, reading: Reading) -> dict[str, _Rule]:
    """Return the rule of the newest tokens' features: where no scorer says how many, that they have all rows."""
    name = f"layers.{index}.{NEWEST_FEATURES}"
    if name not in shapes and not reading.neighbours:
        return {}
    found = shapes.get(name, ((), ""))[0]
    if reading.neighbours is None:
        return {NEWEST_FEATURES: ((rows, *found[1:]), _FLOATS)}
    if not reading.neighbours or index not in reading.backbone.layers:
        return {}
    return {NEWEST_FEATURES: ((rows, reading.neighbours + 1, reading.backbone.shape(index).feature_dim), _FLOATS)}


def _row_tensors(rows: int, shapes: Shapes, reading: Reading) -> dict[str, _Rule]:
    wanted: dict[str, _Rule] = {}
    if {"rows.pad", "rows._shift"} & shapes.keys():
        wanted |= {"rows.pad": ((rows,), ("I64",)), "rows._shift": ((rows,), ("I64",))}
    if "rows.last_tokens" in shapes:
        wanted["rows.last_tokens"] = ((rows, 1), ("I64",))
    if "rows.digest" in shapes:
        wanted["rows.digest"] = ((rows,), ("I64",))
    if "rows._context" in shapes:
        found = shapes["rows._context"][0]
        tokens = found[1] if len(found) == 3 and found[1] in (1, 2) else 1
        wanted["rows._context"] = ((rows, tokens, reading.hidden_size), _FLOATS)
    return wanted


def check_units(tensors: Mapping[str, Tensor], numbers: Mapping[str, Any], reading: Reading) -> None:
    """Check the values of tensors whose shapes are right.

    Raises:
        ValueError: For the first that no cache can hold.
    """
    seen = numbers["seen"]
    rows = len(tensors[_first(reading)])
    pad = _within(tensors, "rows.pad", 0, seen - 1)
    _within(tensors, "rows._shift", 0, numbers["next_position"])
    _within(tensors, "rows.last_tokens", 0, reading.vocab_size - 1)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not name.endswith(SCORES) and not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} holds values that are not finite numbers")
    for index, counters in enumerate(numbers["layers"]):
        layer = {
            name.removeprefix(f"layers.{index}."): tensor
            for name, tensor in tensors.items()
            if name.startswith(f"layers.{index}.")
        }
        start = _within(layer, "row_start", 0, counters["fill"], f"layers.{index}.")
        if index not in reading.backbone.layers:
            continue
        _check_codes(layer, counters["fill"], numbers["next_position"], f"layers.{index}.")
        second = {name.removeprefix(HOST): tensor for name, tensor in layer.items() if name.startswith(HOST)}
        _check_codes(second, counters.get("host_fill", 0), numbers["next_position"], f"layers.{index}.{HOST}")
        if bool(layer[SCORES].isnan().any()):
            raise ValueError(f"layers.{index}.{SCORES} holds values that are not numbers")
        try:
            if reading.ragged:
                _check_segments(layer, counters["fill"], seen, pad)
            else:
                ends = torch.full((rows,), seen) - (0 if pad is None else pad)
                _check_rows(layer[POSITIONS], torch.zeros(rows, dtype=torch.long) if start is None else start, ends)
                if counters.get("host_fill", 0):
                    _check_host(layer, counters["host_fill"], ends)
        except ValueError as error:
            raise ValueError(f"layers.{index}.{error}") from None


def _check_codes(layer: Mapping[str, Tensor], fill: int, next_position: int, prefix: str) -> None:
    """Check what units in codes have besides: places, frames and the window of exact units."""
    if "exact" not in layer:
        return
    _within(layer, "exact", 0, min(fill, layer["exact_keys"].shape[2]), prefix)
    _within(layer, "following", 0, next_position, prefix)
    _within(layer, "places", -next_position, next_position - 1, prefix)
    for name in ("key_frame", "value_frame"):
        if name in layer and not bool((layer[name][:, :, 1] > 0).all()):
            raise ValueError(f"{prefix}{name} holds widths that are not above 0")


def _check_rows(positions_BKS: Tensor, start_B: Tensor, end_B: Tensor) -> None:
    """Check that each row has ascending positions below its end, and none in its first empty slots."""
    empty = (torch.arange(positions_BKS.shape[2]) < start_B[:, None])[:, None]
    above = torch.where(empty, torch.arange(positions_BKS.shape[2]) - MOST_TOKENS, positions_BKS.long())
    ascending = bool((above.diff(dim=2) > 0).all())
    inside = empty | ((positions_BKS >= 0) & (positions_BKS < end_B[:, None, None]))
    if not ascending or not bool(inside.all()) or bool((positions_BKS.masked_fill(~empty, NO_UNIT) != NO_UNIT).any()):
        raise ValueError("positions are not ascending indices of the text")


def _check_host(layer: Mapping[str, Tensor], fill: int, end_B: Tensor) -> None:
    """Check the second tier of a layer, for itself and against the first: no unit is in both."""
    positions, start = layer[HOST + POSITIONS], _within(layer, f"{HOST}row_start", 0, fill)
    if bool(layer[HOST + SCORES].isnan().any()):
        raise ValueError(f"{HOST}{SCORES} holds values that are not numbers")
    try:
        _check_rows(positions, torch.zeros(len(end_B), dtype=torch.long) if start is None else start, end_B)
    except ValueError as error:
        raise ValueError(f"{HOST}{error}") from None
    both = torch.cat([layer[POSITIONS], positions], dim=2).sort(dim=2).values
    if bool(((both.diff(dim=2) == 0) & (both[..., 1:] != NO_UNIT)).any()):
        raise ValueError(f"{HOST}positions repeat those of units that were never evicted")


def _check_segments(layer: Mapping[str, Tensor], fill: int, seen: int, pad: Tensor | None) -> None:
    """Check how many units each head of a ragged layer holds, and the positions of each."""
    counts_BK = layer["counts"]
    rows, heads = counts_BK.shape
    if bool((counts_BK < 0).any()) or bool((counts_BK > seen).any()):
        raise ValueError("counts are not numbers of units")
    by_row = counts_BK.sum(1)
    if int(by_row.max()) != heads * fill or int(by_row.sum()) != len(layer["keys"]):
        raise ValueError(f"counts do not add up to {len(layer['keys'])} units, at most {fill} per head on average")
    ends = torch.full((rows,), seen) - (0 if pad is None else pad)
    positions = layer[POSITIONS].long()
    inside = (positions >= 0) & (positions < ends.repeat_interleave(by_row))
    firsts = torch.zeros(len(positions) + 1, dtype=torch.bool)
    firsts[counts_BK.flatten().cumsum(0)] = True
    rising = (positions.diff() > 0) | firsts[1 : len(positions)]
    if not bool(inside.all()) or not bool(rising.all()):
        raise ValueError("positions are not ascending indices of the text")


def _within(tensors: Mapping[str, Tensor], name: str, least: int, most: int, prefix: str = "") -> Tensor | None:
    tensor = tensors.get(name)
    if tensor is not None and not bool(((tensor >= least) & (tensor <= most)).all()):
        raise ValueError(f"{prefix}{name} holds numbers outside of {least} to {most}")
    return tensor


def _whole(value: Any, name: str, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name} is {shown(value)} instead of a whole number from {least} to {most}")


def _names(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "") if names else "nothing"
