"""Attention-based scorers equal their slow versions, on every forward pass of real reads and answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import oracle as reference
import pytest
import torch
from families import build, prompt
from scorer_passes import GREEDY, dense, policy, watch
from torch import Tensor

from locret import RetentionCache, generate, prefill, scorers
from locret.backbone.chunk import Chunk

Slow = Callable[[Chunk, Tensor], Tensor]


def selects(chunk: Chunk) -> bool:
    return not chunk.generating and (chunk.selects or chunk.last)


def slow_h2o(how: str) -> Slow:
    return lambda chunk, weights: reference.h2o(weights, chunk.stored_scores[0], how)


def slow_tova(chunk: Chunk, weights: Tensor) -> Tensor:
    return reference.tova(weights, chunk.key.shape[1])


def slow_snapkv(window: int, kernel: int, pooling: str, how: str) -> Slow:
    def slow(chunk: Chunk, weights: Tensor) -> Tensor:
        if not selects(chunk):
            return torch.zeros(chunk.key.shape[1], chunk.new_tokens)
        return reference.snapkv(weights, chunk.key.shape[1], window, kernel, pooling, how)

    return slow


def slow_imdc(chunk: Chunk, weights: Tensor) -> Tensor:
    if not selects(chunk):
        return torch.zeros(chunk.key.shape[1], chunk.new_tokens)
    return reference.snapkv_of_imdc(weights, chunk.key.shape[1], 5, "sum")


def slow_scissorhands(history: int) -> Slow:
    def slow(chunk: Chunk, weights: Tensor) -> Tensor:
        kv_heads, new = chunk.key.shape[1], chunk.new_tokens
        if new >= history:
            return -reference.low_events(weights, kv_heads, history)
        scores = torch.zeros(kv_heads, weights.shape[-1])
        scores[:, : weights.shape[-1] - new] = chunk.stored_scores[0]
        for i in range(new):  # one query after the other, each fading what was counted before
            seen = weights.shape[-1] - new + i + 1
            scores *= 1 - 1 / history
            scores[:, :seen] -= reference.low_events(weights[:, i : i + 1, :seen], kv_heads, 1)
        return scores

    return slow


CASES: dict[str, tuple[str, dict[str, Any], Slow]] = {
    "h2o": ("h2o", {}, slow_h2o("mean")),
    "h2o-max": ("h2o", {"reduce": "max", "recent_share": 0.0}, slow_h2o("max")),
    "tova": ("tova", {}, slow_tova),
    "snapkv": ("snapkv", {"window": 7}, slow_snapkv(7, 5, "avg", "mean")),
    "snapkv-longbench": (
        "snapkv",
        {"window": 4, "kernel": 7, "pooling": "max", "reduce": "max"},
        slow_snapkv(4, 7, "max", "max"),
    ),
    "snapkv-unpooled": ("snapkv", {"window": 5, "kernel": 1, "reduce": "sum"}, slow_snapkv(5, 1, "avg", "sum")),
    "snapkv-imdc": ("snapkv", {"queries": "chunk", "reduce": "sum", "window": 3}, slow_imdc),
    "scissorhands": ("scissorhands", {"history": 8}, slow_scissorhands(8)),
    "scissorhands-long": ("scissorhands", {"history": 11}, slow_scissorhands(11)),
}


def compare_every_pass(monkeypatch: pytest.MonkeyPatch, scorer: Any, slow: Slow, when: str, family: str) -> None:
    passes = []
    decode = {"decode_budget": 33, "decode_interval": 3} if scorer.rates_answers else {}

    def compare(chunk: Chunk, scores: Tensor) -> None:
        assert scores.dtype == torch.float32
        torch.testing.assert_close(scores[0], slow(chunk, dense(chunk)), atol=1e-5, rtol=1e-5)
        passes.append((chunk.new_tokens, chunk.key.shape[2]))

    watch(monkeypatch, scorer, compare)
    model = build(family, attn_logit_softcapping=2.0) if family == "gemma2" else build(family)
    cache = RetentionCache(model, scorer, policy(when, **decode))
    generate(model, prompt(61), cache=cache, max_new_tokens=5, **GREEDY)
    assert len({new for new, _ in passes}) >= 3  # whole chunks, a shorter one, single tokens
    assert max(held for _, held in passes) == (61 if when == "prompt_end" else 35)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("when", ["chunk", "prompt_end"])
@pytest.mark.parametrize("family", ["llama", "llama-mha", "gemma2"])  # groups of 2 and 1; capped logits
def test_scores_equal_the_slow_version_on_every_pass(
    monkeypatch: pytest.MonkeyPatch, case: str, when: str, family: str
) -> None:
    name, options, slow = CASES[case]
    compare_every_pass(monkeypatch, scorers.get(name, **options), slow, when, family)


def test_scissorhands_fades_where_no_pass_is_as_long_as_its_history(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = scorers.get("scissorhands", history=30)
    compare_every_pass(monkeypatch, scorer, slow_scissorhands(30), "chunk", "llama")


# -- H2O --------------------------------------------------------------------------------------------------------------


def columns(monkeypatch: pytest.MonkeyPatch, model: Any, ids: Tensor) -> Tensor:
    """Return (N, T) column sums of the first layer's dense attention."""
    scorer, rows = scorers.get("tova"), []
    with monkeypatch.context() as patch:
        watch(patch, scorer, lambda chunk, _: rows.append(dense(chunk).sum(1)) if chunk.layer_idx == 0 else None)
        prefill(model, ids, RetentionCache(model, scorer, policy(budget=200, chunk_size=200, local_len=ids.shape[1])))
    return rows[0]


@pytest.mark.parametrize("normalise", [False, True])
def test_h2o_accumulates_over_chunks_and_answers_to_the_dense_column_sums(
    monkeypatch: pytest.MonkeyPatch, normalise: bool
) -> None:
    model = build("llama")
    cache = RetentionCache(model, scorers.get("h2o", normalise=normalise), policy(budget=200))
    ids = generate(model, prompt(61), cache=cache, max_new_tokens=10, **GREEDY)[:, :-1]
    sums = columns(monkeypatch, model, ids).unflatten(0, (2, 2)).mean(1)
    expected = sums / torch.arange(70, 0, -1) if normalise else sums
    torch.testing.assert_close(cache.kept_scores(0)[0], expected, atol=1e-4, rtol=0)


# -- SnapKV -----------------------------------------------------------------------------------------------------------


def test_snapkv_is_refused_where_answers_are_evicted_or_its_window_is_longer_than_a_pass() -> None:
    with pytest.raises(ValueError, match="scorer snapkv is not defined for generated tokens"):
        RetentionCache(build("llama"), "snapkv", policy(decode_budget=40, decode_interval=4))
    with pytest.raises(ValueError, match="scorer snapkv looks back 32 tokens .* raise chunk_size to at least 32"):
        RetentionCache(build("llama"), "snapkv", policy("prompt_end"))


# -- options ----------------------------------------------------------------------------------------------------------
