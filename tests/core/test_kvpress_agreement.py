"""Scores and kept units are those of kvpress, where both define the same, and its presses run as scorers.

tests/peers/README.md says how the records are made, and how the presses themselves are tried.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build, prompt
from safetensors.torch import load_file
from scorer_passes import GREEDY, policy, watch
from torch import Tensor
from transformers import AutoModelForCausalLM

from locret import RetentionCache, RetentionPolicy, generate, prefill, scorers
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
    "knorm": ("key_norm", {}, 1.0, 0, 0),
    "keydiff": ("key_difference", {}, 1.0, 0, 0),
    "expected_attention": ("expected_attention", {}, 1.0, 0, 4),
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


# -- presses as scorers, in chunks and within the budget --------------------------------------------------------------


def kept(spec: str, how: Any = None) -> list[Tensor]:
    cache = RetentionCache(build("llama"), spec, how or policy())
    generate(cache.model, prompt(61), cache=cache, max_new_tokens=3, **GREEDY)
    assert cache.memory().units <= 24 + 6 + 3
    return [cache.kept_positions(layer) for layer in range(3)]


@pytest.mark.parametrize(
    ("press", "ours", "positions", "least"),
    [
        ("presses:NormPress", "key_norm", "original", 64),
        ("presses:WindowPress", "snapkv:window=8,kernel=1", "compact", 9),
        ("presses:WindowPress:window_size=3", "snapkv:window=3,kernel=1", "original", 4),
    ],
)
def test_a_press_keeps_what_the_same_scorer_keeps(press: str, ours: str, positions: str, least: int) -> None:
    assert scorers.get(press).lookback == least, "a pass is longer than the window, as presses assert"
    how = policy(positions=positions, stabilizers=0)
    assert all(torch.equal(theirs, own) for theirs, own in zip(kept(press, how), kept(ours, how), strict=True))


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("presses:WindowPress:window_size=0.5", "presses:WindowPress: window_size=0.5 is not a whole number"),
        ("presses:ChoosyPress", "has a compress of its own, which selects or rewrites units; take a press that only"),
        ("presses:NeedyPress", "scorer presses:NeedyPress cannot rate 11 new "),
    ],
)
def test_a_press_that_does_not_only_rate_is_refused(spec: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        kept(spec)
    assert "\n" not in str(caught.value)


PRESSES = {
    "snapkv": "SnapKVPress",
    "snapkv_narrow": "SnapKVPress:window_size=16,kernel_size=7",
    "tova": "TOVAPress",
    "knorm": "KnormPress",
    "keydiff": "KeyDiffPress",
    "expected_attention": "ExpectedAttentionPress",
    "expected_attention_mean": "ExpectedAttentionPress:use_covariance=false,n_future_positions=64",
    "expected_attention_epsilon": "ExpectedAttentionPress:epsilon=0.01,n_sink=2",
    "expected_attention_unweighed": "ExpectedAttentionPress:use_vnorm=false",
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", PRESSES)
def test_presses_of_kvpress_rate_as_they_did_in_kvpress(monkeypatch: pytest.MonkeyPatch, name: str, case: str) -> None:
    pytest.importorskip("kvpress", reason="kvpress is not installed; see tests/peers/README.md")
    theirs, ours = load(case)[2][f"{name}.scores"], rate_once(monkeypatch, case, f"kvpress:{PRESSES[name]}", {})
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
