"""Budgets of layers and of KV heads by shares: how many units each has, and where the shares come from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from locret import LongContextModel, RetainingHeads, RetentionCache, RetentionPolicy, Span, prefill
from locret.cache.compose import shrunk
from locret.conversation.head_shares import counted
from locret.policy.growth import divided, shared_budgets
from locret.policy.policy import policy_of
from locret.scorers.oracle import OracleScorer

NUMBERS: dict[str, Any] = {"budget": 24, "chunk_size": 16, "stabilizers": 4, "local_len": 4}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    shape = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(vocab_size=97, intermediate_size=40, pad_token_id=0, **shape)).eval()


def ids_of(length: int) -> torch.Tensor:
    return torch.randint(3, 97, (1, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("most", [None, 60, 9, 1])
def test_layers_share_what_uniform_ones_have_and_hand_on_what_one_cannot_hold(most: int | None) -> None:
    """The slow version gives to all in proportion, bit by bit, until everything is given or nobody has room."""
    shares = (0.2, 0.3, 2.5)
    for budget in (1, 33, 500):
        units, own = shared_budgets(budget, 3, shares, most and [most] * 3), [1.0] * 3
        room, left = most or 10**9, min(3 * budget, 3 * most if most else 10**9)
        while sum(own) < left:
            own = [min(room, one + share / 50) for one, share in zip(own, shares, strict=True)]
        assert (sum(units), min(units) >= 1, max(units) <= room) == (left, True, True)
        assert all(abs(one - its) <= 1 for one, its in zip(units, own, strict=True))
    assert shared_budgets(64, 2, (1e308, 1e308)) == shared_budgets(64, 2, (5e-324, 5e-324)) == (64, 64)


def test_numbers_that_are_no_shares_and_shares_of_layers_are_refused() -> None:
    for shares, message in (((0.0, 1.0), "are no shares; give a number above 0"), ("half", "is not a list of finite")):
        with pytest.raises(ValueError, match=message):
            RetentionPolicy(**NUMBERS, head_budgets="shares", head_shares=shares)
    with pytest.raises(ValueError, match='layer_budgets "shares" was retired'):
        policy_of({"layer_budgets": "shares"})
    assert RetentionPolicy.from_dict({**NUMBERS, "layer_budgets": "shares", "layer_shares": [1.0, 2.0]}, "a file")


def test_quotas_of_heads_follow_shares_and_what_heads_hold() -> None:
    assert divided(12, (1.0, 1.0, 4.0), (9, 9, 9), least=1) == [2, 2, 8]
    assert divided(12, (1.0, 1.0, 4.0), (9, 9, 3), least=1) == [5, 4, 3]  # the rest, in the same proportion
    assert divided(2, (1.0, 1000.0), (8, 8), least=1) == [1, 1]  # every head keeps one
    assert divided(1, (1.0, 2.0), (8, 8), least=1) == [0, 1]


@pytest.mark.parametrize(
    ("budget", "chunk_size", "length", "layers"),
    [(48, 7, 200, (32, 64)), (24, 7, 90, (16, 32)), (24, 90, 90, (16, 32)), (24, 7, 30, (22, 26))],
)
def test_heads_keep_their_own_best_units_by_shares(
    model: nn.Module, budget: int, chunk_size: int, length: int, layers: tuple[int, int]
) -> None:
    """The oracle chooses, in one go at the end of the text, what each head rates best; of a small share, eight so."""
    shares = (0.2, 1.8, 3.6, 0.4)
    numbers = {**NUMBERS, "budget": budget, "chunk_size": chunk_size, "stabilizers": 0, "head_shares": shares}
    labels = torch.randint(40, (2, 2, length - 4), generator=torch.Generator().manual_seed(3)) / 40
    cache = RetentionCache(model, OracleScorer(labels=labels), RetentionPolicy(**numbers, head_budgets="shares"))
    ids = ids_of(length)
    prefill(model, ids if length > 30 else iter(ids.tolist()), cache)
    assert cache.memory().actual == cache.memory().planned
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


def test_head_shares_come_from_the_heads_or_are_asked_for(model: nn.Module) -> None:
    heads, policy = RetainingHeads.for_model(model, 16, seed=0), RetentionPolicy(**NUMBERS, head_budgets="shares")
    with pytest.raises(ValueError, match="needs a share of each KV head, and scorer retaining_heads recommends none"):
        RetentionCache(model, heads, policy)
    heads.annotate(policy={**RetentionPolicy(**NUMBERS).to_dict(), "head_shares": [0.5, 1.5, 1.0, 1.0]})
    assert RetentionCache(model, heads, policy).policy.head_shares == (0.5, 1.5, 1.0, 1.0)
    with pytest.raises(ValueError, match="head_shares has 3 numbers for 4 KV heads in 2 layers"):
        RetentionCache(model, "random", RetentionPolicy(**NUMBERS, head_budgets="shares", head_shares=(1.0, 1.0, 2.0)))
    cache = RetentionCache(model, heads, policy)
    with pytest.raises(ValueError, match='head_budgets="shares" leaves some heads no room'):
        cache.protect([Span(0, 4)])


@pytest.mark.slow
def test_shares_that_nobody_gives_are_measured(model: nn.Module) -> None:
    policy, shipped = RetentionPolicy(**NUMBERS, head_budgets="shares"), "checkpoints/smollm2-heads"
    lm = LongContextModel.from_pretrained("smollm2", scorer="streaming", policy=policy)
    both = [lm.policy.head_shares, RetainingHeads.from_pretrained(shipped).config.policy["head_shares"]]
    assert float(torch.corrcoef(torch.tensor(both))[0, 1]) > 0.99, "those of the heads are of twelve other texts"
    with pytest.raises(ValueError, match=r"cannot be measured here \(the backbone is in parts, holds too few tokens"):
        LongContextModel(model, lm.tokenizer, "streaming", policy)
    usual = LongContextModel.from_pretrained("checkpoints/tiny", budget=64)
    assert (usual.policy.head_budgets, usual.policy.budget, usual.scorer.name) == ("shares", 64, "expected_attention")


def test_heads_that_are_looked_at_most_are_counted_with_a_floor_for_all() -> None:
    labels = torch.full((2, 2, 80), -9.0)
    labels[1, 0] = -0.1  # one head finds everything
    shares = counted(labels)
    assert float(shares.mean()) == pytest.approx(1.0)
    assert shares[1, 0] == shares.max() == pytest.approx(4 - 3 * 0.2, abs=0.2)
    labels[0, 1] = -torch.inf  # a layer with one head
    assert counted(labels)[0, 1] == 0
