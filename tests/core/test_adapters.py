"""Backbones are described from their config; those without keys to evict are refused, naming what was looked for."""

from __future__ import annotations

import pytest
import torch
from families import build, prompt

from locret.backbone.adapters import attention_modules, describe
from locret.backbone.instrument import LayerObserver, instrumented


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3", "gemma3"])
@pytest.mark.parametrize("length", [2, 4, 5, 1])  # as many as KV heads or query heads is where layouts look alike
@torch.no_grad()
def test_features_are_q_k_v_before_rotation_and_after_norms(family: str, length: int) -> None:
    model, inputs, found = build(family), dict[int, torch.Tensor](), dict[int, torch.Tensor]()
    recorder = LayerObserver(describe(model), lambda layer: found.update({layer.layer_idx: layer.features()}))
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
    for index, features in found.items():
        attention, hidden = modules[index], inputs[index]
        if hasattr(attention, "qkv_proj"):
            expected = attention.qkv_proj(hidden)
        else:
            parts = [getattr(attention, f"{name}_proj")(hidden).unflatten(-1, (-1, 8)) for name in "qkv"]
            if hasattr(attention, "q_norm"):
                parts = [attention.q_norm(parts[0]), attention.k_norm(parts[1]), parts[2]]
            expected = torch.cat([part.flatten(2) for part in parts], dim=-1)
        torch.testing.assert_close(features, expected, atol=1e-6, rtol=0)
    assert len(found) == len(describe(model).layers)
