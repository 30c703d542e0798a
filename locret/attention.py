"""Attention of a block of new tokens over everything cached: aligned bottom right, without a mask where possible."""

# B batch, N query heads, K KV heads, L new tokens, S slots, D head dim

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

_SOFTCAP_ROWS = 256


class MaskMemo:
    """Keeps the last mask of each kind: the layers of one forward pass share it."""

    def __init__(self) -> None:
        self._masks: dict[str, tuple[tuple[object, ...], Tensor]] = {}

    def causal(self, new: int, slots: int, window: int | None, like: Tensor) -> Tensor:
        """Return (L, S) in the dtype of `like`: 0 where a new token may look, -inf elsewhere."""
        kind, key = "window" if window else "causal", (new, slots, window, like.dtype, like.device)
        if kind not in self._masks or self._masks[kind][0] != key:
            visible = torch.ones(new, slots, dtype=torch.bool, device=like.device).tril(slots - new)
            if window is not None:
                visible = visible.triu(slots - new - window + 1)
            mask = torch.zeros(new, slots, dtype=like.dtype, device=like.device).masked_fill_(~visible, -torch.inf)
            self._masks[kind] = (key, mask)
        return self._masks[kind][1]


class WideMask(MaskMemo):
    """For heads that hold different numbers of units: all look through the end of the widest mask asked for so far."""

    def causal(self, new: int, slots: int, window: int | None, like: Tensor) -> Tensor:
        """Return (L, S) as `MaskMemo` does, a view."""
        assert window is None
        widest = slots
        if "causal" in self._masks and self._masks["causal"][0][0] == new:
            widest = max(slots, self._masks["causal"][1].shape[1])
        return super().causal(new, widest, None, like)[:, widest - slots :]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float,
    memo: MaskMemo,
    softcap: float | None = None,
    window: int | None = None,
    row_start: Tensor | None = None,
    flash: bool = False,
) -> Tensor:
    """Attend causally: new token i of L sees slots 0 .. S - L + i.

    Args:
        query: (B, N, L, D), post-rotary.
        key: (B, K, S, D), post-rotary; its last L slots belong to the new tokens.
        value: (B, K, S, D).
        scaling: Factor of the logits.
        memo: Where masks shared by the layers are kept.
        softcap: Bound of the logits, as in Gemma-2.
        window: Tokens a sliding-window layer sees, the own one included.
        row_start: (B,) first slot of each row that holds something, where rows differ.
        flash: Use the flash-attn package where it can do the job; it has no form for rows that differ.

    Returns:
        (B, N, L, D).
    """
    new, slots = query.shape[-2], key.shape[-2]
    if window is not None and slots <= window:
        window = None
    if flash and row_start is None:
        return _flash(query, key, value, scaling, softcap, window)
    bounded = window is not None or row_start is not None
    if softcap is not None:
        mask = _with_rows(memo.causal(new, slots, window, query), row_start, slots)
        return _softcapped(query, key, value, mask, scaling, softcap)
    if bounded:
        mask = _with_rows(memo.causal(new, slots, window, query), row_start, slots)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)
    if new == 1:
        # The query heads of a group become rows of one product: no copy of the keys for each of them.
        batch, heads, _, dim = query.shape
        grouped = query.reshape(batch, key.shape[1], heads // key.shape[1], dim)
        out = F.scaled_dot_product_attention(grouped, key, value, scale=scaling)
        return out.reshape(batch, heads, 1, value.shape[-1])
    if new == slots:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    # On CUDA the aligned bias reaches a flash kernel; on the CPU it would be expanded for every layer anew.
    mask = causal_lower_right(new, slots) if query.is_cuda else memo.causal(new, slots, None, query)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)


def attend_segments(query: Tensor, key: Tensor, value: Tensor, segments: list[list[slice]], **options: Any) -> Tensor:
    """Attend causally where every row and KV head holds its own number of units, with one kernel call for each of them.

    Args:
        query: (B, N, L, D), post-rotary.
        key: (B, 1, slots, D), the units of all heads back to back, post-rotary.
        value: (B, 1, slots, D).
        segments: Per row, per KV head: its slots, the new tokens' last.
        **options: As for `attend`.

    Returns:
        (B, N, L, D).
    """
    group = query.shape[1] // len(segments[0])
    out = query.new_empty(*query.shape[:-1], value.shape[-1])
    for row, heads in enumerate(segments):
        for head, span in enumerate(heads):
            asking = slice(head * group, (head + 1) * group)
            own = (query[row : row + 1, asking], key[row : row + 1, :, span], value[row : row + 1, :, span])
            out[row, asking] = attend(*own, **options)[0]
    return out


def _flash(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, softcap: float | None, window: int | None
) -> Tensor:
    # The package aligns causal masks to the bottom right, counts a window to the left without the own token, and wants
    # heads behind tokens.
    from flash_attn import flash_attn_func

    out: Tensor = flash_attn_func(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        softmax_scale=scaling,
        causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0),
        softcap=softcap or 0.0,
    )
    return out.transpose(1, 2)


def _with_rows(mask_LS: Tensor, row_start: Tensor | None, slots: int) -> Tensor:
    if row_start is None:
        return mask_LS
    empty = torch.arange(slots, device=mask_LS.device) < row_start[:, None]
    return mask_LS + torch.zeros_like(empty, dtype=mask_LS.dtype).masked_fill_(empty, -torch.inf)[:, None, None, :]


def _softcapped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, softcap: float) -> Tensor:
    # No fused kernel of PyTorch caps logits, so rows go in blocks to bound the logits' memory.
    batch, heads, new, dim = query.shape
    kv_heads = key.shape[1]
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, new, dim)
    blocks = []
    for start in range(0, new, _SOFTCAP_ROWS):
        logits = grouped[..., start : start + _SOFTCAP_ROWS, :] @ key[:, :, None].transpose(-1, -2) * scaling
        logits = softcap * torch.tanh(logits / softcap)
        rows = mask[..., start : start + _SOFTCAP_ROWS, :]
        logits = logits + (rows[:, :, None] if rows.ndim == 4 else rows)
        blocks.append(logits.softmax(-1, dtype=torch.float32).to(query.dtype) @ value[:, :, None])
    return torch.cat(blocks, dim=-2).reshape(batch, heads, new, value.shape[-1])
