"""Budgets of layers by shares: how many units each has, where the shares come from, and what training measures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from locret import RetainingHeads, RetentionCache, RetentionPolicy, load_cache, method_spec, prefill, save_cache
from locret.policy.growth import shared_budgets
from locret.train.layer_shares import FLOOR, layer_shares, shares_of

NUMBERS: dict[str, Any] = {"budget": 24, "chunk_size": 16, "stabilizers": 4, "local_len": 4}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    shape = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(vocab_size=97, intermediate_size=40, pad_token_id=0, **shape)).eval()


def ids_of(length: int) -> torch.Tensor:
    return torch.randint(3, 97, (1, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("budget", "window"), [(32, 8), (33, 0), (9, 8), (8, 8), (500, 100)])
@pytest.mark.parametrize("shares", [(1.0, 1.0, 1.0), (0.2, 0.3, 2.5), (7.0, 1.0, 1.0)])
def test_layers_have_as_many_units_together_as_uniform_ones(
    budget: int, window: int, shares: tuple[float, ...]
) -> None:
    units = shared_budgets(budget, 3, shares, window)
    assert sum(units) == 3 * budget
    assert min(units) >= min(budget, window + 1)
    scored = [own - window for own in units]
    total = sum(scored)
    for own, share in zip(scored, shares, strict=True):
        assert abs(own - 1 - (total - 3) * share / sum(shares)) < 1 or not total
    assert shared_budgets(budget, 3, None, window) == (budget,) * 3


def test_a_cache_takes_given_shares_or_those_of_its_heads(model: nn.Module, tmp_path: Path) -> None:
    heads, given = RetainingHeads.for_model(model, 16, seed=0), (0.5, 1.5)
    policy = RetentionPolicy(**NUMBERS, layer_budgets="shares")
    with pytest.raises(ValueError, match="needs a share of each layer, and scorer retaining_heads recommends none"):
        RetentionCache(model, heads, policy)
    own = RetentionCache(model, heads, RetentionPolicy(**NUMBERS, layer_budgets="shares", layer_shares=given))
    heads.annotate(policy={**RetentionPolicy(**NUMBERS).to_dict(), "layer_shares": list(given)})
    heads.save_pretrained(tmp_path / "heads")
    loaded = RetainingHeads.from_pretrained(str(tmp_path / "heads"))
    theirs = RetentionCache(model, loaded, policy)
    assert theirs.policy == own.policy
    uniform = RetentionCache(model, loaded)
    assert uniform.policy.layer_budgets == "uniform"
    for cache in (own, theirs, uniform):
        prefill(model, ids_of(90), cache)
        assert cache.memory().actual == cache.memory().planned
    units = [own.kept_positions(layer).shape[-1] - 4 for layer in (0, 1)]
    assert tuple(units) == shared_budgets(24, 2, given, 4)
    assert sum(units) == 2 * 24
    assert theirs.kept_positions(1).equal(own.kept_positions(1))
    save_cache(own, tmp_path / "kept.safetensors")
    again = load_cache(tmp_path / "kept.safetensors", model, scorer=loaded)
    assert again.policy.layer_shares == given


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"layer_shares": (0.0, 1.0)}, "are no shares; give a number above 0 for every full-attention layer"),
        ({"layer_shares": ()}, "are no shares"),
        ({"layer_shares": (float("inf"), 1.0)}, "layer_shares="),
        ({"layer_shares": "half"}, "is not a list of finite numbers"),
    ],
)
def test_shares_that_are_none_are_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RetentionPolicy(**NUMBERS, layer_budgets="shares", **more)


def test_another_number_of_layers_is_refused(model: nn.Module) -> None:
    policy = RetentionPolicy(**NUMBERS, layer_budgets="shares", layer_shares=(1.0, 1.0, 1.0))
    with pytest.raises(ValueError, match="layer_shares has 3 numbers for 2 layers with full attention"):
        RetentionCache(model, "random", policy)
    assert method_spec.parse("locret+shares").changes == {"layer_budgets": "shares"}


def test_shares_are_those_of_the_best_units_of_all_layers(model: nn.Module) -> None:
    labels = torch.full((3, 2, 10), -9.0)
    labels[1, :, :4] = -1.0
    labels[2, 0, 0] = -0.5
    labels[0] -= torch.arange(10) / 100  # none of the first layer's is among the best
    assert shares_of(labels[:, :, :10], 1).tolist() == pytest.approx([0, 3 * 5 / 6, 3 * 1 / 6], abs=0.51)
    assert float(shares_of(labels, 3).sum()) == pytest.approx(3)

    class Row:
        prompt_ids, answer_ids, asked, earlier_answers = ids_of(40), ids_of(5), (), ()

    found = layer_shares(model, [Row(), Row()], 4)  # type: ignore[list-item]
    assert sum(found) == pytest.approx(2, abs=0.01)
    assert min(found) >= FLOOR

    class Short(Row):
        prompt_ids = ids_of(4)

    assert layer_shares(model, [Row(), Short(), Short()], 4) == found  # type: ignore[list-item]
    with pytest.raises(ValueError, match="--layer-shares 4 holds every held-out row whole, the longest of which has 4"):
        layer_shares(model, [Short()], 4)  # type: ignore[list-item]


@pytest.mark.parametrize("size", [1e308, 5e-324])
def test_only_the_ratio_of_shares_counts(size: float) -> None:
    assert shared_budgets(64, 2, (size, size), 8) == (64, 64)


def test_layers_of_fewer_heads_have_their_share_per_head() -> None:
    labels = torch.zeros(2, 4, 10)
    labels[:, :, 5:] = -1.0
    labels[1, 1:] = -torch.inf  # one KV head beside four
    assert shares_of(labels, 5).tolist() == [1, 1]
    labels[0, :, :] -= 0.5
    assert shares_of(labels, 5).tolist() == [1, 1]
    labels[1, 0, 5:] = 0.0
    assert shares_of(labels, 5).tolist() == pytest.approx([2 * 15 / 4 / 13.75, 2 * 10 / 13.75])
