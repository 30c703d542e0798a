"""Scores and kept units are those of kvpress, where both define the same; tests/peers/README.md."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from scorer_passes import watch
from torch import Tensor
from transformers import AutoModelForCausalLM

from locret import RetentionCache, RetentionPolicy, prefill, scorers
from locret.policy.selectors import select_kept

RECORD = Path(__file__).parents[1] / "peers" / "kvpress"
GOLDEN = Path(__file__).parents[1] / "golden"
CASES = ["A_llama_gqa", "C_phi3_mha"]

# Name of the record -> our scorer; what our score is multiplied by; how many of the newest and the first units kvpress
# sets above all others, where the scores themselves cannot be compared.
SAME: dict[str, tuple[str, dict[str, Any], float, int, int]] = {
    "snapkv": ("snapkv", {"window": 64, "kernel": 5}, 1 / 64, 64, 0),
    "snapkv_narrow": ("snapkv", {"window": 16, "kernel": 7}, 1 / 16, 16, 0),
    "tova": ("tova", {}, 1.0, 1, 0),
    "observed_attention": ("h2o", {"normalise": True}, 1.0, 0, 0),
    "knorm": ("key_norm", {}, 1.0, 0, 0),
    "keydiff": ("key_difference", {}, 1.0, 0, 0),
    "expected_attention": ("expected_attention", {}, 1.0, 0, 4),
    "expected_attention_mean": ("expected_attention", {"covariance": False, "future": 64}, 1.0, 0, 4),
    "expected_attention_epsilon": ("expected_attention", {"epsilon": 0.01, "sinks": 2}, 1.0, 0, 2),
    "expected_attention_unweighed": ("expected_attention", {"value_norm": False}, 1.0, 0, 4),
}


@cache
def load(case: str) -> tuple[Any, Tensor, dict[str, Tensor]]:
    model = AutoModelForCausalLM.from_pretrained(GOLDEN / case, dtype=torch.float32).eval()
    ids = load_file(GOLDEN / case / "inputs.safetensors")["prompt_ids"]
    return model, ids, load_file(RECORD / f"{case}.safetensors")


def rate_once(monkeypatch: pytest.MonkeyPatch, case: str, name: str, options: dict[str, Any]) -> Tensor:
    """Return (layers, K, T): what a scorer says of a whole prompt that is read in one pass."""
    model, ids, _ = load(case)
    scorer, rated = scorers.get(name, **options), []
    watch(monkeypatch, scorer, lambda _, scores: rated.append(scores[0]))
    tokens = ids.shape[1]
    whole = RetentionPolicy(
        budget=tokens, chunk_size=512, stabilizers=0, local_len=tokens, positions="original", when="prompt_end"
    )
    prefill(model, ids, RetentionCache(model, scorer, whole))
    return torch.stack(rated)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", SAME)
def test_scores_and_kept_units_are_those_of_kvpress(monkeypatch: pytest.MonkeyPatch, name: str, case: str) -> None:
    ours_name, options, factor, newest, first = SAME[name]
    theirs = load(case)[2][f"{name}.scores"]
    ours = rate_once(monkeypatch, case, ours_name, options) * factor
    assert ours.shape == theirs.shape
    compared = slice(first, theirs.shape[-1] - newest)
    spread = theirs[..., compared].std()
    assert ((ours - theirs)[..., compared].abs() < 1e-4 * spread).all()
    above = theirs[..., compared].amax()
    assert (theirs[..., theirs.shape[-1] - newest :] > above).all()
    assert (theirs[..., :first] > above).all()
    assert (ours[..., :first] == torch.inf).all()
    kept = load(case)[2][f"{name}.kept"].long()
    protected = torch.arange(ours.shape[-1]) >= ours.shape[-1] - newest
    assert torch.equal(select_kept(ours, kept.shape[-1], protected).sort(-1).values, kept)


@pytest.mark.parametrize("name", ["snapkv", "snapkv_narrow", "tova"])
def test_a_prompt_read_in_chunks_ends_with_the_units_that_kvpress_keeps(name: str) -> None:
    model, ids, recorded = load("A_llama_gqa")
    kept = recorded[f"{name}.kept"].long()
    policy = RetentionPolicy(
        budget=kept.shape[-1] - 1, chunk_size=70, stabilizers=0, local_len=1, positions="original", when="prompt_end"
    )
    cache = RetentionCache(model, scorers.get(SAME[name][0], **SAME[name][1]), policy)
    prefill(model, ids, cache)
    for layer in range(len(kept)):
        assert torch.equal(cache.kept_positions(layer)[0], kept[layer])
