"""A contract that every registered scorer keeps, and what is special about each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import build, prompt

from locret import RetainingHeads, RetentionCache, RetentionPolicy, prefill, scorers

POLICY = RetentionPolicy(budget=24, chunk_size=10, stabilizers=5, local_len=6)


def make(name: str, model: Any) -> scorers.Scorer:
    options: dict[str, dict[str, Any]] = {
        "retaining_heads": {"heads": RetainingHeads.for_model(model, hidden_dim=8, seed=0)},
        "oracle": {"labels": torch.rand(3, 2, 60, generator=torch.Generator().manual_seed(0))},
    }
    return scorers.get(name, **options.get(name, {}))


@pytest.mark.parametrize("name", scorers.names())
def test_two_sequences_in_a_row_equal_two_fresh_runs(name: str) -> None:
    model = build("llama")
    scorer = make(name, model)
    runs = []
    for seed in (0, 1, 0):
        cache = RetentionCache(model, scorer, POLICY)
        logits = prefill(model, prompt(77, seed=seed), cache)
        runs.append((logits, cache.kept_positions(1), cache.kept_scores(1)))
    assert torch.equal(runs[0][0], runs[2][0])
    assert torch.equal(runs[0][1], runs[2][1])
    assert runs[0][2].isfinite().all() or name == "streaming"
    assert not torch.equal(runs[0][0], runs[1][0])


@pytest.mark.parametrize("name", scorers.names())
def test_scores_do_not_depend_on_chunks_or_neighbours_in_the_batch(name: str) -> None:
    model = build("llama")
    scorer, ids = make(name, model), prompt(60, batch=2)
    scores = []
    for chunk_size, rows in ((60, ids), (7, ids), (60, ids[1:])):
        policy = RetentionPolicy(budget=60, chunk_size=chunk_size, stabilizers=0, local_len=1)
        cache = RetentionCache(model, scorer, policy)
        prefill(model, rows, cache)
        assert cache.kept_scores(0).shape == (len(rows), 2, 60)
        assert cache.kept_scores(0).dtype == torch.float32
        scores.append(cache.kept_scores(2)[-1])
    torch.testing.assert_close(scores[0], scores[1], atol=1e-4, rtol=0)
    torch.testing.assert_close(scores[0], scores[2], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", scorers.names())
def test_survivors_keep_the_scores_they_got(name: str) -> None:
    model = build("llama")
    cache = RetentionCache(model, make(name, model), POLICY)
    given: dict[tuple[int, int], float] = {}

    def watch(cache: RetentionCache) -> None:
        for head in range(2):
            held = zip(cache.kept_positions(0)[0, head].tolist(), cache.kept_scores(0)[0, head].tolist(), strict=True)
            for position, score in held:
                assert given.setdefault((head, position), score) == score

    prefill(model, prompt(90), cache, on_chunk=watch)
    assert len(given) > 2 * 24


def test_streaming_keeps_sinks_and_the_newest_tokens() -> None:
    model = build("llama")
    cache = RetentionCache(model, scorers.get("streaming", sinks=3), POLICY)
    prefill(model, prompt(100), cache)
    assert cache.kept_positions(0)[0, 0].tolist() == [0, 1, 2, *range(73, 100)]


def test_random_draws_are_uniform_and_differ_by_head_layer_and_seed() -> None:
    model = build("llama")
    policy = RetentionPolicy(budget=4000, chunk_size=500, stabilizers=0, local_len=1)
    draws = []
    for seed in (0, 1):
        cache = RetentionCache(model, scorers.get("random", seed=seed), policy)
        prefill(model, prompt(4000), cache)
        draws += [cache.kept_scores(layer)[0, head] for layer in (0, 1) for head in (0, 1)]
    for draw in draws:
        histogram = torch.histc(draw, 10, 0, 1)
        assert ((histogram - 400).abs() < 100).all()  # 5 standard deviations
    correlation = torch.corrcoef(torch.stack(draws))
    assert (correlation - torch.eye(8)).abs().max() < 0.1


def test_an_unknown_scorer_or_option_is_refused() -> None:
    with pytest.raises(ValueError, match='scorer "streamin" is unknown; did you mean streaming'):
        scorers.get("streamin")
    with pytest.raises(ValueError, match="scorer random: .*unexpected keyword argument 'window'"):
        scorers.get("random", window=3)


def test_the_oracle_keeps_what_the_true_answer_looks_at() -> None:
    from locret.labels import answer_labels

    model, ids = build("llama"), prompt(77)
    labels_LKN = answer_labels(model, ids, prompt(5, seed=3), "log_attention", True)
    policy = RetentionPolicy(budget=24, chunk_size=77, stabilizers=0, local_len=1)
    cache = RetentionCache(model, scorers.get("oracle", labels=labels_LKN), policy)
    prefill(model, ids, cache)
    for layer in range(3):
        best_KC = labels_LKN[layer, :, :76].topk(24, dim=-1).indices.sort(dim=-1).values
        assert torch.equal(cache.kept_positions(layer)[0, :, :24], best_KC)


def test_an_oracle_for_another_backbone_is_refused() -> None:
    with pytest.raises(ValueError, match=r"labels of shape \(4, 2, 60\) do not fit this backbone; give .* \(3, 2, n\)"):
        RetentionCache(build("llama"), scorers.get("oracle", labels=torch.rand(4, 2, 60)), POLICY)
