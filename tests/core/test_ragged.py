"""Heads and layers that share a budget by score or by measured shares: the split, and what each is sure of."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import oracle as reference
import pytest
import torch
from families import prompt
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from locret import LongContextModel, RetainingHeads, RetentionCache, RetentionPolicy, generate, prefill, scorers
from locret.cache.cache_file import load_cache, save_cache
from locret.cache.compose import shrunk
from locret.conversation.head_shares import counted
from locret.policy.policy import policy_of
from locret.policy.schedule import layer_budgets
from locret.policy.selectors import select_over_heads
from locret.policy.sizes import divided, lifted, shared_budgets, steepened
from locret.scorers.oracle import OracleScorer

NUMBERS: dict[str, Any] = {"budget": 24, "chunk_size": 10, "stabilizers": 5, "local_len": 6}
LOGITS: dict[str, Any] = {"output_logits": True, "return_dict_in_generate": True, "eos_token_id": None}
REFUSED = [scorer.name for scorer in scorers._SCORERS if not scorer.causal and not scorer.by_head]


def policy(**changes: Any) -> RetentionPolicy:
    return RetentionPolicy(**{**NUMBERS, "head_budgets": "adaptive", **changes})


@pytest.mark.parametrize("relative", [False, True])
def test_the_split_equals_the_oracle(relative: bool) -> None:
    for draw in map(random.Random, range(40)):
        kv_heads, budget = draw.randint(1, 5), draw.randint(1, 23)
        counts = [draw.randint(0, 41) for _ in range(kv_heads)]
        positions = [sorted(draw.sample(range(99), count)) for count in counts]
        # Coarse scores tie often; with `relative` a tie would hang on the rounding of a sum.
        coarse = [-torch.inf, torch.inf, *(number / 2 for number in range(-3, 4))]
        scores = [[draw.gauss(0, 2) if relative else draw.choice(coarse) for _ in range(n)] for n in counts]
        protected, floor = draw.randint(0, budget + 3), draw.randint(0, budget)
        kinds = ((scores, torch.float32), (positions, torch.int32))
        flat = [torch.tensor([number for own in heads for number in own], dtype=kind) for heads, kind in kinds]
        kept, numbers = select_over_heads(*flat, counts, budget, protected, floor, relative)
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


@pytest.mark.parametrize("tier", [{}, {"host_budget": 26, "recall": 4}, {"host_budget": "all", "recall": 99}])
def test_spaced_units_are_where_they_were_in_the_text_as_far_as_there_is_room(
    model: Any, tier: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for every distance, logits are those of original positions; without any, those of ranks."""

    def read(**changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
        own = policy(head_budgets="shares", head_shares=(0.7, 1.0, 1.2, 1.5, 0.8, 0.8), **tier, **changes)
        cache, found = RetentionCache(model, "random", own), []
        for text in (prompt(70), prompt(40, seed=1)):  # the second turns the keys back first
            found.append(prefill(model, text, cache))
            answer: Any = generate(model, cache=cache, max_new_tokens=4, do_sample=False, **LOGITS)
            found += answer.logits
        return torch.cat(found), torch.cat([cache.kept_positions(layer).flatten() for layer in range(3)])

    monkeypatch.setattr(model.config, "max_position_embeddings", 9999)
    (ranks, kept), (spaced, same), (original, theirs) = read(), read(spacing=1000), read(positions="original")
    assert torch.equal(kept, same)
    assert torch.equal(kept, theirs)
    torch.testing.assert_close(spaced, original, atol=2e-4, rtol=0)
    for far in (ranks, read(spacing=3)[0]):
        assert not torch.allclose(far, original, atol=1e-2)
    monkeypatch.setattr(model.config, "max_position_embeddings", 11)
    torch.testing.assert_close(read(spacing=1000)[0], read()[0])
    outs = {"positions compact": {"positions": "original"}, "head-budgets shares": {"head_budgets": "uniform"}}
    for out, change in outs.items():
        shares = {"head_budgets": "shares", "head_shares": (1.0,), "spacing": 4, **change}
        assert policy(**shares).idle()["spacing"] == out


@pytest.mark.parametrize("tier", [{}, {"host_budget": 20, "recall": 4}])
def test_spaced_keys_are_turned_back_from_where_they_were_however_long_the_answer(
    model: Any, tier: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(model.config, "max_position_embeddings", 100)  # a longer answer leaves less room between units
    shares = {"head_budgets": "shares", "head_shares": (0.5, 1.0, 1.5, 2.0, 0.5, 0.5)}
    cache = RetentionCache(model, "random", policy(**shares, budget=16, spacing=5, **tier))
    prefill(model, prompt(90), cache)
    answered = cache.copy()
    generate(model, cache=answered, max_new_tokens=12, do_sample=False, eos_token_id=None)
    save_cache(answered, tmp_path / "a.ctx")
    for other in (answered, load_cache(tmp_path / "a.ctx", model, "random"), answered.split(1)[0]):
        before = cache.copy()
        for layer, longer in zip(before.governed, other.governed, strict=True):
            layer.unsettle(before.next_position, before.seen)
            longer.unsettle(other.next_position, other.seen)
            for own, its in zip(layer.store.segments[0], longer.store.segments[0], strict=True):
                keys = longer.store.keys[0, its][: own.stop - own.start]
                torch.testing.assert_close(keys, layer.store.keys[0, own], atol=1e-5, rtol=0)


def test_a_row_without_units_leaves_spaced_keys_where_they_are(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.config, "max_position_embeddings", 128)
    rules = policy(budget=15, head_budgets="shares", head_shares=(1.0,) * 6, spacing=16)
    both, alone = (RetentionCache(model, "random", rules) for _ in range(2))
    mask = torch.tensor([[1] * 60, [0] * 55 + [1] * 5])
    prefill(model, prompt(60).expand(2, -1) * mask, both, mask)
    prefill(model, prompt(60), alone)
    more = prompt(30, seed=1)
    torch.testing.assert_close(prefill(model, more.expand(2, -1), both)[:1], prefill(model, more, alone))


SHARED: dict[str, Any] = {"budget": 24, "chunk_size": 16, "stabilizers": 4, "local_len": 4}


@pytest.fixture(scope="module")
def small() -> nn.Module:
    shape = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(vocab_size=97, intermediate_size=40, pad_token_id=0, **shape)).eval()


def ids_of(length: int) -> torch.Tensor:
    return torch.randint(3, 97, (1, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("most", [None, 60, 9, 1])
def test_layers_share_what_uniform_ones_have_and_what_one_cannot_hold_lifts_the_smallest(most: int | None) -> None:
    shares, room = (0.2, 0.3, 2.5), most or 10**9  # the slow version gives what is left to the least
    for budget in (1, 33, 500):
        plain = shared_budgets(budget, shares, (1, 1, 1))
        units, own = lifted(plain, shares, [room] * 3, (1, 1, 1)), [min(one, room) for one in plain]
        while sum(own) < min(3 * budget, 3 * room):
            own[min((one, nth) for nth, one in enumerate(own) if one < room)[1]] += 1
        assert (list(units), sum(plain), min(plain) >= 1) == (own, 3 * budget, True)
        assert all(abs(one - 1 - (budget - 1) * share) <= 1 for one, share in zip(plain, shares, strict=True))
    assert shared_budgets(64, (1e308, 1e308), (2, 2)) == shared_budgets(64, (5e-324, 5e-324), (2, 2)) == (64, 64)


@given(st.lists(st.integers(1, 99), min_size=2, max_size=9), st.integers(1, 99), st.integers(1, 999))
def test_shares_are_steeper_as_far_as_a_text_has_room(shares: list[int], budget: int, room: int) -> None:
    means = [share / sum(shares) * len(shares) for share in shares]
    few = min(4, budget // 16) / budget
    squares = [few + (1 - few) * one**2 * len(means) / sum(mean**2 for mean in means) for one in means]
    pairs = [*zip(means, squares, strict=True)]
    ways = ([own + way / 4096 * (most - own) for own, most in pairs] for way in range(4096, -1, -1))
    steep, slow = steepened(shares, budget, room), next((one for one in ways if max(one) <= room / budget), means)
    assert [one / sum(steep) * len(steep) for one in steep] == pytest.approx(slow, abs=0.01)


def test_numbers_that_are_no_shares_and_shares_of_layers_are_refused() -> None:
    for shares, message in (((0.0, 1.0), "are no shares; give a number above 0"), ("half", "is not a list of finite")):
        with pytest.raises(ValueError, match=message):
            RetentionPolicy(**SHARED, head_budgets="shares", head_shares=shares)
    with pytest.raises(ValueError, match='layer_budgets "shares" was retired'):
        policy_of({"layer_budgets": "shares"})
    assert RetentionPolicy.from_dict({**SHARED, "layer_budgets": "shares", "layer_shares": [1.0, 2.0]}, "a file")


def test_quotas_of_heads_follow_shares_and_what_heads_hold() -> None:
    assert [divided(12, (1.0, 1.0, 4.0), (9, 9, most), least=1) for most in (9, 3)] == [[2, 2, 8], [5, 4, 3]]
    assert lifted((16, 32), (0.2, 1.8, 3.6, 0.4), (26, 26), (2, 2)) == (24, 24)
    unlike = policy(head_budgets="shares", head_shares=(8.0, 1.0, 1.0, 2.0))
    # Layers of one and three heads: 96 units in all, that is four times the budget.
    assert [layer_budgets(unlike, (1, 3), most) for most in (None, [30, 30])] == [(63, 11), (30, 22)]
    assert [divided(n, (1.0, 9000.0), (8, 8), least=1) for n in (1, 2)] == [[0, 1], [1, 1]]  # every head keeps one
    assert lifted((1, 1), (0.1, 5.0, 0.1, 20.0, 20.0, 20.0), (2, 2), (3, 3)) == (1, 1)  # less than a unit for each


@pytest.mark.parametrize("second", [{}, {"host_budget": 13, "recall": 3}, {"host_budget": "all", "recall": 3}])
@pytest.mark.parametrize(
    ("budget", "chunk_size", "length", "layers"),
    [(48, 7, 200, (22, 74)), (24, 7, 90, (11, 37)), (24, 90, 90, (11, 37)), (24, 7, 30, (24, 24))],
)
def test_heads_keep_their_own_best_units_by_shares(
    small: nn.Module, budget: int, chunk_size: int, length: int, layers: tuple[int, int], second: dict[str, Any]
) -> None:
    """The oracle chooses, in one go at the end of the text, what each head rates best; of a small share, eight so.

    Beside no second tier shares are squared; else that has the best of what heads drop, as many as the share says.
    """
    shares = (0.2, 1.8, 3.6, 0.4)
    numbers = {**SHARED, "budget": budget, "chunk_size": chunk_size, "stabilizers": 0, "head_shares": shares, **second}
    if second:
        layers = (budget * 2 // 3, budget * 4 // 3) if length > 30 else layers
    elif length > 30:  # squares, 4.1 on average, and a 16th
        shares = tuple(4.1 * (budget // 16) / (budget - budget // 16) + share**2 for share in shares)
    labels = torch.randint(40, (2, 2, length - 4), generator=torch.Generator().manual_seed(3)) / 40
    cache = RetentionCache(small, OracleScorer(labels=labels), RetentionPolicy(**numbers, head_budgets="shares"))
    ids = ids_of(length)
    prefill(small, ids if length > 30 else iter(ids.tolist()), cache)
    memory, most = cache.memory(), {"all": length, 13: 13}.get(second.get("host_budget"), 0)
    assert (memory.actual, memory.host) == (memory.planned, memory.host_planned)
    assert memory.host <= 4 * most * (2 * 8 * 4 + 8)
    assert sum(layer.fill for layer in shrunk(cache, 25).governed) == 50
    for layer, own in enumerate([shares[:2], shares[2:]]):
        quotas = divided(2 * layers[layer], own, (length - 4,) * 2, least=1)
        kept = cache.kept_positions(layer)[0]
        for head, quota in enumerate(quotas):
            positions = kept[head][kept[head] >= 0]
            order = [at for _, at in sorted(zip(labels[layer, head].tolist(), range(length - 4), strict=True))][::-1]
            if own[head] < sum(shares) / len(shares) / 2:
                order = order[:8] + sorted(order[8:], key=lambda position: -(position * 2654435769 % 2**32))
            assert positions.tolist() == [*sorted(order[:quota]), *range(length - 4, length)]
            if second:
                rest = sorted(order[quota:], key=lambda position: (float(labels[layer, head, position]), position))
                rest = rest if most == length else rest[-(4, 14, 29, 5)[2 * layer + head] :]  # 3, and shares of 4 * 10
                store = cache.governed[layer].host.store
                assert (store.held("positions")[0, head].tolist()[-len(rest) :] if rest else []) == sorted(rest)
                assert not rest or store.counts[0, head] == len(rest)


def test_head_shares_come_from_the_heads_or_are_asked_for(small: nn.Module) -> None:
    heads, policy = RetainingHeads.for_model(small, 16, seed=0), RetentionPolicy(**SHARED, head_budgets="shares")
    with pytest.raises(ValueError, match="needs a share of each KV head, and scorer retaining_heads recommends none"):
        RetentionCache(small, heads, policy)
    heads.annotate(policy={**RetentionPolicy(**SHARED).to_dict(), "head_shares": [0.5, 1.5, 1.0, 1.0]})
    assert RetentionCache(small, heads, policy).policy.head_shares == (0.5, 1.5, 1.0, 1.0)
    with pytest.raises(ValueError, match="head_shares has 3 numbers for 4 KV heads in 2 layers"):
        RetentionCache(small, "random", RetentionPolicy(**SHARED, head_budgets="shares", head_shares=(1.0, 1.0, 2.0)))


@pytest.mark.slow
def test_shares_that_nobody_gives_are_measured(small: nn.Module, tmp_path: Path) -> None:
    policy, shipped = RetentionPolicy(**SHARED, head_budgets="shares"), "checkpoints/smollm2-heads"
    lm = LongContextModel.from_pretrained("smollm2", scorer="streaming", policy=policy)
    both = [lm.policy.head_shares, RetainingHeads.from_pretrained(shipped).config.policy["head_shares"]]
    assert float(torch.corrcoef(torch.tensor(both))[0, 1]) > 0.99, "those of the heads are of twelve other texts"
    with pytest.raises(ValueError, match=r"cannot be measured here \(the backbone is in parts, holds too few tokens"):
        LongContextModel(small, lm.tokenizer, "streaming", policy)
    of_shipped = LongContextModel.from_pretrained("checkpoints/tiny", budget=64)
    assert (of_shipped.policy.budget, of_shipped.scorer.name) == (64, "retaining_heads")
    usual = LongContextModel.from_pretrained(shutil.copytree("checkpoints/tiny", tmp_path / "other"), budget=64)
    assert (usual.policy.head_budgets, usual.policy.budget, usual.scorer.name) == ("shares", 64, "expected_attention")


def test_heads_that_are_looked_at_most_are_counted_with_a_floor_for_all() -> None:
    labels = torch.full((2, 2, 80), -9.0)
    labels[1, 0] = -0.1  # one head finds everything
    shares = counted(labels)
    assert float(shares.mean()) == pytest.approx(1.0)
    assert shares[1, 0] == shares.max() == pytest.approx(4 - 3 * 0.2, abs=0.2)
    labels[0, 1] = -torch.inf  # a layer with one head
    assert counted(labels)[0, 1] == 0
