"""Attention of a block of new tokens over everything cached: aligned bottom right, without a mask where possible."""

# B batch, N query heads, K KV heads, L new tokens, S slots, D head dim

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

ROWS = 256
"""Queries that attend at a time; a quarter of them made reading on a CPU a tenth to a fifth slower."""
_ROWS_NEAR_AND_FAR = 64
_MASK_STEP = 256
_RECALLED_LOGITS = 1 << 24


class MaskMemo:
    """Keeps one mask of each kind: every mask that a forward pass needs is the bottom right corner of the largest."""

    def __init__(self) -> None:
        self._masks: dict[str, tuple[tuple[object, ...], Tensor] | None] = {}

    def causal(self, new: int, slots: int, window: int | None, like: Tensor) -> Tensor:
        """Return (L, S) in the dtype of `like`, a view: 0 where a new token may look, -inf elsewhere."""
        kind, key = "window" if window else "causal", (window, like.dtype, like.device)
        held = self._masks.get(kind)
        rows, columns = held[1].shape if held is not None and held[0] == key else (0, 0)
        if held is None or new > rows or slots > columns:
            # In steps, because generated tokens make it one slot wider each.
            rows, columns = max(new, rows), max(-(-slots // _MASK_STEP) * _MASK_STEP, columns)
            held = self._masks[kind] = None  # its memory first
            mask = like.new_full((rows, columns), -torch.inf).triu_(columns - rows + 1)
            if window is not None:
                mask += torch.full_like(mask, -torch.inf).tril_(columns - rows - window)
            held = self._masks[kind] = (key, mask)
        return held[1][rows - new :, columns - slots :]


@dataclass(frozen=True)
class Recalled:
    """Units of a second tier that queries attend to besides what is held in front of them."""

    keys: Tensor
    """(B, heads, queries, R, D), post-rotary; heads are K, or N where every query head has its own units; queries are
    L, or 1 where all share them."""
    values: Tensor
    there: Tensor | None = None
    """Shaped like the keys, but for D: False for what is no unit, where rows or heads hold different numbers; None: all
    are."""

    def of_head(self, row: int, head: int, kv_heads: int) -> Recalled:
        """Return what the queries of one KV head of one row recall."""
        own = self.keys.shape[1] // kv_heads
        where = slice(row, row + 1), slice(head * own, (head + 1) * own)
        return Recalled(self.keys[where], self.values[where], None if self.there is None else self.there[where])


@dataclass(frozen=True)
class Far:
    """What a view has besides its own slots, which are the near ones: units that lie behind the window."""

    near_query: Tensor
    """(B, N, L, D) queries, rotated as the view's keys are."""
    query: Tensor
    """(B, N, L, D) the same queries as the far units see them."""
    keys: Tensor
    """(B, K, F, D): `held` slots that leave the window while the new tokens pass, then those that all of them see."""
    values: Tensor
    """Shaped like the keys."""
    held: int
    """The slots of the first kind; new token i of L sees the first `held` - L + i + 1 of them."""
    window: int
    """Tokens that a query sees as near, its own included."""
    empty: Tensor | None
    """(B, 1 or K, S + F) bool, near slots first: those that hold nothing; None if all hold units."""
    tell: Callable[[Tensor], None]
    """Called with the (B, N, S) attention of the near slots, summed over queries."""


@dataclass(frozen=True)
class View:
    """What queries of one layer attend to: units that a store holds, wherever and however it holds them."""

    keys: Tensor
    """(B, K, S, D), post-rotary, the new tokens last; with `segments` (B, 1, slots, D), all heads back to back."""
    values: Tensor
    """Shaped like the keys."""
    row_start: Tensor | None = None
    """(B,) first slot of each row that holds something, where rows differ; None if all slots do."""
    segments: list[list[slice]] | None = None
    """Per row and KV head its slots, the new tokens' last, where heads hold different numbers of units."""
    recalled: Recalled | None = None
    """What queries attend to besides, in one softmax with the rest."""
    sparse: Callable[[Tensor, View, float, float | None, Tensor | None], Tensor] | None = None
    """How these queries attend, where not to all of it: causally, given query, view, scaling, softcap and sinks."""
    far: Far | None = None
    """Units beyond a window, seen at a distance of their own; the slots are those within it then."""


class _How(NamedTuple):
    """How a layer attends, whatever to."""

    scaling: float
    memo: MaskMemo
    softcap: float | None = None
    window: int | None = None
    sinks: Tensor | None = None

    def logits(self, products: Tensor) -> Tensor:
        """Return what products of queries and keys come to."""
        return capped(products * self.scaling, self.softcap)


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Return logits as the backbone bounds them."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def attend(
    query: Tensor,
    view: View,
    *,
    scaling: float,
    memo: MaskMemo,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend causally: new token i of L sees slots 0 .. S - L + i of its head.

    Args:
        query: (B, N, L, D), post-rotary.
        view: What there is to attend to. With segments, each row and KV head takes one kernel call.
        scaling: Factor of the logits.
        memo: Where masks shared by the layers are kept.
        softcap: Bound of the logits, as in Gemma-2.
        window: Tokens a sliding-window layer sees, the own one included.
        sinks: (N,) learned logits that take their share of the softmax and add nothing, as in gpt-oss; None: none.

    Returns:
        (B, N, L, D).
    """
    how = _How(scaling, memo, softcap, window, sinks)
    if view.far is not None:
        return _attend_near_and_far(view.keys, view.values, view.far, how)
    if view.recalled is not None and view.segments is None:
        return _attend_both(query, view, view.recalled, how._replace(window=None))
    if view.sparse is not None:
        return view.sparse(query, view, scaling, softcap, sinks)
    if view.segments is None:
        return _attend(query, view.keys, view.values, how, view.row_start)
    plain = how.softcap is None and window is None and sinks is None and view.recalled is None
    if query.shape[0] == query.shape[2] == 1 and plain:
        return _attend_once(query, view.keys, view.values, view.segments[0], scaling)
    group = query.shape[1] // len(view.segments[0])
    out = query.new_empty(*query.shape[:-1], view.values.shape[-1])
    for row, heads in enumerate(view.segments):
        for head, span in enumerate(heads):
            asking = slice(head * group, (head + 1) * group)
            key, value = (states[row : row + 1, :, span] for states in (view.keys, view.values))
            own = how if sinks is None else how._replace(sinks=sinks[asking])
            if view.recalled is None:
                out[row, asking] = _attend(query[row : row + 1, asking], key, value, own)[0]
                continue
            recalled = view.recalled.of_head(row, head, len(heads))
            both = _attend_both(query[row : row + 1, asking], View(key, value), recalled, own._replace(window=None))
            out[row, asking] = both[0]
    return out


def _attend_once(query: Tensor, keys: Tensor, values: Tensor, spans: list[slice], scaling: float) -> Tensor:
    """Let the (1, N, 1, D) queries of one token attend to each KV head's span: what every written token pays for."""
    grouped = query.reshape(len(spans), 1, 1, -1, query.shape[-1]).unbind()
    heads = [
        F.scaled_dot_product_attention(asking, keys[:, :, span], values[:, :, span], scale=scaling)
        for asking, span in zip(grouped, spans, strict=True)
    ]
    return torch.cat(heads, dim=2).transpose(1, 2)


def _attend_both(query: Tensor, view: View, recalled: Recalled, how: _How) -> Tensor:
    """Attend to what is held and what is recalled, (B, K or N, 1 or L, R, D), in one softmax."""
    new, slots, extra = query.shape[-2], view.keys.shape[-2], recalled.keys.shape[-2]
    heads, own = query.shape[1], recalled.keys.shape[1]
    key, value = view.keys, view.values
    if own > key.shape[1]:  # every query head for itself
        key, value = (states.repeat_interleave(own // key.shape[1], dim=1) for states in (key, value))
    shared = recalled.keys.shape[2] == 1
    if shared and recalled.there is None and view.row_start is None:
        # In front of the held units, where every query sees them.
        key = torch.cat([recalled.keys[:, :, 0], key], dim=2)
        value = torch.cat([recalled.values[:, :, 0], value], dim=2)
        return _attend(query, key, value, how)
    out = query.new_empty(*query.shape[:-1], value.shape[-1])
    rows = max(1, _RECALLED_LOGITS // (query.shape[0] * heads * (slots + extra)))
    for start in range(0, new, rows):
        span = slice(start, min(start + rows, new))
        seen = slots - new + span.stop
        block = query[:, :, span].unflatten(1, (own, heads // own))
        of = slice(0, 1) if shared else span
        held = block @ key[:, :, None, :seen].transpose(-1, -2)
        far = torch.einsum("bkgld,bklrd->bkglr", block, recalled.keys[:, :, of].expand(-1, -1, block.shape[-2], -1, -1))
        logits = how.logits(torch.cat([held, far], dim=-1).float())
        mask = _with_rows(how.memo.causal(span.stop - start, seen, None, query), view.row_start, seen)
        logits[..., :seen] += mask[:, :, None] if mask.ndim == 4 else mask
        if recalled.there is not None:
            logits[..., seen:].masked_fill_(~recalled.there[:, :, None, of], -torch.inf)
        weights = attention_weights(logits, by_kv_head(how.sinks, own)).to(value.dtype)
        values = recalled.values[:, :, of].expand(-1, -1, block.shape[-2], -1, -1)
        part = weights[..., :seen] @ value[:, :, None, :seen]
        part = part + torch.einsum("bkglr,bklrd->bkgld", weights[..., seen:], values)
        out[:, :, span] = part.flatten(1, 2)
    return out


def _attend(query: Tensor, key: Tensor, value: Tensor, how: _How, row_start: Tensor | None = None) -> Tensor:
    new, slots, scaling = query.shape[-2], key.shape[-2], how.scaling
    if how.window is not None and slots <= how.window:
        how = how._replace(window=None)
    if how.softcap is None and how.window is None and row_start is None and how.sinks is None:
        if new == 1:
            # The query heads of a group become rows of one product: no copy of the keys for each of them.
            batch, heads, _, dim = query.shape
            grouped = query.reshape(batch, key.shape[1], heads // key.shape[1], dim)
            out = F.scaled_dot_product_attention(grouped, key, value, scale=scaling)
            return out.reshape(batch, heads, 1, value.shape[-1])
        if new == slots:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        if query.is_cuda:  # the aligned bias reaches a flash kernel; on the CPU it would be expanded for every layer
            mask = causal_lower_right(new, slots)
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)
    return _masked(query, key, value, how, row_start)


def _masked(query: Tensor, key: Tensor, value: Tensor, how: _How, row_start: Tensor | None) -> Tensor:
    # A few query rows at a time: on the CPU, so that no mask of the whole chunk exists and no row looks at slots that
    # come after its block; with a softcap or sinks, so that no logits of the whole chunk exist. Where CUDA has a
    # fused kernel, a call per block would cost more than the mask.
    new, slots = query.shape[-2], key.shape[-2]
    plain = how.softcap is None and how.sinks is None
    rows = new if plain and query.is_cuda else ROWS
    out = query.new_empty(*query.shape[:-1], value.shape[-1]) if rows < new else None
    for start in range(0, new, rows):
        end = min(start + rows, new)
        seen = slots - new + end
        mask = _with_rows(how.memo.causal(end - start, seen, how.window, query), row_start, seen)
        block = query[..., start:end, :], key[..., :seen, :], value[..., :seen, :]
        if plain:
            part = F.scaled_dot_product_attention(*block, attn_mask=mask, scale=how.scaling, enable_gqa=True)
        else:
            part = _by_products(*block, mask, how)
        if out is None:
            return part
        out[..., start:end, :] = part
    assert out is not None
    return out


def _with_rows(mask_LS: Tensor, row_start: Tensor | None, slots: int) -> Tensor:
    if row_start is None:
        return mask_LS
    empty = torch.arange(slots, device=mask_LS.device) < row_start[:, None]
    return mask_LS + torch.zeros_like(empty, dtype=mask_LS.dtype).masked_fill_(empty, -torch.inf)[:, None, None, :]


def _by_products(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, how: _How) -> Tensor:
    # No fused kernel of PyTorch caps logits, or has sinks.
    batch, heads, rows, dim = query.shape
    grouped = query.reshape(batch, key.shape[1], heads // key.shape[1], rows, dim)
    logits = how.logits(grouped @ key[:, :, None].transpose(-1, -2))
    logits = logits + (mask[:, :, None] if mask.ndim == 4 else mask)
    out = attention_weights(logits, by_kv_head(how.sinks, key.shape[1])).to(query.dtype) @ value[:, :, None]
    return out.reshape(batch, heads, rows, value.shape[-1])


def _attend_near_and_far(keys: Tensor, values: Tensor, far: Far, how: _How) -> Tensor:
    """Attend causally to (B, K, S, D) near slots, the new tokens last, and to the far ones, in one softmax."""
    batch, heads, new, dim = far.query.shape
    kv_heads, near = keys.shape[1:3]
    near_query, query = (states.view(batch, kv_heads, -1, new, dim) for states in (far.near_query, far.query))
    near_mask = how.memo.causal(new, near, far.window, keys)
    held_mask = how.memo.causal(new, far.held, None, keys)
    out = query.new_empty(*query.shape[:-1], values.shape[-1])
    near_mass = keys.new_zeros(batch, kv_heads, query.shape[2], near, dtype=torch.float32)
    for start in range(0, new, _ROWS_NEAR_AND_FAR):
        rows = slice(start, min(start + _ROWS_NEAR_AND_FAR, new))
        # Slots that no query of the block sees are left out: those behind its window, and those that come after it.
        span = slice(max(near - new + rows.start - far.window + 1, 0), near - new + rows.stop)
        logits = torch.cat(
            [
                how.logits(_products(near_query[..., rows, :], keys[:, :, span])) + near_mask[rows, span],
                how.logits(_products(query[..., rows, :], far.keys)),
            ],
            dim=-1,
        )
        width = span.stop - span.start
        logits[..., width : width + far.held] += held_mask[rows]
        if far.empty is not None:
            empty = torch.cat([far.empty[..., span], far.empty[..., near:]], dim=-1)
            logits.masked_fill_(empty[:, :, None, None], -torch.inf)
        weights = attention_weights(logits, by_kv_head(how.sinks, kv_heads))
        near_mass[..., span] += weights[..., :width].sum(-2)
        weights = weights.to(values.dtype)
        out[..., rows, :] = (
            weights[..., :width] @ values[:, :, None, span] + weights[..., width:] @ far.values[:, :, None]
        )
    far.tell(near_mass.flatten(1, 2))
    return out.flatten(1, 2)


def _products(query_BKGLD: Tensor, keys_BKSD: Tensor) -> Tensor:
    return (query_BKGLD @ keys_BKSD[:, :, None].transpose(-1, -2)).float()


def attention_weights(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax over the last dimension, in float32.

    Args:
        logits: (..., S), -inf for what is not seen.
        sinks: Logits of the sinks, which broadcast against (..., 1); None: there are none.
    """
    if sinks is None:
        return logits.softmax(-1, dtype=torch.float32)
    logits = logits.float()
    return (logits - log_total(logits, sinks)).exp()


def log_total(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Return (..., 1): the logarithm of what `attention_weights` divides by."""
    total = logits.logsumexp(-1, keepdim=True)
    return total if sinks is None else torch.logaddexp(total, sinks.float())


def by_kv_head(sinks: Tensor | None, kv_heads: int) -> Tensor | None:
    """Return (N,) sinks as (K, N / K, 1, 1), beside logits (B, K, N / K, queries, S)."""
    return None if sinks is None else sinks.view(kv_heads, -1, 1, 1)


def flash_covers(view: View) -> bool:
    """Return whether the package flash-attn has a form for a view: one block of units, as long in every row."""
    others = (view.row_start, view.segments, view.recalled, view.sparse, view.far)
    return all(part is None for part in others)


def flash_attend(query: Tensor, view: View, **asked: Any) -> Tensor:
    """Attend as `attend` does, asked the same; needs no masks. Half precision on CUDA only."""
    from flash_attn import flash_attn_func  # an extra

    scaling, _, softcap, window, sinks = _How(**asked)
    # The package aligns causal masks to the bottom right, counts a window to the left without the own token, and wants
    # heads behind tokens.
    seen = (-1, -1) if window is None or view.keys.shape[-2] <= window else (window - 1, 0)
    options: dict[str, Any] = {} if sinks is None else {"return_attn_probs": True}
    states = (tensor.transpose(1, 2) for tensor in (query, view.keys, view.values))
    options |= {"softmax_scale": scaling, "causal": True, "window_size": seen, "softcap": softcap or 0.0}
    out: Any = flash_attn_func(*states, **options)
    if sinks is None:
        return out.transpose(1, 2)  # type: ignore[no-any-return]
    out, log_sums_BNL, *_ = out
    share = torch.sigmoid(log_sums_BNL.float() - sinks.float()[:, None])
    return (out.transpose(1, 2) * share[..., None]).to(query.dtype)  # type: ignore[no-any-return]
