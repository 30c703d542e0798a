"""The least that chunked reading can cost: the same chunks against a static cache of the same length.

The engine's own attention kernel, keys rotated once, no hooks, no scores, no eviction, no re-rotation: what remains
between the two is the price of retention. The floor's answers mean nothing; its time does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from locret.attention import MaskMemo, attend

NAME = "locret-floor"
_MEMO = MaskMemo()


def _attention(
    _module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Any, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    return attend(query, key, value, scaling=scaling, memo=_MEMO).transpose(1, 2).contiguous(), None


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
        end = self.fill + key_states.shape[-2]
        self.keys[:, :, self.fill : end] = key_states
        self.values[:, :, self.fill : end] = value_states
        self.fill = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        return self.fill

    def get_max_length(self) -> int:
        return self.capacity

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.fill + query_length, 0


@torch.no_grad()
def read_static(model: PreTrainedModel, ids: Tensor, budget: int, chunk_size: int, local_len: int) -> None:
    """Read (1, N) ids in chunks; after each chunk the cache is cut back to `budget` slots, for free."""
    implementation = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    layers = [_StaticLayer(budget + max(chunk_size, local_len)) for _ in range(model.config.num_hidden_layers)]
    cache, decoder, end = Cache(layers=layers), model.get_decoder(), ids.shape[1] - local_len
    for start in [*range(0, end, chunk_size), end]:
        tokens = ids[:, start : min(start + chunk_size, end) if start < end else ids.shape[1]]
        held = layers[0].fill
        positions = torch.arange(held, held + tokens.shape[1])[None]
        decoder(input_ids=tokens, position_ids=positions, past_key_values=cache, use_cache=True)
        for layer in layers:
            layer.fill = min(layer.fill, budget)
    model.lm_head(torch.zeros(1, model.config.hidden_size))
    model.set_attn_implementation(implementation)
