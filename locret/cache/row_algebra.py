"""Rows of caches, and files: what is done to all that a cache holds alike, each a loop over its holders."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from locret.backbone.adapters import attention_modules, compute_dtype, device_of, input_device
from locret.backbone.head_ranks import HeadRanks
from locret.cache.layer import HOST
from locret.cache.sliding import SlidingLayer
from locret.cache.units import Workspace
from locret.policy.protection import spans_data, spans_from

if TYPE_CHECKING:
    from locret.cache.cache import RetentionCache

_PER_ROW = {
    "rows.pad": "pad",
    "rows._shift": "shift",
    "rows.last_tokens": "last_tokens",
    "rows._context": "newest_hidden",
    "rows.digest": "digest",
}
"""Tensors with a row per row of the batch: names in a file, and here."""
_COUNTERS = ("seen", "held_back", "fed_again", "next_position", "text_end")
_STATES = re.compile(r"(\.|_)(keys|values|queries)$|\.conv\.\d+$|^rows\._context$")
"""What the backbone computes in its own dtype, unless it is held in codes."""


@torch.inference_mode(False)
def take_rows(cache: RetentionCache, rows: Tensor | None = None) -> RetentionCache:
    """Return some rows, or all, as a cache of their own."""
    twin = copy.copy(cache)
    twin.reader, twin.watch, twin.workspace = None, None, Workspace()
    twin.layers, twin.carriers = [], {}
    for index, layer in enumerate(cache.layers):  # one after the other: only one layer is held twice as a whole
        twin.layers.append(layer.copy(twin.workspace))
        if index in cache.carriers:
            twin.carriers[index] = cache.carriers[index].copy(twin.workspace)
            twin.carriers[index].show(twin.layers[index])
        if rows is not None:
            for at, _, holder in twin.holders():
                if at == index:
                    holder.select_rows(rows)
    if rows is not None:
        index_rows(twin, rows)
    return twin


def index_rows(cache: RetentionCache, rows: Tensor) -> None:
    """Keep, repeat or reorder what a cache has of each row beside its units."""
    for name in _PER_ROW.values():
        if (tensor := getattr(cache, name)) is not None:
            setattr(cache, name, tensor.index_select(0, rows.to(tensor.device)))
    if len(cache.protected) > 1:
        cache.protected = tuple(cache.protected[row] for row in rows.tolist())
        if cache.reader is not None:
            cache.reader.limits.protect(cache.protected)


def trimmed(cache: RetentionCache, row: int) -> RetentionCache:
    """Return one row as a cache of its own, without the empty slots in front."""
    own = take_rows(cache, torch.tensor([row]))
    pad = 0 if cache.pad is None else int(cache.pad[row])
    own.seen, own.text_end = own.seen - pad, own.text_end - pad
    own.next_position -= 0 if cache.shift is None else int(cache.shift[row])
    own.pad = own.shift = None
    for _, _, holder in own.holders():
        holder.trim()
    _count_windows(own)
    return own


def join_rows(cache: RetentionCache, rows: list[RetentionCache], width: int, new_tokens: int) -> None:
    """Let a cache take over the units of single rows, aligned to the right, with room for `new_tokens` more."""
    device = input_device(cache.model)
    seen = torch.tensor([row.seen for row in rows], device=device)
    following = torch.tensor([row.next_position for row in rows], device=device)
    # Where a later text is padded too, padding is not only on the left, so ids do not tell any more what was read.
    known = not cache.seen or bool((width - seen == (0 if cache.pad is None else cache.pad)).all())
    held = {name: [own for row in rows if (own := getattr(row, name)) is not None] for name in _PER_ROW.values()}
    cache.digest = torch.cat(held["digest"]) if known and len(held["digest"]) == len(rows) else None
    cache.last_tokens = torch.cat(held["last_tokens"]) if held["last_tokens"] else None
    if newest := held["newest_hidden"]:
        tokens = min(states.shape[1] for states in newest)
        cache.newest_hidden = torch.cat([states[:, -tokens:] for states in newest])
    suspects = [row.suspect for row in rows if row.suspect is not None]
    cache.suspect = torch.stack(suspects).any() if suspects else None
    cache.seen, cache.next_position, cache.held_back = width, int(following.max()), False
    cache.text_end = width - max(row.seen - row.text_end for row in rows)
    cache.pad, cache.shift = cache.seen - seen, cache.next_position - following
    room = {}
    for nth, layer in enumerate(cache.governed):
        theirs = [row.governed[nth] for row in rows]
        most, layer.rotated = cache.limits.most_answering(nth), theirs[0].rotated
        left = new_tokens if most is None else most - max(one.fill for one in theirs)
        room[layer.store] = max(0, min(new_tokens, left))
    parts = [list(row.holders()) for row in rows]
    for row in rows:  # each holder is gone once it has been joined
        row.layers, row.carriers = [], {}
    for _, _, holder in cache.holders():
        holder.join([own.pop(0)[2] for own in parts], room.get(holder, 0))  # type: ignore[call-overload]
    _count_windows(cache)


def _count_windows(cache: RetentionCache) -> None:
    """Let layers that slide know how many tokens were read, padding included."""
    for layer in cache.layers:
        if isinstance(layer, SlidingLayer):
            layer.seen = cache.seen


def saved_state(cache: RetentionCache) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors and numbers that say everything, for `load_state`."""
    cache.finish_scores()
    layers: list[dict[str, Any]] = [{"fill": 0, "rotated": layer.rotated} for layer in cache.layers]
    tensors = {name: getattr(cache, own) for name, own in _PER_ROW.items() if getattr(cache, own) is not None}
    for index, prefix, holder in cache.holders():
        tensors |= {f"{prefix}{name}": tensor for name, tensor in holder.state().items()}
        if holder.counter:
            layers[index][holder.counter] = holder.count
    counters: dict[str, Any] = {name: getattr(cache, name) for name in _COUNTERS}
    if cache.protected:
        counters["protected"] = spans_data(cache.protected)
    return {name: tensor.contiguous() for name, tensor in tensors.items()}, {**counters, "layers": layers}


def state_of(tensors: Mapping[str, Tensor], ranks: HeadRanks | None, *, whole: bool) -> dict[str, Tensor]:
    """Return a cache's state with the heads of all processes, which all call this; or of such a one this one's part."""
    if ranks is None:
        return dict(tensors)
    part, state = ranks.gather if whole else ranks.own, dict(tensors)
    for name, one in tensors.items():
        if name.startswith("layers.") and (one.ndim >= 3 or name.endswith("exact")):  # dimension 1 counts heads
            state[name] = part(one, 1).contiguous()
    return state


@torch.inference_mode(False)
def load_state(cache: RetentionCache, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
    """Take over what `saved_state` returned, on the backbone's device and in its dtype."""
    dtype, rows = compute_dtype(cache.model), input_device(cache.model)
    devices = [device_of(module) for module in attention_modules(cache.model)]
    usual = {"fed_again": False, "text_end": numbers["seen"]}  # files of earlier versions do not say these
    for name in _COUNTERS:
        setattr(cache, name, numbers.get(name, usual.get(name)))
    cache.protected = spans_from(numbers.get("protected", []))
    left = {
        name: tensor.to(dtype) if tensor.is_floating_point() and _STATES.search(name) else tensor
        for name, tensor in tensors.items()
    }
    for name, attribute in _PER_ROW.items():
        if name in left:
            setattr(cache, attribute, left.pop(name).to(rows))
    parts: dict[str, dict[str, Tensor]] = {}
    for _, prefix, _ in sorted(cache.holders(), key=lambda one: -len(one[1])):
        parts[prefix] = {name.removeprefix(prefix): left.pop(name) for name in [*left] if name.startswith(prefix)}
    for index, prefix, holder in sorted(cache.holders(), key=lambda one: len(one[1])):
        own, counters = parts[prefix], numbers["layers"][index]
        if not prefix.endswith(HOST):  # a second tier has a place of its own
            own = {name: tensor.to(devices[index]) for name, tensor in own.items()}
        holder.load(own, counters.get(holder.counter, 0))
    for layer, counters in zip(cache.layers, numbers["layers"], strict=True):
        layer.rotated = counters["rotated"]
