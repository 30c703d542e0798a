"""Layers that differ in shape, values that are not as wide as keys, and latents: read like the model's own, or refused.

The oracle under eviction is transformers' own eager attention in one pass over the whole text, where a mask per layer
and head hides what was gone when a token was read.
"""

# T tokens, N query heads, K KV heads

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import SHAPE, prompt
from oracle import kept_after_chunks
from registry import random_model, tiny_config
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma3nTextConfig,
    Gemma4TextConfig,
    Glm4MoeLiteConfig,
    MiniCPM3Config,
    PreTrainedConfig,
    PreTrainedModel,
    YoutuConfig,
)

from locret import RetainingHeads, RetentionCache, RetentionPolicy, generate, load_cache, prefill, save_cache, scorers
from locret.backbone.adapters import describe
from locret.cache.limits import planned_bytes
from locret.labels import answer_labels

MHA = {**SHAPE, "num_key_value_heads": 4}
EXPERTS = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
MLA = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
TURNS = ["sliding_attention", "full_attention"]
GEMMA4 = {
    **SHAPE, "num_hidden_layers": 6, "head_dim": 8, "global_head_dim": 16, "sliding_window": 24,
    "layer_types": TURNS * 3, "vocab_size_per_layer_input": 199, "hidden_size_per_layer_input": 0,
}  # fmt: skip
GEMMA3N = {
    **{name: value for name, value in GEMMA4.items() if name != "global_head_dim"}, "intermediate_size": [40] * 6,
    "num_kv_shared_layers": 3, "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 6,
    "hidden_size_per_layer_input": 8,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}


def _configs() -> dict[str, PreTrainedConfig]:
    return {
        "deepseek_v3": DeepseekV3Config(**MHA, **MLA, **EXPERTS),
        "gemma4-k_eq_v": Gemma4TextConfig(**GEMMA4, attention_k_eq_v=True, num_global_key_value_heads=1),
        "gemma4-moe": Gemma4TextConfig(
            **{**GEMMA4, "hidden_size_per_layer_input": 8}, enable_moe_block=True, num_experts=4, top_k_experts=2,
            moe_intermediate_size=16,
        ),
        "gemma4-shared": Gemma4TextConfig(
            **{**GEMMA4, "hidden_size_per_layer_input": 8}, num_kv_shared_layers=2, use_double_wide_mlp=True
        ),
        "gemma3n": Gemma3nTextConfig(**GEMMA3N),
        "deepseek_v3-plain": DeepseekV3Config(
            **MHA, **{**MLA, "q_lora_rank": None}, **EXPERTS, rope_interleave=False, rope_parameters=YARN
        ),
        "deepseek_v2": DeepseekV2Config(**MHA, **MLA, **EXPERTS),
        "minicpm3": MiniCPM3Config(**MHA, **MLA),
        "glm4_moe_lite": Glm4MoeLiteConfig(**MHA, **MLA, **EXPERTS),
        "youtu": YoutuConfig(**MHA, **MLA),
    }  # fmt: skip


FAMILIES = list(_configs())


def build(family: str) -> PreTrainedModel:
    """Return a random model in float32."""
    torch.manual_seed(0)
    config = _configs()[family]
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()


def policy(budget: int, positions: str = "compact", **more: Any) -> RetentionPolicy:
    numbers = {"chunk_size": 16, "stabilizers": 3, "local_len": 4, **more}
    return RetentionPolicy(budget=budget, positions=positions, **numbers)


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_are_as_wide_as_their_layer_and_keep_what_they_choose(family: str, tmp_path: Path) -> None:
    model, ids = build(family), prompt(60)
    heads = RetainingHeads.for_model(model, hidden_dim=8, seed=0)
    backbone = describe(model)
    assert [heads[i].fc1.in_features for i in heads] == [backbone.shape(i).feature_dim for i in backbone.layers]
    labels = answer_labels(model, ids[:, :50], ids[:, 50:])
    kv_heads = max(backbone.shape(i).num_kv_heads for i in backbone.layers)
    assert labels.shape == (len(backbone.layers), kv_heads, 50)
    assert bool(labels.isfinite().all())
    cache, history = RetentionCache(model, heads, policy(20)), []
    prefill(model, ids, cache, on_chunk=lambda c: history.append(c.kept_positions(backbone.layers[0])[0].tolist()))
    whole = RetentionCache(model, heads, policy(64))
    prefill(model, ids, whole)
    # The first layer with a budget sees the same whatever was evicted there, if nothing before it was.
    if backbone.layers[0] == 0:
        chosen = kept_after_chunks(whole.kept_scores(0)[0].tolist(), 16, 20, 3, 4)
        assert history == chosen
    heads.save_pretrained(tmp_path / "heads")
    again = RetainingHeads.from_pretrained(tmp_path / "heads")
    assert again.config == heads.config
    assert again.config.shape(backbone.layers[0]) == backbone.shape(backbone.layers[0])
    save_cache(cache, tmp_path / "cache.safetensors")
    loaded = load_cache(tmp_path / "cache.safetensors", model, again)
    answers = [generate(model, cache=one, max_new_tokens=6, do_sample=False) for one in (cache, loaded)]
    assert answers[0].tolist() == answers[1].tolist()


@pytest.mark.parametrize(
    "settings", [{}, {"key_bits": 8, "value_bits": 8}, {"decode_budget": 30, "decode_interval": 4}]
)
@pytest.mark.parametrize("positions", ["compact", "original"])
@pytest.mark.parametrize("family", ["deepseek_v3", "gemma4-k_eq_v"])
def test_planned_bytes_are_those_that_are_counted(family: str, positions: str, settings: dict[str, Any]) -> None:
    model, rules = build(family), policy(20, positions, **settings)
    cache = RetentionCache(model, scorers.get("random"), rules)
    prefill(model, prompt(70), cache)
    generate(model, cache=cache, max_new_tokens=12, do_sample=False)
    memory = cache.memory()
    assert memory.peak == memory.planned
    # The same before a cache is made, from the numbers of the backbone alone.
    fresh = planned_bytes(describe(model.config), cache.scorer, rules, 4, 70)
    read = RetentionCache(model, cache.scorer, rules)
    prefill(model, prompt(70), read)
    assert fresh == read.memory().planned


def test_values_narrower_than_keys_and_windows_with_more_heads_are_planned_and_saved(tmp_path: Path) -> None:
    config = tiny_config("mimo_v2_flash")
    config.v_head_dim = 6
    model = random_model(config)
    backbone = describe(model)
    assert describe(config) == backbone
    assert [(shape.num_kv_heads, shape.unit_dim) for shape in backbone.shapes] == [(2, 14), (4, 14), (4, 14), (2, 14)]
    ids = torch.randint(3, 90, (1, 60), generator=torch.Generator().manual_seed(0))
    cache = RetentionCache(model, "key_norm", RetentionPolicy(budget=12, chunk_size=10, stabilizers=3, local_len=4))
    prefill(model, ids, cache)
    assert cache.memory().peak <= cache.memory().planned
    save_cache(cache, tmp_path / "a.ctx")
    loaded = load_cache(tmp_path / "a.ctx", model, "key_norm")
    answers = [generate(model, None, cache=one, max_new_tokens=5, do_sample=False) for one in (loaded, cache)]
    assert torch.equal(*answers)
