"""Attention by the package flash-attn, for a backbone that was loaded with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from locret.backbone.attention import MaskMemo, View


def covers(view: View) -> bool:
    """Return whether the package has a form for what is attended to: one block of units, as long in every row."""
    others = (view.row_start, view.segments, view.recalled, view.sparse, view.far)
    return all(part is None for part in others)


def flash_attend(
    query: Tensor,
    view: View,
    *,
    scaling: float,
    memo: MaskMemo,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend as `attend` does; needs no masks. Half precision on CUDA only."""
    from flash_attn import flash_attn_func  # an extra

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
