"""What a cache promises that no random run shows: one calls it in any order, stops it, and gives it nonsense."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from types import MappingProxyType
from typing import Any, ClassVar

import pytest
import torch
from families import build, padded, prompt
from torch import Tensor

from locret import RetainingHeads, RetentionCache, RetentionPolicy, generate, load_cache, prefill, save_cache
from locret.backbone.adapters import find_decoder
from locret.backbone.chunk import Chunk
from locret.labels.labels import prompt_scores
from locret.scorers import Rated, Scorer

NUMBERS: dict[str, Any] = {"budget": 24, "chunk_size": 10, "stabilizers": 5, "local_len": 6}
SMALL, ROOMY = RetentionPolicy(**NUMBERS), RetentionPolicy(**{**NUMBERS, "budget": 200})
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
INTERRUPTED = "an earlier read of this cache was interrupted; start again with cache.fresh()"


def new_cache(model: Any, policy: RetentionPolicy = SMALL, **changes: Any) -> RetentionCache:
    heads = RetainingHeads.for_model(model, hidden_dim=16, seed=3)
    return RetentionCache(model, heads, RetentionPolicy(**{**policy.to_dict(), **changes}))


def stop(*_: object) -> None:
    raise KeyboardInterrupt


# -- memory and time --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("positions", "dtype"), [("compact", torch.float32), ("original", torch.bfloat16)])
def test_bytes_do_not_grow_with_the_text_and_are_what_one_counts_by_hand(positions: str, dtype: torch.dtype) -> None:
    model, seen, size = build("llama", num_hidden_layers=2).to(dtype), set(), dtype.itemsize
    policy = RetentionPolicy(budget=64, chunk_size=128, stabilizers=16, local_len=8, positions=positions)
    for length in (1024, 4096):
        cache = new_cache(model, policy)
        prefill(model, prompt(length), cache)
        memory = cache.memory()
        assert memory.planned == memory.actual == memory.peak
        assert memory.units == 64 + 8
        seen.add(memory.actual)
    # 2 KV heads x (64 + 128) slots: 2 layers of keys and values (8 numbers each), score, position; keys to rotate once
    assert seen == {2 * 192 * (2 * (2 * 8 * size + 4 + 4) + 8 * size)}


@pytest.mark.parametrize("positions", ["compact", "original"])
def test_an_answers_budget_holds_at_every_token(model: Any, positions: str) -> None:
    cache, units = new_cache(model, positions=positions, decode_budget=30, decode_interval=8), []

    def watch(_ids: Tensor, scores: Tensor) -> Tensor:
        units.append(cache.memory().units)
        return scores

    generate(model, prompt(100), cache=cache, logits_processor=[watch], **{**GREEDY, "max_new_tokens": 60})
    assert max(units) == 30
    assert min(units[30:]) == 30 - 8 + 1  # emptied by the interval, again and again
    assert cache.memory().peak == cache.memory().planned
    assert (cache.kept_positions(0)[0, :, -6:] == torch.arange(153, 159)).all()


def test_an_iterator_is_read_no_further_than_a_chunk_ahead(model: Any) -> None:
    cache, drawn = new_cache(model), 0

    def tokens() -> Iterator[int]:
        nonlocal drawn
        for token in prompt(200)[0].tolist():
            drawn += 1
            assert drawn <= cache.seen + SMALL.chunk_size + SMALL.local_len + 1
            yield token

    prefill(model, tokens(), cache)
    assert drawn == 200


# -- conversations ----------------------------------------------------------------------------------------------------


def test_answers_are_rated_as_the_text_would_be(model: Any) -> None:
    cache, whole = new_cache(model, ROOMY), torch.empty(1, 0, dtype=torch.long)
    for turn in range(2):
        whole = torch.cat([whole, prompt(30 + turn, seed=turn)], dim=1)
        whole = generate(model, whole, cache=cache, **{**GREEDY, "max_new_tokens": 20})
    expected = prompt_scores(model, cache.scorer.heads, whole[:, : cache.seen])
    scores = torch.stack([cache.kept_scores(layer)[0] for layer in cache.backbone.layers])
    torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-4)


def test_a_conversation_goes_on_after_an_answer_that_fed_the_last_token_again(model: Any) -> None:
    ids, turn, cache = prompt(30), prompt(4, seed=1), RetentionCache(model, "random", ROOMY)
    prefill(model, ids, cache)
    whole = torch.cat([ids, generate(model, cache=cache, **GREEDY), turn], dim=1)
    other = whole.index_fill(1, torch.tensor([29]), int(whole[0, 29]) - 1)
    with pytest.raises(ValueError, match="the first 37 tokens of input_ids are not those that the cache has read"):
        generate(model, other, cache=cache, **GREEDY)
    expected = generate(model, whole, cache=cache.fresh(), **GREEDY)
    assert torch.equal(generate(model, whole, cache=cache, **GREEDY), expected)


def test_a_loaded_cache_has_the_room_for_turns_that_it_had(model: Any, tmp_path: Path) -> None:
    ids, turn, cache = prompt(60), prompt(4, seed=1), new_cache(model, chunk_size=12)
    prefill(model, ids, cache)
    generate(model, torch.cat([ids, turn], dim=1), cache=cache, **GREEDY)
    save_cache(cache, tmp_path / "saved")
    assert load_cache(tmp_path / "saved", model, cache.scorer).turn_room == cache.turn_room == 12 - 4 - 7


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_padded_rows_go_on_for_other_turns_as_each_alone(family: str) -> None:
    model, rows, more = build(family), [prompt(61, seed=5), prompt(30, seed=6)], prompt(12, batch=2, seed=7)
    ids, mask = padded(rows)
    cache = RetentionCache(model, "random", ROOMY)
    whole = torch.cat([generate(model, ids, cache=cache, attention_mask=mask, **GREEDY), more], dim=1)
    mask = torch.nn.functional.pad(mask, (0, 20), value=1)
    answer = generate(model, whole, cache=cache, attention_mask=mask, **GREEDY)
    logits = prefill(model, torch.cat([answer[:, -1:], more], dim=1), cache)
    for index, row in enumerate(rows):
        text = torch.cat([row[0], answer[index, 61:], more[index]])[None]
        with torch.no_grad():
            assert torch.equal(model.generate(text[:, :-20], **GREEDY), text[:, :-12])
            torch.testing.assert_close(logits[index], model(text).logits[0, -1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("length", [58, 64])  # the answer crosses the original context length of 64
def test_longrope_answers_across_its_original_length(length: int) -> None:
    from locret.backbone.rotary import long_factors

    model, ids = build("phi3-longrope"), prompt(length)
    with torch.no_grad(), long_factors(find_decoder(model)):
        expected = ids
        for _ in range(8):
            expected = torch.cat([expected, model(expected).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(generate(model, ids, cache=RetentionCache(model, "random", ROOMY), **GREEDY), expected)


@pytest.mark.parametrize("length", [1, 50])
def test_beams_are_those_of_transformers_while_nothing_is_evicted(model: Any, length: int) -> None:
    ids, options = prompt(length, batch=2), {**GREEDY, "num_beams": 3, "num_return_sequences": 2}
    cache = RetentionCache(model, "random", ROOMY)
    assert torch.equal(generate(model, ids, cache=cache, **options), model.generate(ids, **options))
    assert cache.seen == length


@pytest.mark.parametrize("changes", [{}, {"head_budgets": "adaptive"}])
def test_beams_of_rows_that_evict_are_those_of_each_alone(model: Any, changes: dict[str, Any]) -> None:
    rows, options = [prompt(61, seed=5), prompt(30, seed=6)], {**GREEDY, "num_beams": 3}
    ids, mask = padded(rows)
    together = generate(model, ids, cache=new_cache(model, **changes), attention_mask=mask, **options)
    for index, row in enumerate(rows):
        alone = generate(model, row, cache=new_cache(model, **changes), **options)
        assert torch.equal(together[index, -8:], alone[0, -8:])


# -- reads in turns ---------------------------------------------------------------------------------------------------


def results(cache: RetentionCache, seed: int, **options: Any) -> list[Tensor]:
    logits = prefill(cache.model, prompt(90, seed=seed), cache, **options)
    answer = generate(cache.model, cache=cache, **GREEDY)
    return [logits, answer, *(cache.kept_positions(layer) for layer in cache.backbone.layers)]


@pytest.mark.parametrize("family", ["llama", "phi3-longrope"])
@pytest.mark.parametrize("changes", [{}, {"head_budgets": "adaptive"}])
def test_a_text_read_and_answered_between_two_chunks_of_another_changes_nothing(
    family: str, changes: dict[str, Any]
) -> None:
    model, found = build(family), []
    expected = [results(new_cache(model, **changes), seed) for seed in (1, 2)]

    def between(cache: RetentionCache) -> None:
        if cache.seen == 40:
            found.append(results(new_cache(model, **changes), 2))

    found.append(results(new_cache(model, **changes), 1, on_chunk=between))
    for one, other in zip(found, expected[::-1], strict=True):
        assert all(map(torch.equal, one, other))


def test_texts_read_in_several_threads_are_those_read_one_after_the_other(model: Any) -> None:
    seeds, found = (1, 2, 3), {}
    expected = {seed: results(new_cache(model), seed) for seed in seeds}
    threads = [Thread(target=lambda s=seed: found.update({s: results(new_cache(model), s)})) for seed in seeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(all(map(torch.equal, found[seed], expected[seed])) for seed in seeds)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(("hooked", "same"), [("model", "model.norm"), ("model.layers.1.self_attn.k_proj",) * 2])
def test_what_hooks_of_others_return_is_what_is_recorded(hooked: str, same: str) -> None:
    model, other = build("llama"), build("llama")
    model.get_submodule(hooked).register_forward_hook(
        lambda _m, _a, out: (
            out * 2 if isinstance(out, Tensor) else type(out)(**{**out, "last_hidden_state": out[0] * 2})
        )
    )
    other.get_submodule(same).weight.data *= 2
    assert all(map(torch.equal, *(results(RetentionCache(one, "sirllm", SMALL), 1) for one in (model, other))))


# -- interrupted ------------------------------------------------------------------------------------------------------


def doors(cache: RetentionCache, folder: Path) -> list[Callable[[], object]]:
    pair = padded([prompt(30), prompt(20)])
    return [
        lambda: prefill(cache.model, prompt(30), cache),
        lambda: prefill(cache.model, pair[0], cache, pair[1]),
        lambda: generate(cache.model, cache=cache, **GREEDY),
        lambda: generate(cache.model, prompt(120), cache=cache, **GREEDY),
        cache.copy,
        cache.take_back,
        cache.to_dynamic_cache,
        lambda: save_cache(cache, folder / "cache.safetensors"),
        lambda: cache.select_rows(torch.tensor([0])),
        lambda: cache.batch_repeat_interleave(2),
    ]


def refuse_all(cache: RetentionCache, folder: Path, said: str) -> None:
    for use in doors(cache, folder):
        with pytest.raises(ValueError, match=said):
            use()
    assert not list(folder.iterdir())


@pytest.mark.parametrize("positions", ["compact", "original"])
def test_every_door_refuses_a_cache_that_is_being_read_or_was_interrupted(
    model: Any, tmp_path: Path, positions: str
) -> None:
    cache, said = new_cache(model, positions=positions), "this cache is being read; go on when that read has ended"
    prefill(model, prompt(50), cache, on_chunk=lambda c: refuse_all(c, tmp_path, said))
    with pytest.raises(KeyboardInterrupt):
        prefill(model, prompt(60), cache, on_chunk=stop)
    refuse_all(cache, tmp_path, INTERRUPTED)
    assert prefill(model, prompt(60), cache.fresh()).isfinite().all()


def test_an_answer_stopped_between_layers_is_seen_and_one_between_tokens_may_go_on(model: Any, tmp_path: Path) -> None:
    cache = new_cache(model)
    prefill(model, prompt(90, seed=1), cache)
    twin = cache.copy()
    third_token = [lambda _, scores: stop() if cache.seen == 93 else scores]
    with pytest.raises(KeyboardInterrupt):
        generate(model, cache=cache, logits_processor=third_token, **GREEDY)
    assert cache.copy().seen == 93
    assert cache.kept_scores(0).isfinite().all()
    handle = model.model.layers[1].register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        generate(model, cache=twin, **GREEDY)
    handle.remove()
    refuse_all(twin, tmp_path, INTERRUPTED)


def test_rows_that_break_off_leave_the_cache_as_it_was(model: Any) -> None:
    first, (ids, mask) = prompt(50, batch=3, seed=9), padded([prompt(n, seed=n) for n in (90, 61, 4)])
    cache, calls = RetentionCache(model, "key_norm", SMALL), []
    prefill(model, first, cache)
    before = cache.kept_scores(1).clone()

    def seventh(*_: object) -> None:
        calls.append(1)
        if len(calls) == 7:
            stop()

    hook = find_decoder(model).register_forward_pre_hook(seventh)
    with pytest.raises(KeyboardInterrupt):
        prefill(model, ids, cache, attention_mask=mask)
    hook.remove()
    assert cache.seen == 50
    assert torch.equal(cache.kept_scores(1), before)
    prefill(model, ids, cache, attention_mask=mask)


@pytest.mark.parametrize("head_budgets", ["uniform", "adaptive"])
def test_an_answer_that_finds_no_memory_can_be_asked_for_again_in_less(model: Any, head_budgets: str) -> None:
    cache = new_cache(model, head_budgets=head_budgets)
    prefill(model, prompt(90), cache)
    expected = generate(model, cache=cache.copy(), **GREEDY)
    with pytest.raises(RuntimeError, match="alloc"):
        generate(model, cache=cache, **{**GREEDY, "max_new_tokens": 10**13})
    assert torch.equal(generate(model, cache=cache, **GREEDY), expected)


def test_inference_mode_around_a_call_leaves_cache_and_model_usable() -> None:
    model = build("phi3-longrope")
    cache = new_cache(model)
    prefill(model, prompt(60, 2), cache, new_tokens=40)
    expected = generate(model, cache=cache.copy(), **GREEDY)
    with torch.inference_mode():
        copied, chosen, read = cache.copy(), cache.copy(), cache.fresh()
        chosen.select_rows(torch.arange(2))
        prefill(model, prompt(60, 2), read)
    for one in (copied, chosen, read):
        assert torch.equal(generate(model, cache=one, **GREEDY), expected)
    assert model(prompt(8)).logits.requires_grad


# -- nonsense ---------------------------------------------------------------------------------------------------------

REFUSED: list[tuple[Callable[[Any, RetentionCache], Any], str]] = [
    (lambda m, c: generate(m, prompt(7), cache=c), "the cache has read 20 tokens but input_ids has 7"),
    (lambda m, c: generate(m, None, cache=c.fresh()), "there is no prompt to go on from"),
    (lambda m, c: generate(m, prompt(30), cache=c.fresh(), guidance_scale=2.0), "guidance_scale"),
    (lambda m, c: prefill(build("llama"), prompt(3), c.fresh()), "made for another model"),
    *(
        (lambda m, c, n=name: RetentionCache(m, type("Clash", (QueriesSeen,), {"columns": {n: torch.int8}})()), name)
        for name in ("keys", "values", "scores", "positions")
    ),
]


def test_nonsense_is_refused_in_a_sentence_and_leaves_the_cache_as_it_was(model: Any) -> None:
    cache = new_cache(model)
    prefill(model, prompt(20), cache)
    expected = generate(model, None, cache=cache.copy(), **GREEDY)
    for ask, said in REFUSED:
        with pytest.raises(ValueError, match=said) as refused:
            ask(model, cache)
        assert "\n" not in str(refused.value)
    assert torch.equal(generate(model, None, cache=cache, **GREEDY), expected)


# -- a method of one's own --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class QueriesSeen(Scorer):
    """Counts the queries that have seen a unit, in a column."""

    name: ClassVar[str] = "queries_seen"
    positions: ClassVar[str] = "original"
    causal: ClassVar[bool] = False
    by_head: ClassVar[bool] = True
    columns: ClassVar[Mapping[str, torch.dtype]] = MappingProxyType({"saw": torch.float32})

    def score(self, chunk: Chunk) -> Any:
        new, slots = chunk.new_tokens, chunk.key.shape[2]
        queries = chunk.columns["saw"] + (slots - torch.arange(slots)).clamp_max(new)
        return Rated(-queries, {"saw": queries})


@pytest.mark.parametrize("head_budgets", ["uniform", "adaptive"])
def test_a_token_fed_twice_counts_once_in_columns_too(model: Any, head_budgets: str) -> None:
    policy = RetentionPolicy(**{**NUMBERS, "budget": 64, "head_budgets": head_budgets})
    cache = RetentionCache(model, QueriesSeen(), policy)
    prefill(model, prompt(20), cache)
    expected = -torch.arange(20, 0, -1).float()
    assert torch.equal(cache.kept_scores(0)[0, 0], expected)
    generate(model, cache=cache, **{**GREEDY, "max_new_tokens": 1})
    assert torch.equal(cache.kept_scores(0)[0, 0], expected)


def test_a_short_answer_waits_with_its_scores_until_it_is_over(model: Any) -> None:
    cache, scored = new_cache(model, ROOMY), []
    prefill(model, prompt(250), cache, new_tokens=9)
    cache.scorer.heads[0].register_forward_hook(lambda _module, args, _out: scored.append(args[0].shape[1]))
    generate(model, cache=cache, **{**GREEDY, "max_new_tokens": 9})
    assert scored == [9]
