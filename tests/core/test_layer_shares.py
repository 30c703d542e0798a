"""Budgets of layers by shares: how many units each has, where the shares come from, and what training measures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from locret import (
    RetainingHeads,
    RetentionCache,
    RetentionPolicy,
    load_cache,
    method_spec,
    prefill,
    save_cache,
    shipped,
)
from locret.cache.reader import answering
from locret.data.training import question_rows
from locret.data.training.stream import TrainingStream
from locret.policy.growth import LEAST_SHARE, shared_budgets
from locret.train import layer_shares as measured
from locret.train.layer_shares import _alone, _loss, _read, layer_shares, shares_of

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


def test_half_of_a_budget_is_shared_out_by_what_answers_lose() -> None:
    assert shares_of(torch.tensor([0.0, 3.0, 1.0])) == (0.5, 1.625, 0.875)
    assert shares_of(torch.tensor([-0.2, 0.3])) == (0.5, 1.5), "a layer without which answers are better needs no more"
    assert shares_of(torch.tensor([8e-5, -4e-3])) == (1.0, 1.0), "next to nothing is lost, which tells nothing apart"


def test_shares_are_measured_on_rows_that_a_budget_cannot_hold(
    model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    class Row:
        prompt_ids, answer_ids, asked, earlier_answers = ids_of(60), ids_of(5), (), ()

    class Short(Row):
        prompt_ids = ids_of(9)

    heads, policy = RetainingHeads.for_model(model, 16, seed=0), RetentionPolicy(**NUMBERS)
    found = layer_shares(model, heads, [Row(), Row()], 8, policy)  # type: ignore[list-item]
    assert sum(found) == pytest.approx(2, abs=0.01)
    assert min(found) >= LEAST_SHARE
    assert layer_shares(model, heads, [Row(), Short(), Row()], 8, policy) == found  # type: ignore[list-item]
    with pytest.raises(ValueError, match="--layer-shares 8 holds every held-out row whole with the 4 local tokens"):
        layer_shares(model, heads, [Short()], 8, policy)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="the longest of which has 59, so all layers would be alike; lower it or"):
        layer_shares(model, heads, [Row()], 8, replace(policy, local_len=51))  # type: ignore[list-item]
    caplog.clear()
    assert layer_shares(model, heads, [Row()], 54, policy) == (1, 1)  # type: ignore[list-item]
    assert "--layer-shares 54: right answers lose next to nothing by it" in caplog.text


def test_local_tokens_that_nobody_gave_are_the_same_in_both_reads(model: nn.Module) -> None:
    heads, policy, ids = RetainingHeads.for_model(model, 16, seed=0), RetentionPolicy(budget=32), ids_of(61)
    few, enough = (_read(model, heads, ids, _alone(0, 2, units, 61), policy) for units in (8, 32))
    assert few.policy.local_len == enough.policy.local_len == policy.local_len


def test_long_answers_lose_the_same_by_blocks(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    heads, pair = RetainingHeads.for_model(model, 16, seed=0), (ids_of(7), ids_of(41))
    cache = _read(model, heads, ids_of(61), _alone(0, 2, 8, 61), RetentionPolicy(**NUMBERS))
    found = []
    for size in (256, 16, 7, 5, 1):
        monkeypatch.setattr(measured, "BLOCK", size)
        found.append(_loss(model, cache, [pair]))
    assert found == pytest.approx([found[0]] * 5, rel=1e-5)
    whole = cache.copy()
    with answering(model, whole):
        logits = model(input_ids=torch.cat(pair, dim=1), past_key_values=whole, use_cache=True).logits
    assert found[0] == pytest.approx(float(cross_entropy(logits[0, 6:-1], pair[1][0])), rel=1e-5)


@pytest.mark.parametrize("units", [2, 8, 33])
def test_one_layer_alone_is_bounded_while_shares_are_measured(model: nn.Module, units: int) -> None:
    heads, policy, ids = RetainingHeads.for_model(model, 16, seed=0), RetentionPolicy(**NUMBERS), ids_of(61)
    for nth in (0, 1):
        cache = _read(model, heads, ids, _alone(nth, 2, units, 61), policy)
        kept = [cache.kept_positions(layer).shape[-1] for layer in (0, 1)]
        assert kept[nth] == units + NUMBERS["local_len"]
        assert kept[1 - nth] == 61


def test_the_layer_in_which_a_backbone_finds_what_is_asked_gets_what_there_is_to_share() -> None:
    folder = shipped.find("checkpoints/tiny")
    backbone, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    made = question_rows.task_rows(tokenizer, 3, [700], names=["multikey"], seed=5)
    stream = TrainingStream(list(made), tokenizer, seed=0, max_length=None, answers="each")
    heads = RetainingHeads.from_pretrained(str(shipped.find("checkpoints/tiny-heads")))
    found = layer_shares(backbone, heads, [next(stream) for _ in range(3)], 64, RetentionPolicy(budget=64))
    assert found.index(max(found)) == 3
    assert max(found) > 2
    assert sum(found) == pytest.approx(5, abs=0.01)


@pytest.mark.parametrize("size", [1e308, 5e-324])
def test_only_the_ratio_of_shares_counts(size: float) -> None:
    assert shared_budgets(64, 2, (size, size), 8) == (64, 64)
