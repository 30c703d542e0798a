"""Hybrids: softmax layers are governed, the states of the others are carried, copied, saved and exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import HYBRIDS, SHAPE, build, prompt
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    PreTrainedModel,
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
