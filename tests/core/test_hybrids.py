"""Hybrids: softmax layers are governed, the states of the others are carried, copied, saved and exported."""

from __future__ import annotations

from functools import cache as once
from pathlib import Path
from typing import Any

import oracle as reference
import pytest
import torch
from families import HYBRIDS, SHAPE, build, prompt
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from locret import (
    RetainingHeads,
    RetentionCache,
    RetentionPolicy,
    generate,
    load_cache,
    prefill,
    save_cache,
)
from locret.backbone.adapters import attention_modules, describe
from locret.cache.limits import planned_bytes
from locret.labels import answer_labels

POLICY = RetentionPolicy(budget=20, chunk_size=9, stabilizers=6, local_len=5)
ROOMY = RetentionPolicy(budget=90, chunk_size=9, stabilizers=4, local_len=5)
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 6}
# One token after the other, their own code in transformers computes what it does of many at once a little differently.
LOOSE = {"nemotron-h": 2e-3, "zamba2": 2e-2}
families = pytest.mark.parametrize("family", HYBRIDS)
some = pytest.mark.parametrize("family", ["qwen3-next", "falcon-h1", "jamba", "lfm2"])
_MODELS: dict[str, PreTrainedModel] = {}


def model_of(family: str) -> Any:
    if family not in _MODELS:
        _MODELS[family] = build(family)
    return _MODELS[family]


def read(family: str, ids: torch.Tensor, policy: RetentionPolicy = POLICY, scorer: Any = "random") -> RetentionCache:
    cache = RetentionCache(model_of(family), scorer, policy)
    prefill(model_of(family), ids, cache)
    return cache


def answer(family: str, cache: RetentionCache) -> torch.Tensor:
    return generate(model_of(family), cache=cache, **GREEDY)


# -- what is read and answered ----------------------------------------------------------------------------------------


@once
@torch.no_grad()
def own_answer(family: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of the prompt's last token and the sequence, by transformers alone."""
    model, ids = model_of(family), prompt(70)
    return model(ids).logits[:, -1], model.generate(ids, **GREEDY)


@families
@pytest.mark.parametrize("positions", ["compact", "original"])
def test_a_budget_of_the_prompts_length_equals_the_backbones_own_generate(family: str, positions: str) -> None:
    model, ids = model_of(family), prompt(70)
    expected, own = own_answer(family)
    in_parts, at_once = (
        RetentionPolicy(budget=90, chunk_size=chunk_size, stabilizers=4, local_len=5, positions=positions)
        for chunk_size in (13, 64)
    )
    cache = RetentionCache(model, "random", in_parts)
    logits = prefill(model, ids, cache)
    torch.testing.assert_close(logits, expected, atol=LOOSE.get(family, 1e-4), rtol=0)
    # The last token is fed once more, which must not count twice in any state.
    assert torch.equal(generate(model, cache=cache, **GREEDY), own[:, 70:])
    held_back = generate(model, ids, cache=RetentionCache(model, "random", at_once), **GREEDY)
    assert torch.equal(held_back, own)


@families
@torch.no_grad()
def test_eviction_equals_the_slow_oracle(family: str) -> None:
    model, ids = model_of(family), prompt(58)
    heads = RetainingHeads.for_model(model, hidden_dim=12, seed=1)
    layers, modules = describe(model).layers, attention_modules(model)
    attentions = {index: modules[index] for index in layers}
    history, logits = reference.read_whole(model, heads, ids[0], attentions, (20, 9, 6, 5))
    policy = RetentionPolicy(budget=20, chunk_size=9, stabilizers=6, local_len=5, positions="original")
    kept: list[Any] = []

    def record(cache: RetentionCache) -> None:
        kept.append([cache.kept_positions(layer)[0].tolist() for layer in layers])

    ours = prefill(model, ids, RetentionCache(model, heads, policy), on_chunk=record)
    assert kept == history
    torch.testing.assert_close(ours[0], logits, atol=LOOSE.get(family, 1e-4), rtol=0)


@some
def test_rows_of_different_length_and_beams_answer_as_alone(family: str) -> None:
    model, long, short = model_of(family), prompt(60), prompt(41, seed=1)
    together = torch.cat([long, torch.cat([torch.zeros(1, 19, dtype=torch.long), short], dim=1)])
    mask = torch.ones_like(together)
    mask[1, :19] = 0
    alone = [generate(model, ids, cache=RetentionCache(model, "random", POLICY), **GREEDY) for ids in (long, short)]
    both = generate(model, together, cache=RetentionCache(model, "random", POLICY), attention_mask=mask, **GREEDY)
    assert torch.equal(both[0], alone[0][0])
    assert torch.equal(both[1, 19:], alone[1][0])
    options = {**GREEDY, "num_beams": 3}
    with torch.no_grad():
        own = model.generate(long, **options)
    assert torch.equal(generate(model, long, cache=RetentionCache(model, "random", ROOMY), **options), own)


# -- whole caches -----------------------------------------------------------------------------------------------------


@families
def test_bytes_are_as_planned(family: str) -> None:
    model = model_of(family)
    cache = read(family, prompt(58))
    memory, backbone = cache.memory(), cache.backbone
    assert memory.actual <= memory.planned == memory.peak or (family == "lfm3" and memory.actual <= memory.planned)
    held = sum(states.nbytes for states in cache.carriers.values())
    assert held == backbone.state_bytes(4) > 0
    assert planned_bytes(backbone, cache.scorer, POLICY, 4, 58) == cache.memory().planned
    assert describe(model.config) == backbone


@families
def test_a_saved_cache_answers_alike(family: str, tmp_path: Path) -> None:
    model, cache = model_of(family), read(family, prompt(58))
    save_cache(cache, tmp_path / "cache.safetensors")
    loaded = load_cache(tmp_path / "cache.safetensors", model, "random")
    assert [s.nbytes for s in loaded.carriers.values()] == [s.nbytes for s in cache.carriers.values()]
    assert torch.equal(answer(family, loaded), answer(family, cache))


# -- what is refused --------------------------------------------------------------------------------------------------


def test_a_token_whose_state_is_gone_is_not_taken_back() -> None:
    model, cache = model_of("qwen3-next"), read("qwen3-next", prompt(40))
    cache.take_back()
    cache.take_back()  # changes nothing
    again = generate(model, prompt(40), cache=cache, **GREEDY)
    assert torch.equal(again, generate(model, prompt(40), cache=RetentionCache(model, "random", POLICY), **GREEDY))


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("mamba2", {"num_heads": 8, "head_dim": 8}, "no layer of mamba2 has softmax attention, so there is nothing"),
        ("falcon_mamba", {}, "no layer of falcon_mamba has softmax attention"),
        ("granitemoehybrid", {"mamba_n_heads": 8}, "no layer of granitemoehybrid has softmax attention"),
        ("minimax", {"head_dim": 8, "block_size": 8}, "minimax carries states that transformers' own cache does not"),
    ],
)
def test_nothing_to_govern_and_states_elsewhere_are_refused(
    model_type: str, changes: dict[str, Any], message: str
) -> None:
    config = CONFIG_MAPPING[model_type](**{**SHAPE, **changes})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    for make in (lambda: RetentionCache(model, "snapkv", POLICY), lambda: RetainingHeads.for_model(model)):
        with pytest.raises(ValueError, match=message) as refused:
            make()
        assert "\n" not in str(refused.value)


# -- heads, conversations, other wrappers -----------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3-next", "falcon-h1", "olmo-hybrid"])
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


def test_the_text_part_of_a_multimodal_backbone_is_read() -> None:
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = Qwen3_5Config(text_config=model_of("qwen3.5").config.to_dict(), vision_config={**vision, "patch_size": 4})
    torch.manual_seed(0)
    model = Qwen3_5ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    own = model.generate(prompt(60), **GREEDY)
    for positions in ("compact", "original"):
        policy = RetentionPolicy(budget=90, chunk_size=9, stabilizers=4, local_len=5, positions=positions)
        ours = generate(model, prompt(60), cache=RetentionCache(model, "random", policy), **GREEDY)
        assert torch.equal(ours, own)
