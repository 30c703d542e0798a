"""Presses of kvpress run as scorers, in chunks and within the budget; where ours is the same method, alike."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from families import build, prompt
from scorer_passes import GREEDY, policy
from test_kvpress_agreement import CASES, load, rate_once
from torch import Tensor

from locret import RetentionCache, generate, scorers


def kept(spec: str, how: Any = None) -> list[Tensor]:
    cache = RetentionCache(build("llama"), spec, how or policy())
    generate(cache.model, prompt(61), cache=cache, max_new_tokens=3, **GREEDY)
    assert cache.memory().units <= 24 + 6 + 3
    return [cache.kept_positions(layer) for layer in range(3)]


@pytest.mark.parametrize(
    ("press", "ours", "positions"),
    [
        ("presses:NormPress", "key_norm", "original"),
        ("presses:WindowPress", "snapkv:window=8,kernel=1", "compact"),
        ("presses:WindowPress:window_size=3", "snapkv:window=3,kernel=1", "original"),
    ],
)
def test_a_press_keeps_what_the_same_scorer_keeps(press: str, ours: str, positions: str) -> None:
    how = policy(positions=positions, stabilizers=0)
    assert all(torch.equal(theirs, own) for theirs, own in zip(kept(press, how), kept(ours, how), strict=True))


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("presses:WindowPress:window_size=0.5", "presses:WindowPress: window_size=0.5 is not a whole number"),
        ("presses:WindowPress:windowsize=9", 'has no option "windowsize"; did you mean window_size?'),
        ("presses:ChoosyPress", "has a compress of its own, which selects or rewrites units; take a press that only"),
        ("presses:Nothing", "presses has no Nothing; check the spelling"),
    ],
)
def test_a_press_that_does_not_only_rate_is_refused(spec: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        scorers.get(spec)
    assert "\n" not in str(caught.value)


def test_a_press_that_needs_all_attention_weights_is_refused_when_it_asks() -> None:
    with pytest.raises(ValueError, match=r"scorer presses:NeedyPress cannot rate 11 new .* needs no attention weights"):
        kept("presses:NeedyPress")


# -- kvpress itself, where it is installed beside this package; tests/peers/README.md ---------------------------------

SAME = {
    "snapkv": ("SnapKVPress", ""),
    "snapkv_narrow": ("SnapKVPress", ":window_size=16,kernel_size=7"),
    "tova": ("TOVAPress", ""),
    "knorm": ("KnormPress", ""),
    "keydiff": ("KeyDiffPress", ""),
    "expected_attention": ("ExpectedAttentionPress", ""),
    "expected_attention_mean": ("ExpectedAttentionPress", ":use_covariance=false,n_future_positions=64"),
    "expected_attention_epsilon": ("ExpectedAttentionPress", ":epsilon=0.01,n_sink=2"),
    "expected_attention_unweighed": ("ExpectedAttentionPress", ":use_vnorm=false"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", SAME)
def test_presses_of_kvpress_rate_as_they_did_in_kvpress(monkeypatch: pytest.MonkeyPatch, name: str, case: str) -> None:
    pytest.importorskip("kvpress", reason="kvpress is not installed; see tests/peers/README.md")
    press, options = SAME[name]
    theirs = load(case)[2][f"{name}.scores"]
    ours = rate_once(monkeypatch, case, f"kvpress:{press}{options}", {})
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
