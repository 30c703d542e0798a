"""Scorers equal their slow versions, on every forward pass of real reads and answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import oracle as reference
import pytest
import torch
from families import build, prompt
from scorer_passes import GREEDY, dense, policy, read_and_answer, watch
from torch import Tensor

from locret import RetentionCache, RetentionPolicy, generate, prefill, scorers
from locret.backbone.adapters import describe
from locret.backbone.chunk import Chunk
from locret.labels.labels import answer_labels
from locret.policy.selectors import select_kept
from locret.scorers.random import uniform_draw

Slow = Callable[[Chunk, Tensor], Tensor]


def slow_h2o(how: str) -> Slow:
    return lambda chunk, weights: reference.h2o(weights, chunk.stored_scores[0], how)


def where_selected(slow: Callable[..., Tensor], *options: Any) -> Slow:
    """Return what a scorer says that rates where units are selected, and gives zeros elsewhere."""

    def scores(chunk: Chunk, weights: Tensor) -> Tensor:
        if chunk.generating or not (chunk.selects or chunk.last):
            return torch.zeros(chunk.key.shape[1], chunk.new_tokens)
        return slow(weights, chunk.key.shape[1], *options)

    return scores


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


LONGBENCH = {"window": 4, "kernel": 7, "pooling": "max", "reduce": "max"}
IMDC = {"queries": "chunk", "reduce": "sum", "window": 3}
CASES: dict[str, tuple[str, dict[str, Any], Slow]] = {
    "h2o": ("h2o", {}, slow_h2o("mean")),
    "h2o-max": ("h2o", {"reduce": "max", "recent_share": 0.0}, slow_h2o("max")),
    "tova": ("tova", {}, lambda chunk, weights: reference.tova(weights, chunk.key.shape[1])),
    "snapkv": ("snapkv", {"window": 7}, where_selected(reference.snapkv, 7, 5, "avg", "mean")),
    "snapkv-longbench": ("snapkv", LONGBENCH, where_selected(reference.snapkv, 4, 7, "max", "max")),
    "snapkv-imdc": ("snapkv", IMDC, where_selected(reference.snapkv_of_imdc, 5, "sum")),
    "scissorhands": ("scissorhands", {"history": 8}, slow_scissorhands(8)),
    "key_norm": ("key_norm", {}, lambda chunk, _: reference.key_norm(chunk.key[0, :, -chunk.new_tokens :])),
    "key_difference": ("key_difference", {}, lambda chunk, _: reference.key_difference(chunk.key[0])),
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
    positions = "compact" if family == "phi3-longrope" else "original"
    cache = RetentionCache(model, scorer, policy(when, positions=positions, **decode))
    generate(model, prompt(61), cache=cache, max_new_tokens=5, **GREEDY)
    # Whole chunks, a shorter one, and single tokens where answers are rated.
    assert len({new for new, _ in passes}) >= 2 + scorer.rates_answers
    assert max(held for _, held in passes) == (61 if when == "prompt_end" else 35)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("when", ["chunk", "prompt_end"])
# Besides llama: learned sinks, capped logits, groups of one, and keys that turn as slots close up.
@pytest.mark.parametrize("family", ["llama", "gpt-oss", "gemma2", "llama-mha", "phi3-longrope"])
def test_scores_equal_the_slow_version_on_every_pass(
    monkeypatch: pytest.MonkeyPatch, case: str, when: str, family: str
) -> None:
    name, options, slow = CASES[case]
    compare_every_pass(monkeypatch, scorers.get(name, **options), slow, when, family)


def test_scissorhands_fades_where_no_pass_is_as_long_as_its_history(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = scorers.get("scissorhands", history=30)
    compare_every_pass(monkeypatch, scorer, slow_scissorhands(30), "chunk", "llama")


def test_snapkv_is_refused_where_answers_are_evicted_or_its_window_is_longer_than_a_pass() -> None:
    with pytest.raises(ValueError, match="scorer snapkv is not defined for generated tokens"):
        RetentionCache(build("llama"), "snapkv", policy(decode_budget=40, decode_interval=4))
    with pytest.raises(ValueError, match="scorer snapkv looks back 32 tokens .* raise chunk_size to at least 32"):
        RetentionCache(build("llama"), "snapkv", policy("prompt_end"))


# -- scorers that decide for a whole budget at once -------------------------------------------------------------------


def selections(
    monkeypatch: pytest.MonkeyPatch, scorer: scorers.Scorer, how: RetentionPolicy, new: int = 1
) -> list[Any]:
    """Return every chunk that selects, with copies of what its layer held, and what was kept of it."""
    seen: list[Any] = []

    def see(chunk: Chunk, scores: Tensor) -> None:
        if chunk.selects and chunk.key.shape[2] > chunk.budget:
            held = replace(chunk, unit_positions=chunk.unit_positions.clone(), key=chunk.key.clone())
            seen.append((held, select_kept(scores, chunk.budget, chunk.pinned)))

    watch(monkeypatch, scorer, see)
    model = build("llama")
    generate(model, prompt(83), cache=RetentionCache(model, scorer, how), max_new_tokens=new, **GREEDY)
    return seen


@pytest.mark.parametrize("when", ["chunk", "prompt_end"])
@pytest.mark.parametrize("options", [{}, {"random_share": 0.2, "protect_share": 0.25}])
def test_nacl_keeps_what_the_slow_version_keeps(
    monkeypatch: pytest.MonkeyPatch, when: str, options: dict[str, Any]
) -> None:
    scorer = scorers.get("nacl", most_proxies=8, **options)
    seen = selections(monkeypatch, scorer, policy(when, decode_budget=34, decode_interval=4), new=12)
    assert len({chunk.generating for chunk, _ in seen}) == 2
    for chunk, kept in seen:
        budget = chunk.budget
        proxies = max(1, min(8, -(-(83 if chunk.last else chunk.new_tokens) // 10), chunk.new_tokens))
        sums = reference.reduce_group(dense(chunk)[:, -proxies:].sum(1), 2, "sum")
        protect = int(budget * scorer.protect_share)
        recent = max(1, protect - min(256, protect // 2))
        assert chunk.recent >= recent
        by_lot = round(scorer.random_share * (budget - (chunk.recent - recent)))
        for head in range(2):
            positions = chunk.unit_positions[0, head]
            chance = uniform_draw(chunk.unit_positions, 0, chunk.layer_idx, 2)[0, head].tolist()
            numbers = (budget, chunk.recent, min(256, protect // 2), by_lot)
            expected = reference.nacl_kept(sums[head].tolist(), chance, positions.tolist(), numbers)
            assert set(kept[0, head].tolist()) == expected


@pytest.mark.parametrize("when", ["chunk", "prompt_end"])
def test_sage_kv_keeps_what_the_slow_version_keeps(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    seen = selections(monkeypatch, scorers.get("sage_kv"), policy(when, budget=27))
    assert len(seen) >= 3
    for chunk, kept in seen:
        assert chunk.recent == max(6 if when == "prompt_end" else 5, chunk.budget // 4)
        expected = reference.sage_kept(
            chunk.query[0, :, -1], chunk.key[0], chunk.scaling, chunk.unit_positions[0], chunk.budget, chunk.recent
        )
        assert [set(row.tolist()) for row in kept[0]] == expected


# -- tokens and keys --------------------------------------------------------------------------------------------------


def test_surprisal_equals_the_slow_version_on_every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model, scorer = build("llama"), scorers.get("sirllm")
    kind: Any = type(scorer)
    seen, score = list[tuple[scorers.TokenPass, Tensor]](), kind.score_tokens

    def watched(self: Any, model: Any, tokens: scorers.TokenPass) -> Tensor:
        seen.append((tokens, score(self, model, tokens)))
        return seen[-1][1]

    monkeypatch.setattr(kind, "score_tokens", watched)
    read_and_answer(model, scorer)
    assert {len(scores[0]) for _, scores in seen} >= {11, 1}
    for tokens, scores in seen:
        with torch.no_grad():
            logits = model.lm_head(tokens.hidden_BLE[0])
            before = None if tokens.before_B1E is None else model.lm_head(tokens.before_B1E[0, 0])
        slow = reference.surprisal(logits, tokens.ids_BL[0], before)
        torch.testing.assert_close(scores[0], slow, atol=1e-5, rtol=1e-5)


def test_sirllm_keeps_sinks_the_newest_and_surprises_alike_everywhere() -> None:
    model = build("llama")
    cache = RetentionCache(model, scorers.get("sirllm", keep_recent=7), policy(stabilizers=0))
    prefill(model, prompt(83), cache)
    kept = cache.kept_positions(0)[0, 0].tolist()
    assert kept[:4] == [0, 1, 2, 3]
    assert kept[-13:] == list(range(70, 83))  # seven newest of the last chunk, and six local tokens
    for layer in range(3):
        assert (cache.kept_positions(layer) == torch.tensor(kept)).all()


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


# -- expected attention, whatever rotates the keys --------------------------------------------------------------------


def slow_expected(model: Any, scorer: Any, chunk: Chunk, next_position: int) -> Tensor:
    rotary, kind = model.model.rotary_emb, "full_attention_" if describe(model).window else ""
    inv_freq = getattr(rotary, f"{kind}inv_freq")
    magnitude = getattr(rotary, f"{kind}attention_scaling")
    coming = range(next_position, next_position + scorer.future)
    counted = [i for i, position in enumerate(chunk.positions[0, 0].tolist()) if position >= scorer.sinks]
    query = chunk.projections.query()[0]
    return reference.expected_attention(
        query[:, counted] if counted else query,
        chunk.key[0],
        chunk.value[0],
        (chunk.unit_positions[0] < scorer.sinks).tolist(),
        reference.mean_rotation(coming, query.shape[-1], inv_freq, magnitude),
        chunk.scaling,
    )


@pytest.mark.parametrize(
    ("family", "positions", "when"),
    [
        ("llama", "original", "prompt_end"),
        ("phi3-longrope", "compact", "chunk"),
        *((family, "original", "chunk") for family in ("llama-yarn", "phi3-partial", "phi3-longrope", "gemma3")),
    ],
)
def test_expected_attention_equals_the_slow_version_on_every_pass(
    monkeypatch: pytest.MonkeyPatch, family: str, positions: str, when: str
) -> None:
    model = build(family)
    scorer, rated = scorers.get("expected_attention", future=20, queries=9), []

    def compare(chunk: Chunk, scores: Tensor) -> None:
        if chunk.generating or not (chunk.selects or chunk.last):
            assert scores.shape[2] == chunk.new_tokens
            assert not scores.any()
            return
        # With compact positions the units of this test, as many in every layer, start at 0.
        coming = chunk.key.shape[2] if positions == "compact" else int(chunk.positions[0, 0, -1]) + 1
        torch.testing.assert_close(scores[0], slow_expected(model, scorer, chunk, coming), atol=1e-5, rtol=1e-4)
        rated.append(chunk.new_tokens)

    watch(monkeypatch, scorer, compare)
    read_and_answer(model, scorer, positions=positions, when=when)
    layers = 1 if family == "gemma3" else 3
    assert sorted(set(rated)) == ([9] if when == "prompt_end" else [5, 11])  # the last token comes later, as an answer
    assert len(rated) == layers * (1 if when == "prompt_end" else 6)


# -- what needs no slow version ---------------------------------------------------------------------------------------


def test_random_draws_are_uniform_and_differ_by_head_layer_and_seed() -> None:
    positions = torch.arange(4000).expand(1, 2, -1)
    draws = torch.cat([uniform_draw(positions, seed, layer, 2)[0] for seed in (0, 1) for layer in (0, 1)])
    for draw in draws:
        assert ((torch.histc(draw, 10, 0, 1) - 400).abs() < 100).all()  # 5 standard deviations
    assert (torch.corrcoef(draws) - torch.eye(8)).abs().max() < 0.1


def test_the_oracle_keeps_what_the_true_answer_looks_at() -> None:
    model, ids = build("llama"), prompt(77)
    labels_LKN = answer_labels(model, ids, prompt(5, seed=3), "log_attention", True)
    cache = RetentionCache(
        model, scorers.get("oracle", labels=labels_LKN), policy(chunk_size=77, stabilizers=0, local_len=1)
    )
    prefill(model, ids, cache)
    for layer in range(3):
        best_KC = labels_LKN[layer, :, :76].topk(24, dim=-1).indices.sort(dim=-1).values
        assert torch.equal(cache.kept_positions(layer)[0, :, :24], best_KC)
