"""Ragged heads in batches, copies, files and beams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import build, distinct, prompt
from ragged_runs import BY_HEAD, GREEDY, REFUSED, both_positions, make, padded, policy

from locret import RetainingHeads, RetentionCache, generate, load_cache, prefill, save_cache
from locret.cache.ragged import RaggedStore


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama")


@pytest.fixture(scope="module")
def heads(model: Any) -> RetainingHeads:
    return RetainingHeads.for_model(model, hidden_dim=16, seed=3)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.slow
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
@pytest.mark.slow
def test_each_row_of_a_batch_equals_its_own_run(model: Any, heads: RetainingHeads, name: str, positions: str) -> None:
    scorer, rules, more = make(name, heads), policy(positions=positions), prompt(31, batch=3, seed=7)
    together = torch.cat([distinct(61, seed=seed) for seed in range(3)])
    ids, mask = padded([distinct(length, seed=length) for length in (61, 4, 90)])
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
    assert not any(isinstance(layer.store, RaggedStore) for layer in cache.governed)
