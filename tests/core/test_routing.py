"""What a user of transformers tries first: `model.generate` with a cache of ours."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from families import build, prompt
from transformers import DynamicCache

from locret import RetentionCache, RetentionPolicy, generate

POLICY = RetentionPolicy(budget=24, chunk_size=10, stabilizers=5, local_len=6)
GREEDY = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 8}
IDS = prompt(90)


def new_cache(model: Any, scorer: str = "snapkv") -> RetentionCache:
    return RetentionCache(model, scorer, POLICY)


@pytest.fixture
def model() -> Any:
    return build("llama")


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "sampling": {**GREEDY, "do_sample": True, "top_k": 20, "temperature": 0.7},
    "beams": {**GREEDY, "num_beams": 3},
    "several": {**GREEDY, "do_sample": True, "num_return_sequences": 2},
    "scores": {**GREEDY, "return_dict_in_generate": True, "output_scores": True},
}


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("name", OPTIONS)
def test_generate_with_a_cache_answers_as_locret_generate_does(name: str, family: str) -> None:
    model, answers = build(family), []
    for ask in (
        lambda c: model.generate(input_ids=IDS, past_key_values=c, **OPTIONS[name]),
        lambda c: model.generate(IDS, attention_mask=torch.ones_like(IDS), past_key_values=c, **OPTIONS[name]),
        lambda c: generate(model, IDS, cache=c, **OPTIONS[name]),
    ):
        torch.manual_seed(3)
        cache = new_cache(model)
        answers.append(ask(cache))
        assert cache.memory().peak <= new_cache(model).memory().planned * 1.2
        assert max(layer.capacity for layer in cache.governed) <= POLICY.prefill_units + 8
    if name == "scores":
        assert len(answers[0].scores) == 8
        answers = [answer.sequences for answer in answers]
    assert torch.equal(answers[0], answers[2])
    assert torch.equal(answers[1], answers[2])


def test_padded_batches_and_second_turns_work(model: Any) -> None:
    ids, mask = prompt(90, batch=2), torch.ones(2, 90, dtype=torch.long)
    mask[1, :9] = 0
    ours, theirs = new_cache(model), new_cache(model)
    for _ in range(2):
        answer = model.generate(input_ids=ids, attention_mask=mask, past_key_values=ours, **GREEDY)
        assert torch.equal(answer, generate(model, ids, attention_mask=mask, cache=theirs, **GREEDY))
        ids = torch.cat([answer, prompt(20, batch=2)], dim=1)
        mask = torch.cat([mask, torch.ones(2, 28, dtype=torch.long)], dim=1)
    with pytest.raises(ValueError, match="are not those that the cache has read"):
        model.generate(input_ids=ids.flip(0), attention_mask=mask, past_key_values=ours, **GREEDY)


# -- the model is the user's ------------------------------------------------------------------------------------------


def test_other_calls_are_what_they_were_and_nothing_stays_on_the_model(model: Any) -> None:
    expected, before = model.generate(IDS, **GREEDY), dict(vars(model))
    model.generate(IDS, past_key_values=new_cache(model), **GREEDY)
    assert torch.equal(model.generate(IDS, **GREEDY), expected)
    assert torch.equal(model.generate(IDS, past_key_values=DynamicCache(), **GREEDY), expected)
    assert dict(vars(model)) == before


@pytest.mark.parametrize("way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_model_with_a_cache_is_copied_and_pickled(model: Any, way: Any) -> None:
    cache = new_cache(model)
    twin = way(model)
    with torch.no_grad():
        twin.lm_head.weight.neg_()
    expected = type(twin).generate(twin, IDS, **GREEDY)
    assert torch.equal(twin.generate(IDS, **GREEDY), expected)
    assert not torch.equal(model.generate(IDS, **GREEDY), expected)
    assert torch.equal(
        twin.generate(IDS, past_key_values=new_cache(twin), **GREEDY),
        generate(twin, IDS, cache=new_cache(twin), **GREEDY),
    )
    with pytest.raises(ValueError, match="made for another model|generate method of its own model"):
        twin.generate(IDS, past_key_values=cache, **GREEDY)


def test_what_would_not_work_is_refused_and_says_what_does(model: Any) -> None:
    cache = new_cache(model)
    with pytest.raises(ValueError, match=r"filled by locret\.prefill, locret\.generate and the generate method of its"):
        model(IDS, past_key_values=cache)
    for name, value in {"assistant_early_exit": 1, "custom_generate": "org/name"}.items():
        with pytest.raises(ValueError, match=f"{name} has no effect here"):
            model.generate(IDS, past_key_values=cache, **{name: value}, **GREEDY)
    with pytest.raises(ValueError, match="inputs_embeds has no effect here"):
        model.generate(inputs_embeds=torch.ones(1, 5, 32), past_key_values=cache, **GREEDY)
    assert not cache.seen
