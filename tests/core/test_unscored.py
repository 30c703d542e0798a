"""Scores of generated tokens that are put off are the scores that are given at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import build, prompt

from locret import RetainingHeads, RetentionCache, RetentionPolicy, generate, load_cache, prefill, save_cache
from locret.cache import unscored

POLICY: dict[str, Any] = {"budget": 200, "chunk_size": 32, "stabilizers": 8, "local_len": 8}


def written(family: str, new: int, batch: int = 1, **options: Any) -> tuple[RetentionCache, torch.Tensor]:
    """Return a cache that has read 70 tokens and written `new` ones, and those."""
    policy = {name: options.pop(name) for name in list(options) if hasattr(RetentionPolicy, name)}
    model = build(family)
    model.generation_config.eos_token_id = None
    heads = RetainingHeads.for_model(model, hidden_dim=16, seed=3)
    cache = RetentionCache(model, heads, RetentionPolicy(**{**POLICY, **policy}))
    prefill(model, prompt(70, batch=batch), cache, new_tokens=new)
    return cache, generate(model, cache=cache, max_new_tokens=new, do_sample=False, **options)


def both(monkeypatch: pytest.MonkeyPatch, *args: Any, **options: Any) -> tuple[RetentionCache, RetentionCache]:
    """Return the cache with scores put off, and its twin with scores given at once; their answers are the same."""
    late, answer = written(*args, **options)
    monkeypatch.setattr(unscored, "MOST", 0)
    soon, twin = written(*args, **options)
    assert torch.equal(answer, twin)
    return late, soon


def assert_same(late: RetentionCache, soon: RetentionCache) -> None:
    for index in late.backbone.layers:
        assert torch.equal(late.kept_positions(index), soon.kept_positions(index))
        torch.testing.assert_close(late.kept_scores(index), soon.kept_scores(index), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("new", [1, 15, 16, 17, 37])
@pytest.mark.parametrize("family", ["llama", "phi3", "qwen3"])
@pytest.mark.slow
def test_scores_put_off_are_the_scores_given_at_once(monkeypatch: pytest.MonkeyPatch, family: str, new: int) -> None:
    assert_same(*both(monkeypatch, family, new))


@pytest.mark.parametrize("head_budgets", ["uniform", "adaptive"])
@pytest.mark.slow
def test_an_answer_beyond_its_budget_evicts_the_same_units(monkeypatch: pytest.MonkeyPatch, head_budgets: str) -> None:
    options = {"budget": 40, "decode_budget": 45, "decode_interval": 11, "head_budgets": head_budgets}
    assert_same(*both(monkeypatch, "llama", 61, **options))


@pytest.mark.parametrize("layer_budgets", ["uniform", "pyramid"])
@pytest.mark.parametrize("batch", [1, 2])
def test_what_waits_takes_no_memory_beyond_the_plan(
    monkeypatch: pytest.MonkeyPatch, batch: int, layer_budgets: str
) -> None:
    options = {"budget": 30, "positions": "original", "layer_budgets": layer_budgets}
    late, soon = both(monkeypatch, "llama", 19, batch, **options)
    assert_same(late, soon)
    assert late.memory().peak <= late.memory().planned


def test_a_short_answer_waits_until_it_is_over() -> None:
    scored = []
    model = build("llama")
    heads = RetainingHeads.for_model(model, hidden_dim=16, seed=3)
    cache = RetentionCache(model, heads, RetentionPolicy(**POLICY))
    prefill(model, prompt(250), cache, new_tokens=9)
    heads[0].register_forward_hook(lambda _module, args, _output: scored.append(args[0].shape[1]))
    generate(model, cache=cache, max_new_tokens=9, min_new_tokens=9, do_sample=False)
    assert scored == [9]


class Interrupted(Exception):
    """Stands for a user's interrupt."""


class Impatient:
    """A streamer that gives up at the sixth token."""

    def __init__(self) -> None:
        self.tokens = 0

    def put(self, _value: torch.Tensor) -> None:
        self.tokens += 1
        if self.tokens > 5:
            raise Interrupted

    def end(self) -> None:
        raise AssertionError


def test_an_interrupted_answer_leaves_no_unit_without_its_score() -> None:
    model = build("llama")
    heads = RetainingHeads.for_model(model, hidden_dim=16, seed=3)
    cache = RetentionCache(model, heads, RetentionPolicy(**POLICY))
    prefill(model, prompt(70), cache, new_tokens=20)
    cache.governed[0].store.columns["scores"].fill_(torch.nan)
    with pytest.raises(Interrupted):
        generate(model, cache=cache, max_new_tokens=20, min_new_tokens=20, do_sample=False, streamer=Impatient())
    assert cache.governed[0].fill > 70
    assert cache.kept_scores(0)[0, 0, 69:].isfinite().all()


def test_beams_and_a_saved_cache_hold_the_same_scores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    late, soon = both(monkeypatch, "llama", 12, num_beams=3)
    assert_same(late, soon)
    save_cache(late, tmp_path / "late.safetensors")
    assert_same(load_cache(tmp_path / "late.safetensors", late.model, late.scorer), soon)
