"""What the file of a cache may hold: every holder declares its tensors, and one loop checks names, shapes and values.

Everything is checked against the backbone and against itself, because a cache that is read wrongly still answers.
"""

# B batch, K KV heads, S slots, U units of all heads and rows

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from locret.backbone.recurrence import States as StateShapes
from locret.backbone.shape import BOTH, NONE, RECURRENT, SLIDING, Backbone
from locret.base.fields import shown
from locret.cache.host import HostTier
from locret.cache.layer import HOST
from locret.cache.quantised import QuantisedStore
from locret.cache.ragged import RaggedStore
from locret.cache.rounding import forms_of
from locret.cache.sliding import SlidingLayer
from locret.cache.states import STATES, States
from locret.cache.store import COLUMNS, DenseStore
from locret.cache.trail import TRAIL, Trail
from locret.cache.units import DTYPES, FLOATS, NO_UNIT, POSITIONS, ROW_START, SCORES, Rule, Saved, Units
from locret.heads.fingerprint import crc
from locret.policy.policy import RetentionPolicy
from locret.policy.protection import spans_from

MOST_TOKENS = 2**31 - 1
"""Positions, and ids of tokens, are int32."""


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype that safetensors spells so."""
    found = [dtype for dtype, spelt in DTYPES.items() if spelt == name]
    if not found:
        raise ValueError(f"a column has the type {shown(name)}, which is none")
    return found[0]


def checksum(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Return a CRC-32 of a text and of tensors on the CPU: it tells damage, not a forgery."""
    total = zlib.crc32(text.encode())
    for name in sorted(tensors):
        total = crc(tensors[name], zlib.crc32(name.encode(), total))
    return f"{total:08x}"


def check_counters(numbers: Mapping[str, Any], backbone: Backbone) -> None:
    """Check the numbers beside the tensors, for themselves."""
    seen = _whole(numbers.get("seen"), "seen", 1, MOST_TOKENS)
    _whole(numbers.get("next_position"), "next_position", 1, seen)
    _whole(numbers.get("text_end", seen), "text_end", 0, seen + 1)  # its last token may be held back
    flags = {"held_back": numbers.get("held_back"), "fed_again": numbers.get("fed_again", False)}
    spans_from(numbers.get("protected", []))
    layers = numbers.get("layers")
    if not isinstance(layers, list) or not all(isinstance(counters, dict) for counters in layers):
        raise ValueError("it has no counters of its layers")
    if len(layers) != backbone.num_layers:
        raise ValueError(f"it has counters of {len(layers)} layers instead of {backbone.num_layers}")
    for index, (counters, kind) in enumerate(zip(layers, backbone.kinds, strict=True)):
        within = {SLIDING: (seen, seen), RECURRENT: (0, 0), NONE: (0, 0)}.get(kind, (0, numbers["next_position"]))
        _whole(counters.get("fill"), f"fill of layer {index}", *within)
        flags[f"rotated of layer {index}"] = counters.get("rotated")
        if kind in (RECURRENT, BOTH):
            flags[f"marked of layer {index}"] = counters.get("marked")
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {shown(value)} instead of true or false")


def _whole(value: Any, name: str, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} is {shown(value)} instead of a whole number from {least} to {most}")
    return value


def rules_of(
    numbers: Mapping[str, Any],
    backbone: Backbone,
    policy: RetentionPolicy,
    vocab_size: int,
    columns: Mapping[str, str],
    windows: Mapping[int, int] | None = None,
    states: StateShapes | None = None,
    neighbours: int | None = None,
) -> dict[str, Rule]:
    """Return what every tensor must be, where the counters are right; what is None only a backbone or scorer says."""
    seen, last, bound = numbers["seen"], numbers["next_position"], policy.host_budget
    forms = forms_of(policy, len(backbone.layers))
    rules = {
        "rows.pad": Rule(("rows",), ("I64",), 0, seen - 1, needed=False),
        "rows._shift": Rule(("rows",), ("I64",), 0, last, needed=False),
        "rows.last_tokens": Rule(("rows", 1), ("I64",), 0, vocab_size - 1, needed=False),
        "rows.digest": Rule(("rows",), ("I64",), needed=False),
        "rows._context": Rule(("rows", "newest", "hidden"), FLOATS, needed=False),
    }
    columns = {**{name: DTYPES[dtype] for name, dtype in COLUMNS.items()}, **columns}
    for index, (counters, kind) in enumerate(zip(numbers["layers"], backbone.kinds, strict=True)):
        own: dict[str, type[Units]] = {"": SlidingLayer} if kind == SLIDING else {}
        if kind in (RECURRENT, BOTH):
            own[STATES] = States
        form = None
        if index in backbone.layers:
            form = forms[backbone.layers.index(index)]
            own |= {
                "": RaggedStore if policy.head_budgets != "uniform" else DenseStore if form is None else QuantisedStore
            }
            own |= {HOST: HostTier, TRAIL: Trail}
            most = min(seen - counters["fill"], bound if isinstance(bound, int) else seen if bound else 0)
            _whole(counters.get("host_fill", 0), f"host_fill of layer {index}", 0, most)
        saved = Saved(
            index=index,
            shape=backbone.shape(index),
            counters=counters,
            seen=seen,
            next_position=last,
            columns=columns,
            form=form,
            window=None if windows is None else windows.get(index, 0),
            states=None if states is None else {name: one[0] for name, one in states[index].items()},
            neighbours=neighbours,
        )
        for prefix, kind_of in own.items():
            rules |= {f"layers.{index}.{prefix}{name}": rule for name, rule in kind_of.schema(saved).items()}
    return rules


def check_shapes(shapes: Mapping[str, tuple[tuple[int, ...], str]], rules: Mapping[str, Rule]) -> None:
    """Check name, shape and dtype of every tensor: a name in a rule's shape stands for one number everywhere."""
    missing = sorted(name for name, rule in rules.items() if rule.needed and name not in shapes)
    foreign = sorted(name for name in shapes if name not in rules)
    if missing or foreign:
        raise ValueError(f"it lacks {', '.join(missing[:3]) or 'nothing'} and has {foreign[:3]} too much")
    sizes: dict[str, int] = {}
    for name, (found, dtype) in shapes.items():
        rule = rules[name]
        open_ended = rule.shape[-1:] == (...,)
        wanted = [
            sizes.setdefault(size, here) if isinstance(size, str) else size
            for size, here in zip(rule.shape, found, strict=False)
            if size is not ...
        ]
        same = list(found[: len(wanted)]) == wanted and (open_ended or len(found) == len(rule.shape))
        if not same or dtype not in rule.dtypes:
            raise ValueError(
                f"{name} is {list(found)} of {dtype} instead of {list(rule.shape)} of {' or '.join(rule.dtypes)}"
            )
    if not sizes.get("rows"):
        raise ValueError("it has no rows")


def check_values(tensors: Mapping[str, Tensor], rules: Mapping[str, Rule], numbers: Mapping[str, Any]) -> None:
    """Check the values of tensors whose shapes are right."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            sound = ~tensor.isnan() if name.endswith(SCORES) else tensor.isfinite()
        else:
            least, most = rules[name].least, rules[name].most
            sound = torch.tensor(True) if least is None else (tensor >= least) & (tensor <= most)
        if not bool(sound.all()):
            raise ValueError(f"{name} holds numbers that it cannot hold")
        prefix, _, last = name.rpartition(".")
        if last == POSITIONS:
            counts = tensors.get(f"{prefix}.counts")
            if counts is None:
                start = tensors.get(f"{prefix}.{ROW_START}", torch.zeros(len(tensor), dtype=torch.long))
                ascending = _ascending(tensor, start)
            else:
                heads, fill = counts.shape[1], numbers["layers"][int(name.split(".")[1])]["fill"]
                whole = int(counts.sum()) == len(tensor) and int(counts.sum(1).max()) == heads * fill
                parts = tensor.split(counts.flatten().tolist()) if whole else ()
                ascending = whole and all(bool((part.diff() > 0).all()) for part in parts) and bool((tensor >= 0).all())
            if not ascending:
                raise ValueError(f"{name} are not ascending indices of the text")


def _ascending(positions_BKS: Tensor, start_B: Tensor) -> bool:
    """Return whether each row has ascending positions, behind its first empty slots."""
    empty = (torch.arange(positions_BKS.shape[2]) < start_B[:, None])[:, None].expand_as(positions_BKS)
    rising = (positions_BKS.diff(dim=2) > 0) | empty[..., 1:]
    return bool(rising.all()) and torch.equal(positions_BKS == NO_UNIT, empty)
