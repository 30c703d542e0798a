"""Options of scorers are checked by type and range where the scorer is made; new ones equal their slow versions."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields
from typing import Any

import pytest
import torch
from chunks import make_chunk
from families import build, prompt
from hypothesis import given, settings
from hypothesis import strategies as st
from scorer_passes import policy

from locret import RetentionCache, prefill, scorers

OPTIONS = [
    (name, field.name)
    for name in scorers.names(bare=True)
    for field in fields(scorers.find(name))
    if field.default is not MISSING
]


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("snapkv:kernel=1.5", "scorer snapkv: kernel=1.5 is not a whole number; give one such as 5"),
        ("snapkv:kernel=4", "scorer snapkv: kernel=4 has no middle slot; choose an odd number"),
        ("snapkv:kernel=1000000000001", "scorer snapkv: kernel=1000000000001 is too large"),
        ("snapkv:window=true", "scorer snapkv: window=True is not a whole number"),
        ("snapkv:pooling=7", "scorer snapkv: pooling=7 is not a text"),
        ("snapkv:pooling=median", 'scorer snapkv: pooling="median" is unknown; choose one of avg, max'),
        ("snapkv:kernle=7", 'scorer snapkv: it has no option "kernle"; did you mean kernel?'),
        ("streaming:sinks=-1", "scorer streaming: sinks=-1 is too small; it must be 0 or more"),
        ("streaming:sinks=a", "scorer streaming: sinks='a' is not a whole number"),
        ("h2o:normalise=abc", "scorer h2o: normalise='abc' is not true or false"),
        ("h2o:recent_share=2", "scorer h2o: recent_share=2 is not a share"),
        ("random:seed=nan", "scorer random: seed=nan is not a whole number"),
        ("random:seed=1000000000000000000000", "seed=1000000000000000000000 is too large; it must be 4,294,967,295 or"),
        ("nacl:proxy_share=nan", "scorer nacl: proxy_share=nan is not a finite number"),
        ("nacl:random_share=0,draws=shared", "draws=shared has no effect without a random_share above 0; set that, or"),
        ("nacl:random_share=0,seed=3", "scorer nacl: seed=3 has no effect without a random_share above 0"),
        ("snapkv:kernel=1,pooling=max", "scorer snapkv: pooling=max has no effect without a kernel above 1; set that"),
        (
            "expected_attention:value_norm=false,epsilon=0.5",
            "scorer expected_attention: epsilon=0.5 has no effect without value_norm=true; set that, or leave it out",
        ),
        ("nacl:draws=some", 'scorer nacl: draws="some" is unknown; choose one of by_head, shared'),
        ("sirllm:decay=0", "scorer sirllm: decay=0 is not above 0 and at most 1"),
        ("sage_kv:sink_share=0.9,recent_share=0.2", "are more than the budget; lower one of them"),
        ("tova:window=3", 'scorer tova: it has no option "window"; did you mean keep_recent?'),
        ("key_norm:window=3", 'scorer key_norm: it has no option "window"; there are none'),
        ("expected_attention:future=10000000000000", "future=10000000000000 is too large"),
        ("oracle", "scorer oracle needs the labels of the true answer, which only locret-eval knows"),
        ("retaining_heads", "scorer retaining_heads needs trained heads; give --heads FOLDER"),
        ("snapkv+pyramid", "+pyramid is for the policy, not for the scorer; set layer_budgets=pyramid there"),
        ("snapkv:max", 'scorer "snapkv:max": options are written OPTION=VALUE'),
    ],
)
def test_an_unfit_option_is_named_as_it_was_typed(spec: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        scorers.get(spec)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@given(
    which=st.sampled_from(OPTIONS),
    value=st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.lists(st.integers(), max_size=2)
    | st.sampled_from(["avg", "max", "sum", "mean", "chunk", "official", 10**30, -1, 0, 1, 0.5]),
)
@settings(max_examples=300, deadline=None)
def test_any_value_of_any_option_is_used_or_refused_in_one_sentence(which: tuple[str, str], value: Any) -> None:
    name, option = which
    try:
        made = scorers.get(name, **{option: value})
        refusal = None
    except ValueError as error:
        refusal = str(error)
    if refusal is not None:
        assert refusal.startswith(f"scorer {name}: {option}")
        assert "\n" not in refusal
    else:
        assert getattr(made, option) == value
        chunk = make_chunk(torch.randn(1, 4, 3, 8), torch.randn(1, 2, 7, 8), 0.4, budget=6, recent=2, selects=True)
        if name not in ("expected_attention", "sirllm"):  # these need a model
            assert made.score(chunk).shape[:2] == (1, 2)
        assert made.recent(6) >= 0
        assert made.sink_tokens(6, 2) >= 0


def test_options_are_given_in_any_of_three_ways() -> None:
    expected = scorers.SnapKVScorer(kernel=7, pooling="max")
    assert scorers.get("snapkv:kernel=7,pooling=max") == expected
    assert scorers.get("snapkv", kernel=7, pooling="max") == expected
    assert scorers.get({"snapkv": {"kernel": 7, "pooling": "max"}}) == expected
    with pytest.raises(ValueError, match='"snapkv:kernel=7" has the option kernel already; give it once'):
        scorers.get("snapkv:kernel=7", kernel=9)
    cache = RetentionCache(build("llama"), "snapkv:kernel=7", policy())
    assert cache.scorer == scorers.SnapKVScorer(kernel=7)


# -- options of the papers' own settings ------------------------------------------------------------------------------


def test_sirllm_fades_what_it_holds_with_every_further_text() -> None:
    model, held = build("llama"), {}
    for decay in (1.0, 0.5):
        how = policy(budget=200, chunk_size=40, positions="compact")
        cache = RetentionCache(model, f"sirllm:decay={decay}", how)
        for seed in range(3):
            prefill(model, prompt(20, seed=seed), cache)
        held[decay] = cache.kept_scores(0)[0, 0]
    turns = torch.tensor([0.25, 0.5, 1.0]).repeat_interleave(20)
    torch.testing.assert_close(held[0.5], held[1.0] * turns)
