"""NACL and SAGE-KV keep what their slow versions keep: scorers that decide for a whole budget at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import oracle as reference
import pytest
import torch
from chunks import make_chunk
from families import build, prompt
from scorer_passes import GREEDY, dense, policy, watch
from torch import Tensor

from locret import RetentionCache, RetentionPolicy, generate, prefill, scorers
from locret.backbone.chunk import Chunk
from locret.policy.selectors import select_kept
from locret.scorers.random import uniform_draw

# -- NACL -------------------------------------------------------------------------------------------------------------


def selections(
    monkeypatch: pytest.MonkeyPatch, scorer: scorers.Scorer, how: RetentionPolicy, new: int = 0
) -> list[Any]:
    """Return every chunk that selects, with copies of what its layer held, and what was kept of it."""
    seen: list[Any] = []

    def see(chunk: Chunk, scores: Tensor) -> None:
        if chunk.selects and chunk.key.shape[2] > chunk.budget:
            held = chunk.unit_positions.clone()
            chunk = replace(chunk, unit_positions=held, key=chunk.key.clone())
            seen.append((chunk, scores.clone(), select_kept(scores, chunk.budget, chunk.pinned)))

    watch(monkeypatch, scorer, see)
    model = build("llama")
    cache = RetentionCache(model, scorer, how)
    if new:
        generate(model, prompt(83), cache=cache, max_new_tokens=new, **GREEDY)
    else:
        prefill(model, prompt(83), cache)
    return seen


@pytest.mark.parametrize("when", ["chunk", "prompt_end"])
@pytest.mark.parametrize("options", [{}, {"sampling": "uniform"}, {"random_share": 0.2, "protect_share": 0.25}])
def test_nacl_keeps_what_the_slow_version_keeps(
    monkeypatch: pytest.MonkeyPatch, when: str, options: dict[str, Any]
) -> None:
    scorer = scorers.get("nacl", most_proxies=8, **options)
    draws = uniform_draw
    decode = {"decode_budget": 34, "decode_interval": 4}
    seen = selections(monkeypatch, scorer, policy(when, **decode), new=12)
    assert len({chunk.generating for chunk, _, _ in seen}) == 2
    for chunk, _, kept in seen:
        budget = chunk.budget
        proxies = max(1, min(8, -(-(83 if chunk.last else chunk.new_tokens) // 10), chunk.new_tokens))
        sums = reference.reduce_group(dense(chunk)[:, -proxies:].sum(1), 2, "sum")
        protect = int(budget * scorer.protect_share)
        recent = max(1, protect - min(256, protect // 2))
        assert chunk.recent >= recent
        by_lot = round(scorer.random_share * (budget - (chunk.recent - recent)))
        for head in range(2):
            positions = chunk.unit_positions[0, head]
            chance = draws(chunk.unit_positions, 0, chunk.layer_idx, 2)[0, head].tolist()
            numbers = (budget, chunk.recent, min(256, protect // 2), by_lot)
            expected = reference.nacl_kept(
                sums[head].tolist(), chance, positions.tolist(), numbers, scorer.sampling == "attention"
            )
            assert set(kept[0, head].tolist()) == expected


def test_nacl_draws_with_the_odds_of_its_attention() -> None:
    """Two of four units are drawn; the odds are those of drawing twice without replacement."""
    sums = torch.tensor([0.0, 1.0, 2.0, 0.5])
    odds = sums.softmax(0)
    expected = torch.zeros(4)
    for i in range(4):
        for j in range(4):
            if i != j:
                chance = odds[i] * odds[j] / (1 - odds[i])
                expected[i] += chance
                expected[j] += chance
    runs = 4000
    # Sinks, none; one newest unit that stays; every one of many KV heads draws on its own.
    chunk = make_chunk(torch.zeros(1, 1, 1, 1), torch.zeros(1, runs, 5, 1), 1.0, selects=True, budget=3, recent=1)
    scorer = scorers.get("nacl", random_share=1.0, protect_share=0.0)
    raised = scorer._selected(chunk, torch.cat([sums, torch.zeros(1)]).expand(1, runs, 5))
    drawn = (raised[0, :, :4] > sums.max()).float()
    assert (drawn.sum(-1) == 2).all()
    assert (drawn.mean(0) - expected).abs().max() < 4 * 0.5 / runs**0.5


# -- SAGE-KV ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["chunk", "prompt_end"])
@pytest.mark.parametrize("budget", [24, 27])
def test_sage_kv_keeps_what_the_slow_version_keeps(monkeypatch: pytest.MonkeyPatch, when: str, budget: int) -> None:
    seen = selections(monkeypatch, scorers.get("sage_kv"), policy(when, budget=budget))
    assert len(seen) >= 3
    for chunk, _, kept in seen:
        assert chunk.recent == max(6 if when == "prompt_end" else 5, chunk.budget // 4)
        expected = reference.sage_kept(
            chunk.query[0, :, -1], chunk.key[0], chunk.scaling, chunk.unit_positions[0], chunk.budget, chunk.recent
        )
        assert [set(row.tolist()) for row in kept[0]] == expected
