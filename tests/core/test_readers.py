"""Reads and answers in turns, reads that are interrupted, and scorers that are used with several models."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
from families import build, prompt
from test_scorers import make
from torch import Tensor

from locret import RetainingHeads, RetentionCache, RetentionPolicy, generate, prefill, save_cache, scorers

POLICY = RetentionPolicy(budget=24, chunk_size=10, stabilizers=5, local_len=6)
GREEDY = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 9}
INTERRUPTED = "an earlier read of this cache was interrupted; start again with cache.fresh()"
both_stores = pytest.mark.parametrize("head_budgets", ["uniform", "adaptive"])


def new_cache(model: Any, name: str = "heads", **changes: Any) -> RetentionCache:
    scorer = RetainingHeads.for_model(model, hidden_dim=16, seed=3) if name == "heads" else scorers.get(name)
    return RetentionCache(model, scorer, dataclasses.replace(POLICY, **changes))


def results(cache: RetentionCache, logits: Tensor, answer: Tensor) -> list[Tensor]:
    return [logits, answer, *(cache.kept_positions(layer) for layer in cache.backbone.layers)]


def alone(model: Any, seed: int, name: str, **changes: Any) -> list[Tensor]:
    cache = new_cache(model, name, **changes)
    logits = prefill(model, prompt(90, seed=seed), cache)
    return results(cache, logits, generate(model, cache=cache, **GREEDY))


def same(first: list[Tensor], second: list[Tensor]) -> None:
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


# -- in turns ---------------------------------------------------------------------------------------------------------


@both_stores
@pytest.mark.parametrize("family", ["llama", "phi3-longrope", "gemma3"])
@pytest.mark.parametrize("name", ["heads", "h2o", "sirllm"])
def test_a_second_text_read_between_two_chunks_changes_nothing(family: str, name: str, head_budgets: str) -> None:
    model = build(family)
    expected = [alone(model, seed, name, head_budgets=head_budgets) for seed in (1, 2)]
    first, second = (new_cache(model, name, head_budgets=head_budgets) for _ in range(2))
    found: list[list[Tensor]] = []

    def between(_: RetentionCache) -> None:
        if first.seen == 40 and not found:
            logits = prefill(model, prompt(90, seed=2), second)
            found.append(results(second, logits, generate(model, cache=second, **GREEDY)))

    logits = prefill(model, prompt(90, seed=1), first, on_chunk=between)
    same(found[0], expected[1])
    same(results(first, logits, generate(model, cache=first, **GREEDY)), expected[0])


def test_an_answer_written_between_two_tokens_of_another_changes_nothing() -> None:
    model = build("llama")
    expected = [alone(model, seed, "heads") for seed in (1, 2)]
    first, second = (new_cache(model) for _ in range(2))
    logits = [prefill(model, prompt(90, seed=seed), c) for seed, c in ((1, first), (2, second))]
    found: list[Tensor] = []

    def between(_ids: Tensor, scores: Tensor) -> Tensor:
        if first.seen > 92 and not found:
            found.append(generate(model, cache=second, **GREEDY))
        return scores

    answer = generate(model, cache=first, logits_processor=[between], **GREEDY)
    same(results(first, logits[0], answer), expected[0])
    same(results(second, logits[1], found[0]), expected[1])


@pytest.mark.parametrize("name", ["heads", "expected_attention"])
@pytest.mark.slow
def test_texts_read_and_answered_in_several_threads_are_those_read_one_after_the_other(name: str) -> None:
    model, seeds = build("llama"), (1, 2, 3)
    hooks = [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]
    expected = {seed: alone(model, seed, name) for seed in seeds}
    found: dict[int, list[list[Tensor]]] = {seed: [] for seed in seeds}
    start = Barrier(len(seeds))

    def work(seed: int) -> None:
        start.wait()
        for _ in range(3):
            found[seed].append(alone(model, seed, name))

    threads = [Thread(target=work, args=(seed,)) for seed in seeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in seeds:
        assert len(found[seed]) == 3
        for one in found[seed]:
            same(one, expected[seed])
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == hooks
    assert model.config._attn_implementation != "locret"


def test_a_cache_that_is_being_read_cannot_be_used_meanwhile(tmp_path: Path) -> None:
    model = build("llama")
    cache, refused = new_cache(model), []

    def meanwhile(_: RetentionCache) -> None:
        for use in doors(model, cache, tmp_path):
            with pytest.raises(ValueError, match="this cache is being read; go on when that read has ended"):
                use()
            refused.append(use)

    logits = prefill(model, prompt(90, seed=1), cache, on_chunk=meanwhile)
    assert len(refused) >= 5
    same([logits], alone(model, 1, "heads")[:1])


# -- interrupted ------------------------------------------------------------------------------------------------------


def doors(model: Any, cache: RetentionCache, folder: Path) -> list[Callable[[], object]]:
    return [
        lambda: prefill(model, prompt(30), cache),
        lambda: generate(model, cache=cache, **GREEDY),
        lambda: generate(model, prompt(120), cache=cache, **GREEDY),
        cache.copy,
        cache.take_back,
        lambda: save_cache(cache, folder / "cache.safetensors"),
        lambda: cache.select_rows(torch.tensor([0])),
        lambda: cache.reorder_cache(torch.tensor([0])),
        lambda: cache.batch_repeat_interleave(2),
    ]


def stop(_: object) -> None:
    raise KeyboardInterrupt


@both_stores
@pytest.mark.parametrize("positions", ["compact", "original"])
@pytest.mark.parametrize("earlier", [0, 1])
def test_every_door_refuses_a_cache_whose_read_was_interrupted(
    tmp_path: Path, earlier: int, positions: str, head_budgets: str
) -> None:
    model = build("llama")
    cache = new_cache(model, positions=positions, head_budgets=head_budgets)
    for _ in range(earlier):
        prefill(model, prompt(50), cache)
    with pytest.raises(KeyboardInterrupt):
        prefill(model, prompt(60), cache, on_chunk=stop)
    for use in doors(model, cache, tmp_path):
        with pytest.raises(ValueError) as refused:
            use()
        assert str(refused.value) == INTERRUPTED
    assert not list(tmp_path.iterdir())
    assert model.config._attn_implementation != "locret"
    fresh = cache.fresh()
    assert prefill(model, prompt(60), fresh).isfinite().all()


def test_an_answer_interrupted_between_layers_is_noticed_and_one_between_tokens_may_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = build("llama")
    cache = new_cache(model)
    logits = prefill(model, prompt(90, seed=1), cache)
    twin = cache.copy()

    def third_token(_ids: Tensor, scores: Tensor) -> Tensor:
        if cache.seen == 93:
            raise KeyboardInterrupt
        return scores

    with pytest.raises(KeyboardInterrupt):
        generate(model, cache=cache, logits_processor=[third_token], **GREEDY)
    assert cache.seen == 93
    assert cache.kept_scores(0).isfinite().all()
    assert cache.copy().seen == 93  # whole: three tokens longer

    layer = model.model.layers[1]
    handle = layer.register_forward_hook(lambda *_: stop(None))
    with pytest.raises(KeyboardInterrupt):
        generate(model, cache=twin, **GREEDY)
    handle.remove()
    for use in doors(model, twin, tmp_path):
        with pytest.raises(ValueError, match=INTERRUPTED):
            use()
    # The model is free again, and what runs in this thread next is not taken for the interrupted pass.
    same(alone(model, 1, "heads")[:1], [logits])


def test_a_read_that_was_refused_before_it_began_leaves_the_cache_as_it_was() -> None:
    model = build("llama")
    cache = new_cache(model, memory="linear")
    prefill(model, prompt(60, seed=1), cache)
    before = cache.kept_positions(0)
    with pytest.raises(ValueError):
        prefill(model, torch.zeros(1, 0, dtype=torch.long), cache)
    assert torch.equal(cache.copy().kept_positions(0), before)


# -- scorers and models -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(set(scorers.names()) - {"retaining_heads", "oracle"}))
def test_a_scorer_object_serves_two_models_in_turns(name: str) -> None:
    slow, fast = build("llama"), build("llama", rope_parameters={"rope_type": "default", "rope_theta": 20.0})
    scorer, expected = make(name, slow), []
    for model in (slow, fast):
        cache = RetentionCache(model, make(name, model), POLICY)
        prefill(model, prompt(90), cache)
        expected.append([cache.kept_scores(layer) for layer in range(3)])
    caches = [RetentionCache(model, scorer, POLICY) for model in (slow, fast)]
    for cache, scores in zip(caches, expected, strict=True):
        prefill(cache.model, prompt(90), cache)
        same([cache.kept_scores(layer) for layer in range(3)], scores)


@pytest.mark.parametrize("name", scorers.names())
def test_a_scorer_is_frozen(name: str) -> None:
    scorer = make(name, build("llama"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        scorer.anything = 1  # type: ignore[attr-defined]
    before = dict(vars(scorer))
    RetentionCache(build("llama"), scorer, POLICY)
    # What is read once of a file is the same for every cache.
    once = {name for name, value in inspect.getmembers_static(type(scorer)) if isinstance(value, cached_property)}
    assert vars(scorer).keys() - once == before.keys() - once
    assert all(vars(scorer)[key] is value for key, value in before.items())
