"""Every kind of family: rotations, windows, carried states, layers of different shapes, latents; what others do.

With nothing evicted full attention, with eviction the slow oracle's choices and logits.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import oracle as reference
import pytest
import torch
from families import FAMILIES, LLAMA3, LONGROPE, build, prompt
from registry import random_model, tiny_config

from locret import RetainingHeads, RetentionCache, RetentionPolicy, generate, prefill
from locret.backbone.adapters import attention_modules, describe, find_decoder, input_device
from locret.backbone.instrument import LayerObserver, instrumented
from locret.backbone.rotary import Rotary, long_factors, rotate, unrotate
from locret.labels import answer_labels
from locret.labels.labels import labels_of_answers

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


@pytest.mark.parametrize("family", ["gemma3", "qwen3"])  # norms after heads have moved in front of tokens, and before
@torch.no_grad()
def test_features_of_as_many_tokens_as_heads_are_those_of_a_longer_texts_beginning(family: str) -> None:
    model, ids, found = build(family), prompt(9), []
    for length in (9, 4, 2, 1):
        recorder = LayerObserver(describe(model), lambda layer: found.append(layer.projections.features()))
        with instrumented(model, recorder):
            model(ids[:, :length], use_cache=False)
    layers = len(describe(model).layers)
    for nth, features in enumerate(found[layers:]):
        torch.testing.assert_close(features, found[nth % layers][:, : features.shape[1]], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["phi3-longrope", "llama-yarn"])  # both scale what they rotate
def test_turning_back_gives_the_key(family: str) -> None:
    decoder, keys = find_decoder(build(family)), torch.randn(2, 3, 50, 8)
    with long_factors(decoder):
        cos, sin = Rotary(decoder).table(100, 50, torch.zeros(1))
    torch.testing.assert_close(unrotate(rotate(keys, cos, sin), cos, sin), keys, atol=1e-5, rtol=0)


# -- layers that carry a state ----------------------------------------------------------------------------------------


def test_beams_carry_their_states_with_them() -> None:
    model, ids, options = build("qwen3-next"), prompt(60), {**GREEDY, "num_beams": 3}
    with torch.no_grad():
        own = model.generate(ids, **options)
    roomy = RetentionPolicy(budget=90, chunk_size=9, stabilizers=4, local_len=5)
    assert torch.equal(generate(model, ids, cache=RetentionCache(model, "random", roomy), **options), own)


@pytest.mark.parametrize("family", ["qwen3-next", "falcon-h1"])
@torch.no_grad()
def test_labels_are_those_of_the_backbones_own_attention(family: str) -> None:
    model, ids = build(family), torch.cat([prompt(40), prompt(6, seed=2)], dim=1)
    layers, modules, found = describe(model).layers, attention_modules(model), []
    with ExitStack() as hooks:
        for index in layers:
            hooks.enter_context(modules[index].register_forward_hook(lambda *call: found.append(call[2][1])))
        model(ids, use_cache=False, output_attentions=True)
    expected = [weights[0, :, 40:, :40].unflatten(0, (2, 2)).amax((1, 2)) for weights in found]
    labels = answer_labels(model, ids[:, :40], ids[:, 40:], kind="log_attention")
    torch.testing.assert_close(labels, torch.stack(expected).log(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", [*FAMILIES, "bamba", "lfm2"])
def test_one_read_gives_the_labels_of_all_prompts(family: str) -> None:
    model, document = build(family), prompt(61)
    lengths = ((5, 7), (1, 1), (9, 3))
    asked = [(prompt(q, seed=q), prompt(a, seed=10 * a)) for q, a in lengths]
    for kind in ("logit", "log_attention"):
        alone = [answer_labels(model, torch.cat([document, q], 1), a, kind, True)[..., :61] for q, a in asked]
        wanted = torch.stack(alone).amax(0)
        found = labels_of_answers(model, document, asked, kind, include_last_prompt_token=True)
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=2e-4)
    assert found.shape[-1] == 61
    assert found.device == input_device(model)


def test_labels_of_no_question_are_refused() -> None:
    with pytest.raises(ValueError, match="asked is empty; give at least one question with its answer"):
        labels_of_answers(build("llama"), prompt(5), [])


# -- layers of different shapes, and latents --------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["deepseek_v3", "gemma4_text", "gemma3n_text", "minicpm3", "mimo_v2_flash"])
def test_heads_are_as_wide_as_their_layer_also_from_files(family: str, tmp_path: Path) -> None:
    model, ids = random_model(tiny_config(family)), prompt(60, vocabulary=90)
    heads = RetainingHeads.for_model(model, hidden_dim=8, seed=0)
    backbone = describe(model)
    assert [heads[i].fc1.in_features for i in heads] == [backbone.shape(i).feature_dim for i in backbone.layers]
    labels = answer_labels(model, ids[:, :50], ids[:, 50:])
    kv_heads = max(backbone.shape(i).num_kv_heads for i in backbone.layers)
    assert labels.shape == (len(backbone.layers), kv_heads, 50)
    assert bool(labels[0].isfinite().any())
    heads.save_pretrained(tmp_path / "heads")
    again = RetainingHeads.from_pretrained(tmp_path / "heads")
    assert again.config == heads.config
    assert again.config.shape(backbone.layers[0]) == backbone.shape(backbone.layers[0])
