"""Backbones are described from their config; those without keys to evict are refused, naming what was looked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import build, prompt
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
)

from locret import RetentionCache, RetentionPolicy, prefill
from locret.backbone.adapters import attention_modules, describe
from locret.backbone.attention import MaskMemo
from locret.backbone.chunk import Attended, Projections
from locret.backbone.instrument import instrumented


class Recorder:
    """Keeps the features of every layer; gives no positions."""

    def __init__(self, model: Any) -> None:
        backbone = describe(model)
        self.projections = {index: Projections(backbone.shape(index)) for index in backbone.layers}
        self.masks = MaskMemo()
        self.features: dict[int, torch.Tensor] = {}

    def positions(self, tokens) -> None:
        return None

    def view(self, layer_idx: int, query: torch.Tensor, scaling: float) -> None:
        return None

    def attended(self, chunk: Attended) -> None:
        self.features[chunk.layer_idx] = chunk.features()

    def finished(self, hidden) -> None: ...


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3", "gemma3"])
@pytest.mark.parametrize(
    "length", [1, 2, 4, 5]
)  # as many tokens as KV heads or query heads is where layouts could be confused
@torch.no_grad()
def test_features_are_q_k_v_before_rotation_and_after_norms(family: str, length: int) -> None:  # fmt: skip
    model = build(family)
    recorder = Recorder(model)
    inputs: dict[int, torch.Tensor] = {}
    modules = attention_modules(model)
    handles = [
        module.register_forward_pre_hook(
            lambda _m, _a, kwargs, i=i: inputs.__setitem__(i, kwargs["hidden_states"]), with_kwargs=True
        )
        for i, module in enumerate(modules)
    ]
    with instrumented(model, recorder):
        model(prompt(length), use_cache=False)
    for handle in handles:
        handle.remove()
    for index, features in recorder.features.items():
        attention, hidden = modules[index], inputs[index]
        if hasattr(attention, "qkv_proj"):
            expected = attention.qkv_proj(hidden)
        else:
            parts = [getattr(attention, f"{name}_proj")(hidden).unflatten(-1, (-1, 8)) for name in "qkv"]
            if hasattr(attention, "q_norm"):
                parts = [attention.q_norm(parts[0]), attention.k_norm(parts[1]), parts[2]]
            expected = torch.cat([part.flatten(2) for part in parts], dim=-1)
        torch.testing.assert_close(features, expected, atol=1e-6, rtol=0)
    assert len(recorder.features) == len(describe(model).layers)


@pytest.mark.parametrize("positions", ["compact", "original"])
@torch.no_grad()
def test_an_interleaved_rotary_embedding_is_rotated_as_the_model_does(positions: str) -> None:

    torch.manual_seed(0)
    config = CohereConfig(
        vocab_size=199, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    policy = RetentionPolicy(budget=40, chunk_size=8, stabilizers=2, local_len=2, positions=positions)
    ours = prefill(model, prompt(40), RetentionCache(model, "random", policy))
    torch.testing.assert_close(ours, model(prompt(40)).logits[:, -1], atol=1e-4, rtol=0)
