"""Heads of a layer that share its budget by score: the split, and what every head is sure of."""

from __future__ import annotations

import random
from typing import Any

import oracle as reference
import pytest
import torch
from families import prompt

from locret import RetentionCache, RetentionPolicy, generate, prefill, scorers
from locret.policy.selectors import select_over_heads

NUMBERS: dict[str, Any] = {"budget": 24, "chunk_size": 10, "stabilizers": 5, "local_len": 6}
LOGITS: dict[str, Any] = {"output_logits": True, "return_dict_in_generate": True, "eos_token_id": None}
REFUSED = [scorer.name for scorer in scorers._SCORERS if not scorer.causal and not scorer.by_head]


def policy(**changes: Any) -> RetentionPolicy:
    return RetentionPolicy(**{**NUMBERS, "head_budgets": "adaptive", **changes})


@pytest.mark.parametrize("relative", [False, True])
def test_the_split_equals_the_oracle(relative: bool) -> None:
    for seed in range(40):
        draw = random.Random(seed)
        kv_heads, budget = draw.randint(1, 5), draw.randint(1, 23)
        counts = [draw.randint(0, 41) for _ in range(kv_heads)]
        positions = [sorted(draw.sample(range(99), count)) for count in counts]
        # Coarse scores tie often; with `relative` a tie would hang on the rounding of a sum.
        coarse = [-torch.inf, torch.inf, *(number / 2 for number in range(-3, 4))]
        scores = [[draw.gauss(0, 2) if relative else draw.choice(coarse) for _ in range(n)] for n in counts]
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


@pytest.mark.parametrize("name", ["random", "snapkv:window=7"])
def test_a_full_floor_is_the_uniform_cache_in_texts_answers_and_turns(model: Any, name: str) -> None:
    runs = []
    for changes in ({"head_budgets": "uniform"}, {"head_floor": 1.0}):
        decode = {"decode_budget": 33, "decode_interval": 5} if name == "random" else {}
        cache = RetentionCache(model, name, policy(**changes, **decode))
        ids = generate(model, prompt(97), cache=cache, max_new_tokens=9, do_sample=False, eos_token_id=None)
        second = prefill(model, prompt(45, seed=2), cache)
        runs.append((ids, second, *(cache.kept_positions(layer) for layer in range(3)), cache.kept_scores(2)))
    for uniform, ragged in zip(*runs, strict=True):
        torch.testing.assert_close(ragged, uniform, atol=1e-5, rtol=0)


def test_a_scorer_that_selects_equally_many_units_for_every_head_is_refused(model: Any) -> None:
    assert REFUSED
    for name in REFUSED:
        with pytest.raises(ValueError, match=f'head_budgets="adaptive" .* scorer {name} selects equally many units'):
            RetentionCache(model, name, policy())


def test_spaced_units_are_where_they_were_in_the_text_as_far_as_there_is_room(model: Any) -> None:
    """With room for every distance, logits are those of original positions; without any, those of ranks."""

    def read(**changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
        own = policy(head_budgets="shares", head_shares=(0.5, 1.0, 1.5, 2.0, 0.5, 0.5), **changes)
        cache, found = RetentionCache(model, "random", own), []
        for text in (prompt(70), prompt(40, seed=1)):  # the second turns the keys back first
            found.append(prefill(model, text, cache))
            answer: Any = generate(model, cache=cache, max_new_tokens=4, do_sample=False, **LOGITS)
            found += answer.logits
        return torch.cat(found), torch.cat([cache.kept_positions(layer).flatten() for layer in range(3)])

    (ranks, kept), (spaced, same), (original, theirs) = read(), read(spacing=1000), read(positions="original")
    assert torch.equal(kept, same)
    assert torch.equal(kept, theirs)
    torch.testing.assert_close(spaced, original, atol=2e-4, rtol=0)
    for far in (ranks, read(spacing=3)[0]):
        assert not torch.allclose(far, original, atol=1e-2)
    before = model.config.max_position_embeddings
    model.config.max_position_embeddings = 11
    try:
        torch.testing.assert_close(read(spacing=1000)[0], ranks)
    finally:
        model.config.max_position_embeddings = before
    for change in ({"positions": "original"}, {"head_budgets": "uniform"}):
        shares = {"head_budgets": "shares", "head_shares": (1.0,), "spacing": 4, **change}
        assert policy(**shares).idle()["spacing"] == "head-budgets shares"
