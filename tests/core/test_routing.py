"""What a user of transformers tries first: `model.generate` and `pipeline` with a cache of ours, `custom_generate`."""

from __future__ import annotations

import copy
import gc
import pickle
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from families import build, prompt
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, TextStreamer, dynamic_module_utils, pipeline

from locret import RetainingHeads, RetentionCache, RetentionPolicy, generate, prefill

ROOT = Path(__file__).parents[2]
POLICY = RetentionPolicy(budget=24, chunk_size=10, stabilizers=5, local_len=6)
GREEDY = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 8}
IDS = prompt(90)


def new_cache(model: Any, scorer: str = "snapkv") -> RetentionCache:
    return RetentionCache(model, scorer, POLICY)


@pytest.fixture
def model() -> Any:
    return build("llama")


@pytest.fixture(scope="module")
def embedded() -> tuple[Any, Any]:
    folder = ROOT / "checkpoints" / "tiny"
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "sampling": {**GREEDY, "do_sample": True, "top_k": 20, "temperature": 0.7},
    "beams": {**GREEDY, "num_beams": 3},
    "several": {**GREEDY, "do_sample": True, "num_return_sequences": 2},
    "scores": {**GREEDY, "return_dict_in_generate": True, "output_scores": True},
}


@pytest.mark.parametrize("family", ["llama", "phi3-longrope", "gemma3"])
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


def test_a_cache_that_was_read_is_answered_from(model: Any) -> None:
    cache = new_cache(model)
    prefill(model, IDS, cache)
    expected = generate(model, IDS, cache=cache.copy(), **GREEDY)
    twin = cache.copy()
    del cache
    gc.collect()
    assert torch.equal(model.generate(IDS, past_key_values=twin, **GREEDY), expected)


def test_a_streamer_gets_the_prompt_once_and_every_token(embedded: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = embedded
    inputs = tokenizer("The pass key is 71432. What is the pass key? The pass key is", return_tensors="pt")
    cache = RetentionCache(model, "snapkv", RetentionPolicy(budget=64))
    streamer = TextStreamer(tokenizer, skip_prompt=True)
    answer = model.generate(**inputs, past_key_values=cache, streamer=streamer, max_new_tokens=5, do_sample=False)
    said = tokenizer.decode(answer[0, inputs["input_ids"].shape[1] :])
    assert capsys.readouterr().out.strip() == said.strip()


def test_a_pipeline_answers_from_a_bounded_cache_and_goes_on(embedded: Any) -> None:
    model, tokenizer = embedded
    text = "One two three. " * 60 + "The pass key is 71432. " + "Four five six. " * 60 + "What is the pass key?"
    policy = RetentionPolicy(budget=96, chunk_size=128)
    ask = pipeline("text-generation", model=model, tokenizer=tokenizer)
    options = {"max_new_tokens": 6, "do_sample": False, "return_full_text": False}
    cache, own = (RetentionCache(model, "expected_attention", policy) for _ in range(2))
    said = ask(text, past_key_values=cache, **options)[0]["generated_text"]
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    expected = generate(model, ids, cache=own, max_new_tokens=6, do_sample=False)
    assert said == tokenizer.decode(expected[0, ids.shape[1] :], skip_special_tokens=True)
    assert cache.memory().actual == own.memory().actual
    assert cache.memory().units < ids.shape[1] // 3
    assert ask("Hello", **options) == pipeline("text-generation", model=model, tokenizer=tokenizer)("Hello", **options)


def test_an_adapted_model_answers_with_its_adapter(model: Any) -> None:
    config = peft.LoraConfig(target_modules=["k_proj"], init_lora_weights=False, r=4, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    expected = generate(adapted, IDS, cache=new_cache(adapted), **GREEDY)
    assert torch.equal(adapted.generate(input_ids=IDS, past_key_values=new_cache(adapted), **GREEDY), expected)


def test_a_model_to_be_compiled_answers_too(model: Any) -> None:
    compiled = torch.compile(model, backend="eager")
    cache = new_cache(compiled)
    expected = generate(model, IDS, cache=new_cache(model), **GREEDY)
    assert torch.equal(generate(compiled, IDS, cache=cache, **GREEDY), expected)
    assert torch.equal(compiled.generate(IDS, past_key_values=cache.fresh(), **GREEDY), expected)


# -- the model is the user's ------------------------------------------------------------------------------------------


def test_the_one_line_that_everybody_writes_answers(model: Any) -> None:
    expected = generate(model, IDS, cache=new_cache(model), **GREEDY)
    fresh, inputs = build("llama"), {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    assert torch.equal(
        fresh.generate(**inputs, past_key_values=RetentionCache(fresh, "snapkv", POLICY), **GREEDY), expected
    )


def test_other_calls_are_what_they_were_and_nothing_stays_on_the_model(model: Any) -> None:
    expected, before = model.generate(IDS, **GREEDY), dict(vars(model))
    model.generate(IDS, past_key_values=new_cache(model), **GREEDY)
    assert torch.equal(model.generate(IDS, **GREEDY), expected)
    assert torch.equal(model.generate(IDS, past_key_values=DynamicCache(), **GREEDY), expected)
    assert dict(vars(model)) == before


def test_a_generate_that_somebody_has_put_on_the_model_is_called(model: Any) -> None:
    calls = []

    def own(*args: Any, **named: Any) -> Any:
        calls.append(named)
        return type(model).generate(model, *args, **named)

    model.generate = own
    other, cache = build("llama"), new_cache(model)
    expected = generate(other, IDS, cache=new_cache(other), **GREEDY)
    assert torch.equal(model.generate(IDS, past_key_values=cache, **GREEDY), expected)
    assert calls[0]["past_key_values"] is cache


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
    with pytest.raises(ValueError, match="made for another model"):
        build("llama").generate(IDS, past_key_values=new_cache(model), **GREEDY)
    cache = new_cache(model)
    with pytest.raises(ValueError, match="assistant_early_exit has no effect here"):
        model.generate(IDS, past_key_values=cache, assistant_early_exit=1, **GREEDY)
    with pytest.raises(ValueError, match="inputs_embeds has no effect here"):
        model.generate(inputs_embeds=torch.ones(1, 5, 32), past_key_values=cache, **GREEDY)
    assert not cache.seen
    for name, value in {"max_new_tokens": "5", "num_beams": 2.5, "num_return_sequences": 0}.items():
        with pytest.raises(ValueError, match=f"{name}={value!r} is not a whole number of 1 or more"):
            model.generate(IDS, past_key_values=cache, **{**GREEDY, name: value})
    assert not cache.seen


@pytest.mark.parametrize("length", [{"max_new_tokens": 100}, {"max_length": 190}, {}])
def test_however_an_answers_length_is_given_memory_is_as_planned(model: Any, length: dict[str, int]) -> None:
    caches = [new_cache(model), new_cache(model)]
    ids = generate(model, IDS, cache=caches[0], do_sample=False, eos_token_id=None, **length)
    generate(model, IDS, cache=caches[1], **{**GREEDY, "max_new_tokens": ids.shape[1] - IDS.shape[1]})
    assert caches[0].memory() == caches[1].memory()
    assert caches[0].memory().actual == caches[0].memory().planned


# -- custom_generate --------------------------------------------------------------------------------------------------


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    return {"custom_generate": str(ROOT / "recipes" / "custom_generate"), "trust_remote_code": True}


def test_custom_generate_answers_in_the_budget_that_is_given(model: Any, recipe: dict[str, Any]) -> None:
    policy = {"chunk_size": 10, "stabilizers": 5, "local_len": 6}
    for inputs in ({"inputs": IDS}, {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}):
        answer = model.generate(**inputs, **recipe, scorer="snapkv", budget=24, policy=policy, **GREEDY)
        assert torch.equal(answer, generate(model, IDS, cache=new_cache(model), **GREEDY))
    assert "generate" not in vars(model)


def test_custom_generate_takes_heads(model: Any, recipe: dict[str, Any], tmp_path: Path) -> None:
    heads = RetainingHeads.for_model(model, hidden_dim=8, seed=0)
    heads.save_pretrained(tmp_path / "heads")
    heads = RetainingHeads.from_pretrained(tmp_path / "heads")  # in the type that files have
    answer = model.generate(IDS, **recipe, heads=str(tmp_path / "heads"), policy=POLICY.to_dict(), **GREEDY)
    assert torch.equal(answer, generate(model, IDS, cache=RetentionCache(model, heads, POLICY), **GREEDY))
    with pytest.raises(ValueError, match="beems is not an option of generate"):
        model.generate(IDS, **recipe, heads=str(tmp_path / "heads"), beems=3)
