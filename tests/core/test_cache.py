"""What a cache promises: bounded bytes, independent rows, the same answer however the prompt comes in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from families import build, prompt

from locret import RetainingHeads, RetentionCache, RetentionPolicy, generate, prefill

SMALL = RetentionPolicy(budget=24, chunk_size=10, stabilizers=5, local_len=6)
ORIGINAL = RetentionPolicy(budget=24, chunk_size=10, stabilizers=5, local_len=6, positions="original")


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama")


@pytest.fixture(scope="module")
def heads(model: Any) -> RetainingHeads:
    return RetainingHeads.for_model(model, hidden_dim=16, seed=3)


def greedy(model: Any, ids: Any, cache: RetentionCache, new: int = 8, **options: Any) -> torch.Tensor:
    return generate(model, ids, cache=cache, max_new_tokens=new, do_sample=False, eos_token_id=None, **options)


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", ["compact", "original"])
@pytest.mark.slow
def test_bytes_are_the_same_for_4k_16k_and_64k_tokens_and_equal_the_plan(positions: str) -> None:
    model = build("llama", num_hidden_layers=2)
    heads = RetainingHeads.for_model(model, hidden_dim=8, seed=0)
    policy = RetentionPolicy(budget=256, chunk_size=512, stabilizers=64, local_len=32, positions=positions)
    seen = set()
    for length in (4096, 16384, 65536):
        cache = RetentionCache(model, heads, policy)
        prefill(model, prompt(length), cache)
        memory = cache.memory()
        assert memory.planned == memory.actual == memory.peak
        assert memory.units == 256 + 32
        seen.add(memory.actual)
    # 2 KV heads x (256 + 512) slots: 2 layers of keys and values (8 floats each), score, position; keys to rotate once
    assert seen == {2 * 768 * (2 * (2 * 8 * 4 + 4 + 4) + 8 * 4)}


def test_no_layer_ever_holds_more_than_a_budget_and_a_chunk(model: Any, heads: RetainingHeads) -> None:
    cache = RetentionCache(model, heads, SMALL)
    most = 0

    def watch(cache: RetentionCache) -> None:
        nonlocal most
        most = max(most, max(layer.fill for layer in cache.governed))

    prefill(model, prompt(150), cache, on_chunk=watch)
    assert most == 24
    assert all(layer.capacity == 24 + 10 for layer in cache.governed)
    assert all(layer.store.keys.shape[2] == 34 for layer in cache.governed)


def test_answering_allocates_the_new_tokens_at_once(model: Any, heads: RetainingHeads) -> None:
    cache = RetentionCache(model, heads, SMALL)
    greedy(model, prompt(100), cache, new=40)
    assert cache.governed[0].fill == 24 + 6 + 39
    assert cache.governed[0].capacity == 24 + 6 + 40
    assert cache.memory().planned == cache.memory().actual


@pytest.mark.parametrize("positions", ["compact", "original"])
def test_decode_budget_holds_at_every_generated_token(model: Any, heads: RetainingHeads, positions: str) -> None:
    policy = RetentionPolicy(
        budget=24, chunk_size=10, stabilizers=5, local_len=6, decode_budget=30, decode_interval=8, positions=positions
    )
    cache = RetentionCache(model, heads, policy)
    fills: list[int] = []
    original = cache.finished

    def watch(length: int) -> None:
        original(length)
        fills.append(max(layer.fill for layer in cache.governed))

    cache.finished = watch  # type: ignore[method-assign]
    ids = greedy(model, prompt(100), cache, new=120)
    assert ids.shape == (1, 220)
    assert max(fills[-119:]) == 30
    assert cache.memory().peak == cache.memory().planned
    kept = cache.kept_positions(0)[0]
    assert (kept.diff(dim=-1) > 0).all()
    assert (kept[:, -6:] == torch.arange(213, 219)).all()


def test_decode_eviction_leaves_keys_as_if_rotated_for_their_new_slots(model: Any, heads: RetainingHeads) -> None:
    """After evictions in the middle of an answer, un-rotating must give the keys that the same tokens had before."""
    policy = RetentionPolicy(budget=24, chunk_size=10, stabilizers=5, local_len=6, decode_budget=31, decode_interval=4)
    bounded = RetentionCache(model, heads, policy)
    ids = greedy(model, prompt(60), bounded, new=30)
    free = RetentionCache(model, heads, SMALL)
    prefill(model, ids[:, :60], free)
    before = free.copy().governed[0]
    before.unsettle(free.next_position)
    raw = {
        int(p): before.store.keys[0, 0, slot]
        for slot, p in enumerate(before.store.columns["positions"][0, 0, : before.fill])
    }
    layer = bounded.governed[0]
    layer.unsettle(bounded.next_position)
    compared = 0
    for slot, position in enumerate(layer.store.columns["positions"][0, 0, : layer.fill].tolist()):
        if position in raw:
            torch.testing.assert_close(layer.store.keys[0, 0, slot], raw[position], atol=1e-5, rtol=0)
            compared += 1
    assert compared >= 5


# -- how the prompt comes in ------------------------------------------------------------------------------------------


def test_a_prompt_as_iterator_equals_the_same_prompt_as_tensor(model: Any, heads: RetainingHeads) -> None:
    for length in (3, 6, 7, 16, 17, 96, 106, 107):
        ids = prompt(length)
        whole, streamed = RetentionCache(model, heads, SMALL), RetentionCache(model, heads, SMALL)
        expected = prefill(model, ids, whole)
        torch.testing.assert_close(prefill(model, iter(ids[0].tolist()), streamed), expected, atol=1e-5, rtol=0)
        assert torch.equal(whole.kept_positions(1), streamed.kept_positions(1))


def test_pieces_of_an_iterator_may_have_any_size_and_the_answer_is_the_same(model: Any, heads: RetainingHeads) -> None:
    ids = prompt(93)
    pieces = [ids[0, :1].tolist(), [], ids[0, 1:50].tolist(), ids[0, 50:].tolist()]
    answer = greedy(model, ids, RetentionCache(model, heads, SMALL))
    ours = greedy(model, iter(pieces), RetentionCache(model, heads, SMALL))
    assert torch.equal(ours, answer[:, 93:])


@pytest.mark.parametrize("kind", ["list", "numpy", "tensors", "int32", "one row"])
def test_ids_of_any_kind_are_read_alike(model: Any, heads: RetainingHeads, kind: str) -> None:
    ids = prompt(45)
    given: dict[str, Any] = {
        "list": ids[0].tolist(),
        "numpy": iter(ids[0].numpy()),
        "tensors": iter(ids[0].split(7)),
        "int32": ids.to(torch.int32),
        "one row": ids[0],
    }
    expected = prefill(model, ids, RetentionCache(model, heads, SMALL))
    assert torch.equal(prefill(model, given[kind], RetentionCache(model, heads, SMALL)), expected)


def test_an_iterator_is_read_no_further_than_a_chunk_ahead(model: Any, heads: RetainingHeads) -> None:
    cache = RetentionCache(model, heads, SMALL)
    drawn = 0

    def tokens() -> Iterator[int]:
        nonlocal drawn
        for token in prompt(500)[0].tolist():
            drawn += 1
            assert drawn <= cache.seen + SMALL.chunk_size + SMALL.local_len + 1
            yield token

    prefill(model, tokens(), cache)
    assert drawn == 500


def test_prefill_then_generate_equals_generate_alone(model: Any, heads: RetainingHeads) -> None:
    ids = prompt(80)
    expected = greedy(model, ids, RetentionCache(model, heads, SMALL))
    cache = RetentionCache(model, heads, SMALL)
    logits = prefill(model, ids, cache)
    assert int(logits.argmax()) == int(expected[0, 80])
    assert torch.equal(greedy(model, ids, cache), expected)
    cache = RetentionCache(model, heads, SMALL)
    prefill(model, ids, cache)
    assert torch.equal(greedy(model, None, cache), expected[:, 80:])


def test_a_prompt_no_longer_than_the_local_tokens_is_simply_read(model: Any, heads: RetainingHeads) -> None:
    ids = prompt(6)
    cache = RetentionCache(model, heads, SMALL)
    logits = prefill(model, ids, cache)
    with torch.no_grad():
        torch.testing.assert_close(logits, model(ids).logits[:, -1], atol=1e-5, rtol=0)
    assert cache.kept_positions(0)[0, 0].tolist() == [0, 1, 2, 3, 4, 5]


def test_an_empty_prompt_is_refused(model: Any, heads: RetainingHeads) -> None:
    with pytest.raises(ValueError, match="input_ids is empty; a prompt needs at least one token"):
        prefill(model, iter([]), RetentionCache(model, heads, SMALL))


# -- sessions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [SMALL, ORIGINAL])
def test_reading_on_equals_full_attention_while_nothing_is_evicted(model: Any, policy: RetentionPolicy) -> None:
    policy = RetentionPolicy(**{**policy.to_dict(), "budget": 200})
    cache = RetentionCache(model, "random", policy)
    first, second = prompt(60), prompt(45, seed=1)
    prefill(model, first, cache)
    logits = prefill(model, second, cache)
    with torch.no_grad():
        expected = model(torch.cat([first, second], dim=1)).logits[:, -1]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_a_second_turn_stays_within_the_budget_and_old_units_compete_again(model: Any, heads: RetainingHeads) -> None:
    cache = RetentionCache(model, heads, SMALL)
    ids = greedy(model, prompt(60), cache, new=20)
    longer = torch.cat([ids, prompt(70, seed=2)], dim=1)
    answer = greedy(model, longer, cache, new=5)
    assert answer.shape == (1, 155)
    assert cache.governed[0].fill == 24 + 6 + 4
    kept = cache.kept_positions(0)[0]
    assert (kept.diff(dim=-1) > 0).all()
    assert kept.min() < 80


def test_a_copy_answers_without_touching_the_first_cache(model: Any, heads: RetainingHeads) -> None:
    cache = RetentionCache(model, heads, SMALL)
    prefill(model, prompt(80), cache)
    before = [layer.store.keys.clone() for layer in cache.governed]
    first = greedy(model, None, cache.copy())
    again = greedy(model, None, cache.copy())
    assert torch.equal(first, again)
    assert all(torch.equal(a, layer.store.keys) for a, layer in zip(before, cache.governed, strict=True))
    assert cache.seen == 80


def test_ids_shorter_than_what_was_read_are_refused(model: Any, heads: RetainingHeads) -> None:
    cache = RetentionCache(model, heads, SMALL)
    prefill(model, prompt(20), cache)
    with pytest.raises(ValueError, match="the cache has read 20 tokens but input_ids has 7"):
        greedy(model, prompt(7), cache)


def test_going_on_from_nothing_is_refused(model: Any, heads: RetainingHeads) -> None:
    with pytest.raises(ValueError, match="there is no prompt to go on from"):
        greedy(model, None, RetentionCache(model, heads, SMALL))


# -- batches ----------------------------------------------------------------------------------------------------------


def padded(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(row.shape[1] for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, width - row.shape[1] :] = row[0]
        mask[index, width - row.shape[1] :] = 1
    return ids, mask


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("policy", [SMALL, ORIGINAL])
def test_each_row_of_a_padded_batch_equals_its_own_run(family: str, policy: RetentionPolicy) -> None:
    model = build(family)
    heads = RetainingHeads.for_model(model, hidden_dim=16, seed=3)
    rows = [prompt(length, seed=length) for length in (61, 4, 90, 17)]
    ids, mask = padded(rows)
    cache = RetentionCache(model, heads, policy)
    logits = prefill(model, ids, cache, attention_mask=mask)
    layer = cache.backbone.layers[0]
    for index, row in enumerate(rows):
        alone = RetentionCache(model, heads, policy)
        torch.testing.assert_close(logits[index], prefill(model, row, alone)[0], atol=1e-5, rtol=0)
        kept = cache.kept_positions(layer)[index]
        own = alone.kept_positions(layer)[0]
        assert torch.equal(kept[:, kept.shape[1] - own.shape[1] :], own)
        assert (kept[:, : kept.shape[1] - own.shape[1]] == -1).all()
    answers = greedy(model, ids, RetentionCache(model, heads, policy), attention_mask=mask)
    for index, row in enumerate(rows):
        alone = greedy(model, row, RetentionCache(model, heads, policy))
        assert torch.equal(answers[index, -8:], alone[0, -8:])


def test_rows_of_equal_length_are_read_together_and_equal_single_runs(model: Any, heads: RetainingHeads) -> None:
    ids = prompt(70, batch=3)
    cache = RetentionCache(model, heads, SMALL)
    logits = prefill(model, ids, cache)
    for row in range(3):
        alone = prefill(model, ids[row], RetentionCache(model, heads, SMALL))
        torch.testing.assert_close(logits[row], alone[0], atol=1e-5, rtol=0)


def test_left_padding_is_recognised_from_the_models_pad_token(model: Any, heads: RetainingHeads) -> None:
    ids, mask = padded([prompt(40), prompt(25, seed=1)])
    with_mask = prefill(model, ids, RetentionCache(model, heads, SMALL), attention_mask=mask)
    without = prefill(model, ids, RetentionCache(model, heads, SMALL))
    assert torch.equal(with_mask, without)


def test_a_padded_batch_may_go_on_for_another_turn(model: Any, heads: RetainingHeads) -> None:
    rows = [prompt(61, seed=5), prompt(30, seed=6)]
    ids, mask = padded(rows)
    more = prompt(12, batch=2, seed=7)
    cache = RetentionCache(model, heads, SMALL)
    prefill(model, ids, cache, attention_mask=mask)
    logits = prefill(model, more, cache)
    for index, row in enumerate(rows):
        alone = RetentionCache(model, heads, SMALL)
        prefill(model, row, alone)
        torch.testing.assert_close(logits[index], prefill(model, more[index], alone)[0], atol=1e-4, rtol=0)


def test_decode_budget_holds_in_a_padded_batch(heads: RetainingHeads, model: Any) -> None:
    policy = RetentionPolicy(budget=24, chunk_size=10, stabilizers=5, local_len=6, decode_budget=32, decode_interval=8)
    rows = [prompt(61, seed=5), prompt(9, seed=6)]
    ids, mask = padded(rows)
    answers = greedy(model, ids, RetentionCache(model, heads, policy), new=12, attention_mask=mask)
    # The long row evicts; its own single run does so at the same tokens.
    alone = greedy(model, rows[0], RetentionCache(model, heads, policy), new=12)
    assert torch.equal(answers[0, -12:], alone[0, -12:])
    cache = RetentionCache(model, heads, policy)
    greedy(model, ids, cache, new=60, attention_mask=mask)
    assert cache.governed[0].fill <= 32


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.tensor([[1, 1, 0], [1, 1, 1]]), "padding on the right; pad on the left"),
        (torch.tensor([[0, 0, 0], [1, 1, 1]]), "row 0 of input_ids is padding only"),
        (torch.ones(2, 4), r"attention_mask has shape \(2, 4\) but input_ids \(2, 3\)"),
    ],
)
def test_a_wrong_mask_is_refused(model: Any, heads: RetainingHeads, mask: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prefill(model, prompt(3, batch=2), RetentionCache(model, heads, SMALL), attention_mask=mask)


# -- generate ---------------------------------------------------------------------------------------------------------


def test_beam_search_equals_transformers_while_nothing_is_evicted(model: Any) -> None:
    policy = RetentionPolicy(budget=100, chunk_size=16, stabilizers=5, local_len=6)
    ids = prompt(50, batch=2)
    options = {
        "max_new_tokens": 10,
        "num_beams": 3,
        "do_sample": False,
        "eos_token_id": None,
        "num_return_sequences": 2,
    }
    with torch.no_grad():
        expected = model.generate(ids, **options)
    cache = RetentionCache(model, "random", policy)
    assert torch.equal(generate(model, ids, cache=cache, **options), expected)
    assert cache.seen == 50


def test_beam_search_runs_on_an_evicted_and_padded_batch(model: Any, heads: RetainingHeads) -> None:
    rows = [prompt(61, seed=5), prompt(30, seed=6)]
    ids, mask = padded(rows)
    options = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False, "eos_token_id": None}
    together = generate(model, ids, cache=RetentionCache(model, heads, SMALL), attention_mask=mask, **options)
    for index, row in enumerate(rows):
        alone = generate(model, row, cache=RetentionCache(model, heads, SMALL), **options)
        assert torch.equal(together[index, -6:], alone[0, -6:])


def test_sampling_with_a_seed_is_the_same_twice_and_several_answers_differ(model: Any, heads: RetainingHeads) -> None:
    ids = prompt(60)
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        cache = RetentionCache(model, heads, SMALL)
        runs.append(
            generate(model, ids, cache=cache, max_new_tokens=12, do_sample=True, num_return_sequences=3, top_k=0)
        )
    assert torch.equal(runs[0], runs[1])
    assert runs[0].shape[0] == 3
    assert not torch.equal(runs[0][0], runs[0][1])


def test_the_model_is_left_as_it_was(model: Any, heads: RetainingHeads) -> None:
    ids = prompt(40)
    with torch.no_grad():
        before = model(ids).logits
    implementation = model.config._attn_implementation
    greedy(model, ids, RetentionCache(model, heads, SMALL))
    assert model.config._attn_implementation == implementation
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)


def test_filling_a_cache_by_a_plain_call_is_refused(model: Any, heads: RetainingHeads) -> None:
    with pytest.raises(ValueError, match=r"filled by locret.prefill, locret.generate and the generate method"):
        model(prompt(4), past_key_values=RetentionCache(model, heads, SMALL))


def test_bfloat16_reads_and_answers(heads: RetainingHeads) -> None:
    model = build("llama").to(torch.bfloat16)
    cache = RetentionCache(model, heads, SMALL)
    assert greedy(model, prompt(80), cache).shape == (1, 88)
    assert cache.governed[0].store.keys.dtype == torch.bfloat16
    assert cache.memory().planned == cache.memory().actual
