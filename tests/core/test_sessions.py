"""Calls in every order that a chat or a careless user makes: padding, refusals, short prompts, interruptions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import build, prompt

from locret import RetentionCache, RetentionPolicy, generate, load_cache, prefill, save_cache
from locret.backbone.adapters import find_decoder
from locret.backbone.rotary import long_factors

ROOMY = RetentionPolicy(budget=200, chunk_size=10, stabilizers=5, local_len=6)
GREEDY = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama")


@pytest.mark.parametrize("length", [58, 60, 64, 65])  # the answer crosses the original context length of 64
def test_longrope_answers_across_its_original_length(length: int) -> None:
    model, ids = build("phi3-longrope"), prompt(length)
    with torch.no_grad(), long_factors(find_decoder(model)):
        expected = ids
        for _ in range(10):
            logits = model(expected).logits[:, -1]
            expected = torch.cat([expected, logits.argmax(-1, keepdim=True)], dim=1)
    ours = generate(model, ids, cache=RetentionCache(model, "random", ROOMY), **{**GREEDY, "max_new_tokens": 10})
    assert torch.equal(ours, expected)


def test_a_refused_call_leaves_the_cache_as_it_was(model: Any) -> None:
    ids = prompt(50)
    expected = generate(model, ids, cache=RetentionCache(model, "random", ROOMY), **GREEDY)
    cache = RetentionCache(model, "random", ROOMY)
    prefill(model, ids, cache)
    for _ in range(3):
        with pytest.raises(ValueError, match="max_new_token"):
            generate(model, None, cache=cache, max_new_token=5)
    assert torch.equal(generate(model, None, cache=cache, **GREEDY), expected[:, 50:])


@pytest.mark.parametrize("positions", ["compact", "original"])
def test_a_one_token_prompt_answers_and_reads_on(model: Any, positions: str) -> None:
    policy = RetentionPolicy(**{**ROOMY.to_dict(), "positions": positions})
    cache = RetentionCache(model, "random", policy)
    ids = generate(model, prompt(1), cache=cache, **GREEDY)
    longer = torch.cat([ids, prompt(30, seed=3)], dim=1)
    ours = generate(model, longer, cache=cache, **GREEDY)
    with torch.no_grad():
        assert torch.equal(ours, model.generate(longer, **GREEDY))


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_sliding_layers_of_a_padded_batch_go_on_for_another_turn(family: str) -> None:
    model = build(family)
    rows, more = [prompt(61, seed=5), prompt(30, seed=6)], prompt(12, batch=2, seed=7)
    ids = torch.zeros(2, 61, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, 61 - row.shape[1] :], mask[index, 61 - row.shape[1] :] = row[0], 1
    cache = RetentionCache(model, "random", ROOMY)
    answer = generate(model, ids, cache=cache, attention_mask=mask, **GREEDY)
    logits = prefill(model, torch.cat([answer[:, -1:], more], dim=1), cache)
    for index, row in enumerate(rows):
        text = torch.cat([row[0], answer[index, 61:], more[index]])
        with torch.no_grad():
            torch.testing.assert_close(logits[index], model(text[None]).logits[0, -1], atol=1e-4, rtol=0)


def test_an_interrupted_read_cannot_be_gone_on_with(model: Any) -> None:
    cache = RetentionCache(model, "random", ROOMY)

    def stop(_: RetentionCache) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prefill(model, prompt(40), cache, on_chunk=stop)
    with pytest.raises(ValueError, match="was interrupted; start again with cache.fresh"):
        prefill(model, prompt(40), cache)


def test_a_batch_of_equal_rows_is_saved_and_loaded(model: Any, tmp_path: Path) -> None:
    cache = RetentionCache(model, "random", ROOMY)
    prefill(model, prompt(30, batch=2), cache)
    save_cache(cache, tmp_path / "two.safetensors")
    loaded = load_cache(tmp_path / "two.safetensors", model, "random")
    assert torch.equal(generate(model, cache=loaded, **GREEDY), generate(model, cache=cache, **GREEDY))


def test_a_loaded_cache_has_the_room_for_turns_that_it_had(model: Any, tmp_path: Path) -> None:
    ids, turn = prompt(60), prompt(4, seed=1)
    cache = RetentionCache(model, "key_norm", RetentionPolicy(budget=24, chunk_size=12, stabilizers=5, local_len=6))
    prefill(model, ids, cache)
    generate(model, torch.cat([ids, turn], dim=1), cache=cache, **GREEDY)
    save_cache(cache, tmp_path / "saved")
    assert load_cache(tmp_path / "saved", model, "key_norm").turn_room == cache.turn_room == 12 - 4 - 5


def test_a_conversation_goes_on_after_an_answer_that_fed_the_last_token_again(model: Any) -> None:
    ids, turn = prompt(30), prompt(4, seed=1)
    cache = RetentionCache(model, "random", ROOMY)
    prefill(model, ids, cache)
    whole = torch.cat([ids, generate(model, cache=cache, **GREEDY), turn], dim=1)
    other = whole.index_fill(1, torch.tensor([29]), int(whole[0, 29]) - 1)
    with pytest.raises(ValueError, match="the first 35 tokens of input_ids are not those that the cache has read"):
        generate(model, other, cache=cache, **GREEDY)
    expected = generate(model, whole, cache=cache.fresh(), **GREEDY)
    assert torch.equal(generate(model, whole, cache=cache, **GREEDY), expected)


@pytest.mark.parametrize(
    "changes", [{}, {"host_budget": 30, "recall": 4}, {"head_budgets": "adaptive"}, {"key_bits": 8}]
)
def test_what_a_copy_reads_and_evicts_changes_nothing_in_what_it_was_made_of(model: Any, changes: dict) -> None:
    policy = RetentionPolicy(budget=24, chunk_size=10, stabilizers=5, local_len=6, **changes)
    cache = RetentionCache(model, "key_norm", policy)
    prefill(model, prompt(60), cache)
    before = {name: tensor.clone() for name, tensor in cache.state()[0].items()}
    prefill(model, prompt(60, seed=1), cache.copy())
    after = cache.state()[0]
    assert before.keys() == after.keys()
    assert [name for name, tensor in after.items() if not torch.equal(tensor, before[name])] == []
