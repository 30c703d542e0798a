"""The least that chunked reading can cost: the same chunks against a static cache of the same length.

The engine's own attention kernel, keys rotated once, no hooks, no scores, no eviction, no re-rotation: what remains
between the two is the price of retention. The floor's answers mean nothing; its time does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from locret.backbone.attention import MaskMemo, View, attend

NAME = "locret-floor"
_MEMO = MaskMemo()


def _attention(
    _module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Any, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    return attend(query, View(key, value), scaling=scaling, memo=_MEMO).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, lambda *_, **__: None)


class _StaticLayer(CacheLayerMixin):
    is_sliding = False

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity, self.fill = capacity, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        batch, heads, _, dim = key_states.shape
        self.keys = key_states.new_empty(batch, heads, self.capacity, dim)
        self.values = value_states.new_empty(batch, heads, self.capacity, dim)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, self.fill = self.fill, self.fill + key_states.shape[-2]
        self.keys[:, :, start : self.fill] = key_states
        self.values[:, :, start : self.fill] = value_states
        return self.keys[:, :, : self.fill], self.values[:, :, : self.fill]

    def get_seq_length(self) -> int:
        return self.fill

    def get_max_length(self) -> int:
        return self.capacity

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.fill + query_length, 0


@torch.no_grad()
def read_static(
    model: PreTrainedModel, ids: Tensor, budget: int, chunk_size: int, local_len: int, new_tokens: int
) -> tuple[Cache, Tensor]:
    """Read (1, N) ids in chunks; after each chunk the cache is cut back to `budget` slots, for free.

    Returns:
        The cache, with room for `new_tokens` more, and (1, vocabulary) logits of the last token.
    """
    slots, end = budget + max(chunk_size, local_len + new_tokens), max(0, ids.shape[1] - local_len)
    layers = [_StaticLayer(slots) for _ in range(model.config.num_hidden_layers)]
    cache = Cache(layers=layers)
    with _plain_attention(model):
        for tokens in ids[:, :end].split(chunk_size, dim=1) if end else ():
            model.get_decoder()(**_inputs(cache, tokens))
            for layer in layers:
                layer.fill = min(layer.fill, budget)
        return cache, model(**_inputs(cache, ids[:, end:]), logits_to_keep=1).logits[:, -1]


@torch.no_grad()
def write_static(model: PreTrainedModel, cache: Cache, token: Tensor, new_tokens: int) -> Tensor:
    """Go on from (1, 1) a token, with transformers' `generate` over what the cache holds; return (1, new) ids."""
    # What the slots hold counts as read, whatever it is: positions go on from there.
    ids = torch.cat([token.new_zeros(1, cache.get_seq_length()), token], dim=1)
    with _plain_attention(model):
        return generate_plainly(model, cache, ids, new_tokens)


def generate_plainly(model: PreTrainedModel, cache: Cache, ids: Tensor, new_tokens: int) -> Tensor:
    """Go on greedily from (1, N) ids, of which the cache has read all but the last; return (1, new) ids."""
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "past_key_values": cache}
    return model.generate(**given, max_new_tokens=new_tokens, do_sample=False)[:, ids.shape[1] :]


def _inputs(cache: Cache, tokens: Tensor) -> dict[str, Any]:
    held = cache.get_seq_length()
    positions = torch.arange(held, held + tokens.shape[1], device=tokens.device)[None]
    return {"input_ids": tokens, "position_ids": positions, "past_key_values": cache, "use_cache": True}


@contextmanager
def _plain_attention(model: PreTrainedModel) -> Iterator[None]:
    implementation = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(implementation)
