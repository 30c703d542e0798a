"""Attention for training the embedded backbone: in some batches its first layers see a short window only.

The first layers of large models look mostly at neighbouring tokens; a small model trained at full attention throughout
spreads that work over the whole text, and then suffers from every evicted unit. Batches with a window teach the first
layers to work from their neighbours, batches without keep them used to full attention.
"""
# B batch, N query heads, K KV heads, T tokens, D head dim, C blocks, W window

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from checkpoints.build.forks import Forks

NAME = "locret_backbone_training"
DENSE = 1024
"""Longest sequence whose attention weights are all held at once."""
_window: dict[int, int] = {}
"""Window in tokens of each layer that has one at the moment."""
_skimmed: list[int] = []
"""Window in tokens in which a forking text sees itself in all layers at the moment, if it has one."""
_forks: list[Forks] = []
"""How the texts in the row that is read at the moment fork, one after the other, if they do."""
_biases: dict[tuple[int, int | None], Tensor] = {}
"""What is added to the logits of a text and its branches, by the text's place in the row and the layer's window."""


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend causally; sequences are padded on the right, so no mask is needed."""
    window = _window.get(int(module.layer_idx))  # type: ignore[arg-type]
    if _forks:
        sizes = [forks.text + len(forks.branches_F) for forks in _forks]
        texts = zip(*(states.split(sizes, dim=2) for states in (query, key, value)), strict=True)
        outs = [_text_attention(q, k, v, index, window, kwargs["scaling"]) for index, (q, k, v) in enumerate(texts)]
        return torch.cat(outs, dim=2).transpose(1, 2).contiguous(), None
    if window is None or window >= query.shape[2]:
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=kwargs["scaling"], enable_gqa=True)
    else:
        out = windowed_attention(query, key, value, window, kwargs["scaling"])
    return out.transpose(1, 2).contiguous(), None


def _text_attention(
    query: Tensor, key: Tensor, value: Tensor, index: int, window: int | None, scaling: float
) -> Tensor:
    forks = _forks[index]
    if query.shape[2] > DENSE or _skimmed:
        return forked_attention(query, key, value, forks, window, scaling)
    if (index, window) not in _biases:
        hidden_TT = ~forks.allowed_everywhere(window)
        _biases[index, window] = torch.zeros_like(hidden_TT, dtype=query.dtype).masked_fill(hidden_TT, -torch.inf)
    return dense_attention(query, key, value, _biases[index, window], scaling)


def dense_attention(
    query_BNTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, bias_TT: Tensor, scaling: float
) -> Tensor:
    """Return (B, N, T, D) with all weights at once: for short sequences twice as fast on a CPU as fused attention."""
    batch, heads, tokens, dim = query_BNTD.shape
    kv_heads = key_BKTD.shape[1]
    query = (query_BNTD * scaling).reshape(batch * kv_heads, heads // kv_heads * tokens, dim)
    logits = query @ key_BKTD.reshape(batch * kv_heads, tokens, dim).mT
    weights = torch.softmax(logits.view(batch, heads, tokens, tokens) + bias_TT, dim=-1)
    out = weights.view_as(logits) @ value_BKTD.reshape(batch * kv_heads, tokens, dim)
    return out.view_as(query_BNTD)


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
def forked(forks: Sequence[Forks]) -> Iterator[None]:
    """Read one row as texts that follow each other and fork as `forks` says meanwhile; none changes nothing."""
    _forks.extend(forks)
    try:
        yield
    finally:
        _forks.clear()
        _biases.clear()


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
