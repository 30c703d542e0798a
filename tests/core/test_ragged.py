"""Heads of a layer that share its budget by score: what they keep, what they compute, and in how much memory."""

from __future__ import annotations

import random
from typing import Any

import oracle as reference
import pytest
import torch
from families import build, prompt
from ragged_runs import BY_HEAD, GREEDY, Watch, both_positions, dense_logits, make, policy

from locret import RetainingHeads, RetentionCache, generate, prefill, scorers
from locret.policy.schedule import plan
from locret.policy.selectors import select_kept, select_over_heads


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama")


@pytest.fixture(scope="module")
def heads(model: Any) -> RetainingHeads:
    return RetainingHeads.for_model(model, hidden_dim=16, seed=3)


# -- the split --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_the_split_equals_the_oracle(seed: int, relative: bool) -> None:
    draw = random.Random(seed)
    kv_heads, budget = draw.randint(1, 5), draw.randint(1, 23)
    counts = [draw.randint(0, 41) for _ in range(kv_heads)]
    positions = [sorted(draw.sample(range(99), count)) for count in counts]
    # Coarse scores tie often; with `relative` a tie would hang on the rounding of a sum.
    scores = [[draw.gauss(0, 2) if relative else draw.randint(-4, 4) / 2 for _ in range(count)] for count in counts]
    if not relative:
        scores = [
            [-torch.inf if score == -2 else torch.inf if score == 2 else score for score in own] for own in scores
        ]
    protected, floor = draw.randint(0, budget + 3), draw.randint(0, budget)
    kept, numbers = select_over_heads(
        torch.tensor([score for own in scores for score in own], dtype=torch.float32),
        torch.tensor([position for own in positions for position in own], dtype=torch.int32),
        counts,
        budget,
        protected,
        floor,
        relative,
    )
    expected = reference.select_over_heads(scores, positions, budget, protected, floor, relative)
    starts = [sum(counts[:head]) for head in range(kv_heads)]
    assert kept.tolist() == [start + slot for start, slots in zip(starts, expected, strict=True) for slot in slots]
    assert numbers.tolist() == [len(slots) for slots in expected]
    assert len(kept) == min(kv_heads * budget, sum(counts))


@pytest.mark.parametrize("floor", [0, 3, 11])
def test_a_full_floor_or_equal_heads_split_uniformly(floor: int) -> None:
    scores = torch.randn(3, 37, generator=torch.Generator().manual_seed(floor)).round(decimals=1)
    newest, positions = torch.arange(37) >= 33, torch.arange(37).repeat(3)
    for scores_KS, least in ((scores, 11), (scores[:1].expand(3, -1), floor)):
        kept, numbers = select_over_heads(scores_KS.flatten(), positions, [37] * 3, 11, 4, least)
        assert numbers.tolist() == [11] * 3
        assert torch.equal(kept.view(3, 11) - torch.arange(3)[:, None] * 37, select_kept(scores_KS, 11, newest))


# -- one prompt -------------------------------------------------------------------------------------------------------


@both_positions
@pytest.mark.parametrize("name", ["heads", "random", "key_norm", "sirllm", *BY_HEAD])
def test_a_full_floor_is_bit_for_bit_the_uniform_cache(
    model: Any, heads: RetainingHeads, name: str, positions: str
) -> None:
    decode = (
        {"decode_budget": 33, "decode_interval": 5}
        if scorers.find("random" if name == "heads" else name).rates_answers
        else {}
    )
    runs = []
    for changes in ({"head_budgets": "uniform"}, {"head_floor": 1.0}):
        cache = RetentionCache(model, make(name, heads), policy(positions=positions, **changes, **decode))
        ids = generate(model, prompt(97), cache=cache, max_new_tokens=9, **GREEDY)
        second = prefill(model, prompt(45, seed=2), cache)
        runs.append((ids, second, *(cache.kept_positions(layer) for layer in range(3)), cache.kept_scores(2)))
    for uniform, ragged in zip(*runs, strict=True):
        torch.testing.assert_close(ragged, uniform, atol=1e-5, rtol=0)


@both_positions
@pytest.mark.parametrize("objective", ["regression", "ranking"])
@pytest.mark.parametrize("family", ["llama", "llama-mha", "qwen3", "phi3", "llama-yarn"])
@torch.no_grad()
def test_reading_and_answering_equal_the_slow_oracle(family: str, objective: str, positions: str) -> None:
    model, ids = build(family), prompt(71)
    heads = RetainingHeads.for_model(model, hidden_dim=16, seed=3)
    heads.annotate(label={"kind": "log_attention"}, training={"objective": objective})
    rules = policy(positions=positions, layer_budgets="pyramid", memory="linear")
    rotary = model.model.rotary_emb
    steps = [(s.tokens, list(s.budgets), list(s.protected)) for s in plan(rules, 3, 71).steps]
    cache, kept = RetentionCache(model, heads, rules), []

    def record(cache: RetentionCache) -> None:
        held = [cache.kept_positions(layer)[0] for layer in range(3)]
        kept.append([[head[head >= 0].tolist() for head in layer] for layer in held])

    def oracle(text: torch.Tensor) -> Any:
        local = text.shape[1] - 65
        return reference.read_prompt(
            model,
            heads,
            text[0],
            rotary.inv_freq,
            rotary.attention_scaling,
            (24, 10, 5, local),
            positions == "original",
            steps,
            (rules.head_floor, objective == "ranking"),
        )

    logits = prefill(model, ids, cache, on_chunk=record)
    history, expected = oracle(ids)
    assert kept == history
    assert len({len(head) for head in history[-1][0]}) > 1
    torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=0)
    answer = generate(
        model, None, cache=cache, max_new_tokens=3, output_logits=True, return_dict_in_generate=True, **GREEDY
    )
    text = torch.cat([ids, answer.sequences], dim=1)
    torch.testing.assert_close(answer.logits[-1][0], oracle(text[:, :-1])[1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["heads", "random", "h2o", "key_difference"])
def test_turns_and_evictions_while_answering_equal_dense_attention_with_a_mask_per_head(
    monkeypatch: pytest.MonkeyPatch, model: Any, heads: RetainingHeads, name: str
) -> None:
    watch = Watch(monkeypatch)
    rules = policy(positions="original", decode_budget=31, decode_interval=4)
    cache = RetentionCache(model, make(name, heads), rules)
    text = generate(model, prompt(58), cache=cache, max_new_tokens=23, **GREEDY)
    text = torch.cat([text, prompt(37, seed=1)], dim=1)
    answer = generate(
        model, text, cache=cache, max_new_tokens=19, output_logits=True, return_dict_in_generate=True, **GREEDY
    )
    ids = answer.sequences[:, :-1]
    expected = dense_logits(model, ids, watch.masks(ids.shape[1]))
    torch.testing.assert_close(torch.cat(answer.logits), expected[-19:], atol=1e-4, rtol=0)
    assert cache.governed[0].store.counts.unique().numel() > 1


def test_evictions_while_answering_turn_keys_to_their_new_slots(model: Any, heads: RetainingHeads) -> None:
    cache = RetentionCache(model, heads, policy(decode_budget=31, decode_interval=4))
    ids = generate(model, prompt(60), cache=cache, max_new_tokens=30, **GREEDY)
    whole = RetentionCache(model, heads, policy(budget=100, head_budgets="uniform"))
    prefill(model, ids[:, :-1], whole)
    whole.governed[0].unsettle(whole.next_position)
    cache.governed[0].unsettle(cache.next_position)
    store, raw = cache.governed[0].store, whole.governed[0].store.keys[0]
    for head, span in enumerate(store.segments[0]):
        held = store.columns["positions"][0, span].long()
        torch.testing.assert_close(store.keys[0, span], raw[head, held], atol=1e-5, rtol=0)
    assert store.counts[0, 0] != store.counts[0, 1]


@both_positions
@pytest.mark.parametrize("name", ["heads", "random", *BY_HEAD])
def test_a_budget_as_large_as_the_prompt_equals_full_attention(
    model: Any, heads: RetainingHeads, name: str, positions: str
) -> None:
    ids = prompt(61)
    cache = RetentionCache(model, make(name, heads), policy(budget=61, positions=positions))
    with torch.no_grad():
        expected = model.generate(ids, max_new_tokens=8, **GREEDY)
    assert torch.equal(generate(model, ids, cache=cache, max_new_tokens=8, **GREEDY), expected)
    assert (cache.kept_positions(2)[:, :, :61] == torch.arange(61)).all()


# -- memory -----------------------------------------------------------------------------------------------------------


@both_positions
@pytest.mark.parametrize("when", ["chunk", "prompt_end"])
@pytest.mark.parametrize("name", ["heads", "random", *BY_HEAD])
@pytest.mark.slow
def test_heads_hold_unequal_shares_of_a_uniform_caches_bytes(
    monkeypatch: pytest.MonkeyPatch, model: Any, heads: RetainingHeads, name: str, when: str, positions: str
) -> None:
    watch, scorer = Watch(monkeypatch), make(name, heads)
    decode = (
        {"decode_budget": 36, "decode_interval": 7}
        if isinstance(scorer, RetainingHeads) or scorer.rates_answers
        else {}
    )
    caches = []
    for split in ("uniform", "adaptive"):
        rules = policy(head_budgets=split, head_floor=0.0, when=when, positions=positions, stabilizers=2, **decode)
        cache = RetentionCache(model, scorer, rules)
        generate(model, prompt(97), cache=cache, max_new_tokens=50, **GREEDY)
        caches.append(cache)
    uniform, ragged = caches
    assert ragged.memory() == uniform.memory()
    assert ragged.memory().actual <= ragged.memory().planned
    for mine, theirs in zip(ragged.governed, uniform.governed, strict=True):
        assert (mine.nbytes, mine.fill, mine.capacity) == (theirs.nbytes, theirs.fill, theirs.capacity)
        assert mine.store.counts.sum() == 2 * mine.fill
    passes = [held for store in watch.stores for _, held in watch.passes[id(store)]]
    units = [int((held >= 0).sum()) for held in passes]
    assert max(units) <= 2 * (97 if when == "prompt_end" else 24 + 6 + 49)
    if decode:
        assert max(units[-40:]) <= 2 * 36
    assert any(len(set((held >= 0).sum(1).tolist())) > 1 for held in passes)


def test_every_head_keeps_its_floor_and_its_newest_units(model: Any) -> None:
    class OneHeadScorer(scorers.RandomScorer):
        def score(self, chunk: Any) -> torch.Tensor:
            scores = super().score(chunk)
            scores[:, 1] += 10
            return scores

    for floor, protected, least in ((0.0, 0, 0), (0.0, 4, 4), (0.3, 0, 7), (0.3, 4, 7), (0.3, 9, 9)):
        cache, kept = RetentionCache(model, OneHeadScorer(), policy(head_floor=floor, stabilizers=protected)), []
        prefill(model, prompt(95), cache, on_chunk=lambda c, kept=kept: kept.append(c.kept_positions(1)[0].clone()))
        held = [(positions >= 0).sum(1).tolist() for positions in kept]
        assert held[5:-1] == [[least, 48 - least]] * (len(held) - 6)
        assert held[-1] == [int(24 * floor), 48 - int(24 * floor)]  # nothing is protected after the final chunk
        for step, positions in enumerate(kept[:-1]):
            assert (
                positions[:, positions.shape[1] - protected :]
                == torch.arange(10 * step + 10 - protected, 10 * step + 10)
            ).all()
