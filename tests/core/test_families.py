"""Every kind of family: rotations, windows, carried states, layers of different shapes, latents; what others do.

With nothing evicted full attention, with eviction the slow oracle's choices and logits.
"""

from __future__ import annotations

import math
from functools import cache as once
from pathlib import Path
from typing import Any

import oracle as reference
import pytest
import torch
from families import HYBRIDS, LLAMA3, LONGROPE, build, prompt
from registry import random_model, tiny_config

from locret import RetainingHeads, RetentionCache, RetentionPolicy, generate, load_cache, prefill, save_cache, scorers
from locret.backbone.adapters import attention_modules, describe
from locret.cache.limits import planned_bytes
from locret.labels import answer_labels

POLICY = RetentionPolicy(budget=20, chunk_size=9, stabilizers=6, local_len=5)
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 6}


def frequencies(family: str) -> tuple[torch.Tensor, float]:
    """Compute the family's rotary frequencies and magnitude by hand, from the published formulas."""
    plain = 10000.0 ** -(torch.arange(0, 8, 2).float() / 8)
    if family == "phi3-longrope":
        magnitude = math.sqrt(1 + math.log(512 / 64) / math.log(64))
        return plain / torch.tensor(LONGROPE["long_factor"]), magnitude
    if family == "llama-3.1-rope":
        scaled = []
        for frequency in plain.tolist():
            wavelength, original = 2 * math.pi / frequency, LLAMA3["original_max_position_embeddings"]
            smooth = min(max((original / wavelength - 1.0) / (4.0 - 1.0), 0.0), 1.0)
            scaled.append(smooth * frequency + (1 - smooth) * frequency / 8.0)
        return torch.tensor(scaled), 1.0
    if family == "phi3-partial":
        return 10000.0 ** -(torch.arange(0, 4, 2).float() / 4), 1.0
    return plain, 1.0


@pytest.mark.parametrize("positions", ["compact", "original"])
@pytest.mark.parametrize("family", ["llama", "phi3-longrope", "llama-mqa", "llama-3.1-rope", "qwen3", "phi3-partial"])
@torch.no_grad()
def test_eviction_equals_the_slow_oracle(family: str, positions: str) -> None:
    model, ids = build(family), prompt(71)
    heads = RetainingHeads.for_model(model, hidden_dim=12, seed=1)
    inv_freq, magnitude = frequencies(family)
    history, logits = reference.read_prompt(
        model, heads, ids[0], inv_freq, magnitude, (20, 9, 6, 5), positions == "original"
    )
    policy = RetentionPolicy(**{**POLICY.to_dict(), "positions": positions})
    kept: list[list[list[list[int]]]] = []

    def record(cache: RetentionCache) -> None:
        kept.append([cache.kept_positions(layer)[0].tolist() for layer in range(3)])

    ours = prefill(model, ids, RetentionCache(model, heads, policy), on_chunk=record)
    assert kept == history
    torch.testing.assert_close(ours[0], logits, atol=1e-4, rtol=0)


def test_longrope_uses_long_factors_below_the_original_length_and_is_put_back_afterwards() -> None:
    model, ids = build("phi3-longrope"), prompt(40)
    with torch.no_grad():
        before = model(ids).logits
        policy = RetentionPolicy(budget=50, chunk_size=10, stabilizers=0, local_len=1)
        inside = prefill(model, ids, RetentionCache(model, "random", policy))
        after = model(ids).logits
    assert torch.equal(before, after)
    assert (inside - before[:, -1]).abs().max() > 1e-2


# -- layers that carry a state ----------------------------------------------------------------------------------------


@once
def model_of(family: str) -> Any:
    return build(family) if family in HYBRIDS else random_model(tiny_config(family))


@pytest.mark.parametrize("family", ["qwen3-next", "falcon-h1", "jamba", "lfm2"])
def test_rows_of_different_length_answer_as_alone(family: str) -> None:
    model, long, short = model_of(family), prompt(60), prompt(41, seed=1)
    together = torch.cat([long, torch.cat([torch.zeros(1, 19, dtype=torch.long), short], dim=1)])
    mask = torch.ones_like(together)
    mask[1, :19] = 0
    alone = [generate(model, ids, cache=RetentionCache(model, "random", POLICY), **GREEDY) for ids in (long, short)]
    both = generate(model, together, cache=RetentionCache(model, "random", POLICY), attention_mask=mask, **GREEDY)
    assert torch.equal(both[0], alone[0][0])
    assert torch.equal(both[1, 19:], alone[1][0])


def test_beams_carry_their_states_with_them() -> None:
    model, ids, options = model_of("qwen3-next"), prompt(60), {**GREEDY, "num_beams": 3}
    with torch.no_grad():
        own = model.generate(ids, **options)
    roomy = RetentionPolicy(budget=90, chunk_size=9, stabilizers=4, local_len=5)
    assert torch.equal(generate(model, ids, cache=RetentionCache(model, "random", roomy), **options), own)


STATEFUL = [*HYBRIDS, "granitemoehybrid", "nemotron_h", "olmo_hybrid", "zamba2"]


@pytest.mark.parametrize("family", STATEFUL)
def test_states_are_in_the_plan_and_in_files(family: str, tmp_path: Path) -> None:
    model = model_of(family)
    cache = RetentionCache(model, "random", POLICY)
    prefill(model, prompt(58, vocabulary=90), cache)
    memory, backbone = cache.memory(), cache.backbone
    assert memory.actual <= memory.planned == memory.peak
    assert sum(states.nbytes for states in cache.carriers.values()) == backbone.state_bytes(4) > 0
    assert planned_bytes(backbone, cache.scorer, POLICY, 4, 58) == memory.planned
    assert describe(model.config) == backbone
    save_cache(cache, tmp_path / "cache.safetensors")
    loaded = load_cache(tmp_path / "cache.safetensors", model, "random")
    assert [s.nbytes for s in loaded.carriers.values()] == [s.nbytes for s in cache.carriers.values()]
    assert torch.equal(*(generate(model, cache=one, **GREEDY) for one in (loaded, cache)))


@pytest.mark.parametrize("family", ["qwen3-next", "falcon-h1"])
@torch.no_grad()
def test_labels_are_those_of_the_backbones_own_attention(family: str) -> None:
    model, ids = model_of(family), torch.cat([prompt(40), prompt(6, seed=2)], dim=1)
    layers, modules, found = describe(model).layers, attention_modules(model), []
    handles = [modules[index].register_forward_hook(lambda *call: found.append(call[2][1])) for index in layers]
    try:
        model(ids, use_cache=False, output_attentions=True)
    finally:
        for handle in handles:
            handle.remove()
    expected = [weights[0, :, 40:, :40].unflatten(0, (2, 2)).amax((1, 2)) for weights in found]
    labels = answer_labels(model, ids[:, :40], ids[:, 40:], kind="log_attention")
    torch.testing.assert_close(labels, torch.stack(expected).log(), atol=1e-4, rtol=1e-4)


# -- layers of different shapes, and latents --------------------------------------------------------------------------

SHAPES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {},
    "gemma4_text": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "gemma3n_text": {},
    "minicpm3": {},
    "mimo_v2_flash": {"v_head_dim": 6},  # values are narrower than keys, and windows have more heads
}


def shaped(family: str) -> Any:
    return random_model(tiny_config(family, **SHAPES[family]))


@pytest.mark.parametrize("family", SHAPES)
def test_heads_are_as_wide_as_their_layer_and_answer_alike_from_files(family: str, tmp_path: Path) -> None:
    model, ids = shaped(family), prompt(60, vocabulary=90)
    heads = RetainingHeads.for_model(model, hidden_dim=8, seed=0)
    backbone = describe(model)
    assert [heads[i].fc1.in_features for i in heads] == [backbone.shape(i).feature_dim for i in backbone.layers]
    labels = answer_labels(model, ids[:, :50], ids[:, 50:])
    kv_heads = max(backbone.shape(i).num_kv_heads for i in backbone.layers)
    assert labels.shape == (len(backbone.layers), kv_heads, 50)
    assert bool(labels[0].isfinite().any())
    cache = RetentionCache(model, heads, POLICY)
    prefill(model, ids, cache)
    heads.save_pretrained(tmp_path / "heads")
    again = RetainingHeads.from_pretrained(tmp_path / "heads")
    assert again.config == heads.config
    assert again.config.shape(backbone.layers[0]) == backbone.shape(backbone.layers[0])
    save_cache(cache, tmp_path / "cache.safetensors")
    loaded = load_cache(tmp_path / "cache.safetensors", model, again)
    assert torch.equal(*(generate(model, cache=one, **GREEDY) for one in (cache, loaded)))


@pytest.mark.parametrize(
    "settings", [{}, {"key_bits": 8, "value_bits": 8}, {"decode_budget": 30, "decode_interval": 4}]
)
@pytest.mark.parametrize("family", ["deepseek_v3", "gemma4_text", "mimo_v2_flash"])
def test_planned_bytes_are_those_that_are_counted(family: str, settings: dict[str, Any]) -> None:
    model, rules = shaped(family), RetentionPolicy(budget=20, chunk_size=16, stabilizers=3, local_len=4, **settings)
    ids = prompt(70, vocabulary=90)
    cache = RetentionCache(model, scorers.get("random"), rules)
    prefill(model, ids, cache)
    generate(model, cache=cache, **{**GREEDY, "max_new_tokens": 12})
    assert cache.memory().peak == cache.memory().planned
    # The same before a cache is made, from the numbers of the backbone alone.
    read = RetentionCache(model, cache.scorer, rules)
    prefill(model, ids, read)
    assert planned_bytes(describe(model.config), cache.scorer, rules, 4, 70) == read.memory().planned
