"""Batches whose rows differ in length: each row is read alone, so it equals its own single run; then all are joined.

Joined rows are aligned to the right; the slots in front of a shorter row hold nothing and are never attended.
"""

# B batch, K KV heads, S slots, D head dim

from __future__ import annotations

import torch
from torch import Tensor

from locret.cache.cache import RetentionCache
from locret.cache.layer import NO_UNIT, RetentionLayer
from locret.cache.ragged import RaggedLayer
from locret.cache.sliding import SlidingLayer


def split_rows(cache: RetentionCache, batch: int) -> list[RetentionCache]:
    """Return one cache per row, without the empty slots in front of short rows; new ones if nothing was read yet."""
    if not cache.seen:
        return [cache.fresh() for _ in range(batch)]
    rows = []
    for index in range(batch):
        row = cache.copy()
        row.select_rows(torch.tensor([index]))
        pad = int(cache.pad[index]) if cache.pad is not None else 0
        shift = int(cache._shift[index]) if cache._shift is not None else 0
        row.seen, row._next_position = cache.seen - pad, cache._next_position - shift
        row.pad = row._shift = None
        for layer in row.layers:
            start = layer.held_row_start
            _drop_front(layer, int(start[0]) if start is not None else 0, row.seen)
        rows.append(row)
    return rows


def _drop_front(layer: RetentionLayer | SlidingLayer, empty: int, seen: int) -> None:
    if isinstance(layer, SlidingLayer):
        layer.fill_rows(layer.keys[:, :, empty:], layer.values[:, :, empty:], None, seen)
        return
    layer.row_start = None
    if empty:
        for buffer in (layer.keys, layer.values, layer.scores, layer.positions):
            buffer[:, :, : layer.fill - empty] = buffer[:, :, empty : layer.fill].clone()
        layer.fill -= empty


def join_rows(cache: RetentionCache, rows: list[RetentionCache], width: int, new_tokens: int = 0) -> None:
    """Fill `cache` with the rows' units, aligned to the right, with room for `new_tokens` more."""
    device = rows[0].layers[0].keys.device
    seen = torch.tensor([row.seen for row in rows], device=device)
    following = torch.tensor([row._next_position for row in rows], device=device)
    cache.seen, cache._next_position, cache.held_back = width, int(following.max()), False
    cache.pad, cache._shift = cache.seen - seen, cache._next_position - following
    last_tokens = [row.last_tokens for row in rows if row.last_tokens is not None]
    cache.last_tokens = torch.cat(last_tokens) if last_tokens else None
    contexts = [row._context for row in rows if row._context is not None]
    if contexts:
        cache._context = torch.cat([context[:, -min(c.shape[1] for c in contexts) :] for context in contexts])
    place = 0
    for index, layer in enumerate(cache.layers):
        parts = [row.layers[index] for row in rows]
        if isinstance(layer, SlidingLayer):
            keys, start = _aligned([part.keys for part in parts], 0)
            values, _ = _aligned([part.values for part in parts], 0)
            layer.fill_rows(keys, values, start, cache.seen)
        else:
            _join_layer(layer, parts, new_tokens, cache.limits.most_answering(place))
            place += 1
        for row in rows:
            row.layers[index] = None
    cache._peak = max(cache._peak, cache._bytes())
    cache.end_reading()


def _join_layer(layer: RetentionLayer, parts: list[RetentionLayer], new_tokens: int, decode_budget: int | None) -> None:
    fill = max(part.fill for part in parts)
    capacity = fill + new_tokens if decode_budget is None else max(fill, min(fill + new_tokens, decode_budget))
    if isinstance(layer, RaggedLayer):
        layer.join(parts, capacity)
        return
    empty = {"keys": 0, "values": 0, "scores": -torch.inf, "positions": NO_UNIT}
    for name, value in empty.items():
        joined, start = _aligned([getattr(part, name)[:, :, : part.fill] for part in parts], value, capacity - fill)
        setattr(layer, name, joined)
    layer.fill, layer.capacity, layer.row_start = fill, capacity, start
    layer.is_initialized, layer.rotated = True, parts[0].rotated


def _aligned(parts: list[Tensor], empty: float, room: int = 0) -> tuple[Tensor, Tensor]:
    """Stack (1, K, S_i, ...) tensors into (B, K, max S + room, ...), right-aligned; also (B,) where each row begins."""
    slots = max(part.shape[2] for part in parts)
    joined = parts[0].new_full((len(parts), parts[0].shape[1], slots + room, *parts[0].shape[3:]), empty)
    start = torch.tensor([slots - part.shape[2] for part in parts], device=joined.device)
    for row, part in enumerate(parts):
        joined[row, :, slots - part.shape[2] : slots] = part[0]
    return joined, start
