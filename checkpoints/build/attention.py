"""Attention for training the embedded backbone: in some batches its first layers see a short window only.

The first layers of large models look mostly at neighbouring tokens; a small model trained at full attention throughout
spreads that work over the whole text, and then suffers from every evicted unit. Batches with a window teach the first
layers to work from their neighbours, batches without keep them used to full attention.
"""
# B batch, N query heads, K KV heads, T tokens, D head dim, C blocks, W window

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from checkpoints.build.forks import Forks

NAME = "locret_backbone_training"
_window: dict[int, int] = {}
"""Window in tokens of each layer that has one at the moment."""
_skimmed: list[int] = []
"""Window in tokens in which a forking text sees itself in all layers at the moment, if it has one."""
_forks: list[Forks] = []
"""How the row that is read at the moment forks, if it does."""


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend causally; sequences are padded on the right, so no mask is needed."""
    window = _window.get(int(module.layer_idx))  # type: ignore[arg-type]
    if _forks:
        out = forked_attention(query, key, value, _forks[0], window, kwargs["scaling"])
        return out.transpose(1, 2).contiguous(), None
    if window is None or window >= query.shape[2]:
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=kwargs["scaling"], enable_gqa=True)
    else:
        out = windowed_attention(query, key, value, window, kwargs["scaling"])
    return out.transpose(1, 2).contiguous(), None


def forked_attention(
    query_BNTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, forks: Forks, window: int | None, scaling: float
) -> Tensor:
    """Return (B, N, T, D): the text attends causally, a token of a branch to the text and to its branch up to itself.

    With a window every token sees itself and the `window` - 1 tokens before it, counted along its branch.
    """
    text = forks.text
    query, key, value = query_BNTD[:, :, :text], key_BKTD[:, :, :text], value_BKTD[:, :, :text]
    near = min([size for size in (window, *_skimmed) if size is not None], default=text)
    if near >= text:
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    else:
        out = windowed_attention(query, key, value, near, scaling)
    first = 0 if window is None else max(text - window, 0)
    branches = scaled_dot_product_attention(
        query_BNTD[:, :, text:],
        key_BKTD[:, :, first:],
        value_BKTD[:, :, first:],
        attn_mask=forks.allowed(window)[:, first:],
        scale=scaling,
        enable_gqa=True,
    )
    return torch.cat([out, branches], dim=2)


def windowed_attention(query_BNTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, window: int, scaling: float) -> Tensor:
    """Return (B, N, T, D): each token attends to itself and the `window` - 1 tokens before it.

    Works in blocks of `window` tokens, so time and memory grow with the text's length times the window.
    """
    batch, heads, tokens, dim = query_BNTD.shape
    groups = heads // key_BKTD.shape[1]
    extra = -tokens % window
    blocks = (tokens + extra) // window

    def split(tensor_BNTD: Tensor) -> Tensor:
        return pad(tensor_BNTD, (0, 0, 0, extra)).unflatten(2, (blocks, window))

    def with_previous(tensor_BNTD: Tensor) -> Tensor:
        own_BNCWD = split(tensor_BNTD.repeat_interleave(groups, dim=1))
        before_BNCWD = pad(own_BNCWD, (0, 0, 0, 0, 1, 0))[:, :, :-1]
        return torch.cat([before_BNCWD, own_BNCWD], dim=3).flatten(1, 2)

    place = torch.arange(2 * window, device=query_BNTD.device)
    distance_WV = place[:window, None] + window - place
    allowed_CWV = ((distance_WV >= 0) & (distance_WV < window)).repeat(blocks, 1, 1)
    allowed_CWV[0, :, :window] = False
    out = scaled_dot_product_attention(
        split(query_BNTD).flatten(1, 2),
        with_previous(key_BKTD),
        with_previous(value_BKTD),
        attn_mask=allowed_CWV.repeat(heads, 1, 1),
        scale=scaling,
    )
    return out.unflatten(1, (heads, blocks)).flatten(2, 3)[:, :, :tokens]


@contextmanager
def local_layers(layers: int, window: int) -> Iterator[None]:
    """Give the first `layers` layers a window of `window` tokens meanwhile; 0 layers change nothing."""
    _window.update(dict.fromkeys(range(layers), window))
    try:
        yield
    finally:
        _window.clear()


@contextmanager
def skimmed(window: int) -> Iterator[None]:
    """Let forking texts see themselves in a window only meanwhile, in all layers; 0 changes nothing."""
    if window:
        _skimmed.append(window)
    try:
        yield
    finally:
        _skimmed.clear()


@contextmanager
def forked(forks: Forks | None) -> Iterator[None]:
    """Read rows as `forks` says meanwhile; None changes nothing."""
    if forks is not None:
        _forks.append(forks)
    try:
        yield
    finally:
        _forks.clear()


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
