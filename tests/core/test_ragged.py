"""Heads of a layer that share its budget by score: what they keep, what they compute, and in how much memory."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build, prompt
from ragged_runs import GREEDY, Watch, dense_logits, padded, policy

from locret import RetainingHeads, RetentionCache, generate, load_cache, prefill, reference, save_cache, scorers
from locret.eviction import select_kept, select_over_heads
from locret.ragged import RaggedLayer
from locret.schedule import plan

BY_HEAD = [scorer.name for scorer in scorers._SCORERS if scorer.by_head]
REFUSED = [scorer.name for scorer in scorers._SCORERS if not scorer.causal and not scorer.by_head]
both_positions = pytest.mark.parametrize("positions", ["compact", "original"])


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama")


@pytest.fixture(scope="module")
def heads(model: Any) -> RetainingHeads:
    return RetainingHeads.for_model(model, hidden_dim=16, seed=3)


def make(name: str, heads: RetainingHeads) -> Any:
    options: dict[str, dict[str, Any]] = {
        "snapkv": {"window": 7},
        "scissorhands": {"history": 8},
        "expected_attention": {"queries": 8, "future": 30},
    }
    return heads if name == "heads" else scorers.get(name, **options.get(name, {}))


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
@pytest.mark.parametrize("family", ["llama", "llama-mha", "qwen3", "phi3", "llama-yarn"])
@torch.no_grad()
def test_reading_and_answering_equal_the_slow_oracle(family: str, positions: str) -> None:
    model, ids = build(family), prompt(71)
    heads = RetainingHeads.for_model(model, hidden_dim=16, seed=3)
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
            rules.head_floor,
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
    assert cache.governed[0].counts.unique().numel() > 1


def test_evictions_while_answering_turn_keys_to_their_new_slots(model: Any, heads: RetainingHeads) -> None:
    cache = RetentionCache(model, heads, policy(decode_budget=31, decode_interval=4))
    ids = generate(model, prompt(60), cache=cache, max_new_tokens=30, **GREEDY)
    whole = RetentionCache(model, heads, policy(budget=100, head_budgets="uniform"))
    prefill(model, ids[:, :-1], whole)
    whole.governed[0].unsettle(whole.next_position)
    cache.governed[0].unsettle(cache.next_position)
    layer, raw = cache.governed[0], whole.governed[0].keys[0]
    for head, span in enumerate(layer.segments[0]):
        held = layer.positions[0, span].long()
        torch.testing.assert_close(layer.keys[0, span], raw[head, held], atol=1e-5, rtol=0)
    assert layer.counts[0, 0] != layer.counts[0, 1]


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
        assert mine.counts.sum() == 2 * mine.fill
    passes = [held for layer in watch.layers for _, held in watch.passes[id(layer)]]
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


# -- copies, files, batches -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_copied_or_loaded_cache_answers_and_reads_on_like_the_first(family: str, tmp_path: Path) -> None:
    model = build(family)
    heads = RetainingHeads.for_model(model, hidden_dim=8, seed=0)
    ids, mask = padded([prompt(90), prompt(21, seed=1), prompt(64, seed=2)])
    cache = RetentionCache(model, heads, policy(decode_budget=40, decode_interval=4))
    prefill(model, ids, cache, attention_mask=mask)
    save_cache(cache, tmp_path / "book.safetensors")
    loaded, twin = load_cache(tmp_path / "book.safetensors", model, heads), cache.copy()
    layer = cache.backbone.layers[0]
    for other in (loaded, twin):
        assert torch.equal(other.kept_positions(layer), cache.kept_positions(layer))
        assert torch.equal(other.kept_scores(layer), cache.kept_scores(layer))
    answers = [generate(model, None, cache=c, max_new_tokens=20, **GREEDY) for c in (loaded, twin, cache)]
    assert torch.equal(answers[0], answers[2])
    assert torch.equal(answers[1], answers[2])
    logits = [prefill(model, prompt(40, batch=3, seed=9), c) for c in (loaded, twin, cache)]
    torch.testing.assert_close(logits[0], logits[2], atol=1e-5, rtol=0)
    torch.testing.assert_close(logits[1], logits[2], atol=1e-5, rtol=0)


@both_positions
@pytest.mark.parametrize("name", ["heads", "sirllm", *BY_HEAD])
def test_each_row_of_a_batch_equals_its_own_run(model: Any, heads: RetainingHeads, name: str, positions: str) -> None:
    scorer, rules, more = make(name, heads), policy(positions=positions), prompt(31, batch=3, seed=7)
    together, (ids, mask) = prompt(61, batch=3), padded([prompt(length, seed=length) for length in (61, 4, 90)])
    for batch, masks in ((together, None), (ids, mask)):
        rows = [row[None] if masks is None else row[None, keep.bool()] for row, keep in zip(batch, mask, strict=True)]
        cache = RetentionCache(model, scorer, rules)
        prefill(model, batch, cache, attention_mask=masks)
        answers = generate(model, None, cache=cache, max_new_tokens=8, **GREEDY)
        logits = prefill(model, torch.cat([answers[:, -1:], more], dim=1), cache)
        for index, row in enumerate(rows):
            alone = RetentionCache(model, scorer, rules)
            prefill(model, row, alone)
            answer = generate(model, None, cache=alone, max_new_tokens=8, **GREEDY)
            assert torch.equal(answers[index], answer[0])
            own = prefill(model, torch.cat([answer[:, -1:], more[index : index + 1]], dim=1), alone)
            torch.testing.assert_close(logits[index], own[0], atol=1e-4, rtol=0)
            held, held_alone = cache.kept_positions(1)[index], alone.kept_positions(1)[0]
            for kept, kept_alone in zip(held, held_alone, strict=True):
                assert torch.equal(kept[kept >= 0], kept_alone[kept_alone >= 0])


def test_rows_can_be_dropped_and_beams_answer_as_with_the_plain_cache(model: Any, heads: RetainingHeads) -> None:
    ids, mask = padded([prompt(90), prompt(33, seed=1)])
    cache, alone = RetentionCache(model, heads, policy()), RetentionCache(model, heads, policy())
    prefill(model, ids, cache, attention_mask=mask)
    prefill(model, prompt(33, seed=1), alone)
    cache.select_rows(torch.tensor([1]))
    answers = [generate(model, None, cache=c, max_new_tokens=20, **GREEDY) for c in (cache, alone)]
    assert torch.equal(*answers)
    roomy = RetentionCache(model, heads, policy(budget=90))
    beams = {"num_beams": 3, "max_new_tokens": 6, **GREEDY}
    with torch.no_grad():
        expected = model.generate(ids[:1], **beams)
    assert torch.equal(generate(model, ids[:1], cache=roomy, **beams), expected)


@pytest.mark.parametrize("name", REFUSED)
def test_a_scorer_that_selects_equally_many_units_for_every_head_is_refused(model: Any, name: str) -> None:
    with pytest.raises(ValueError, match=f'head_budgets="adaptive" .* scorer {name} selects equally many units .* use'):
        RetentionCache(model, name, policy())


def test_layers_of_a_uniform_policy_are_not_ragged(model: Any) -> None:
    cache = RetentionCache(model, "random", policy(head_budgets="uniform"))
    assert not any(isinstance(layer, RaggedLayer) for layer in cache.layers)
