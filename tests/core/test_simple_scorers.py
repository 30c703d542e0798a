"""Streaming, random and oracle keep what they say."""

from __future__ import annotations

import pytest
import torch
from families import build, prompt

from locret import RetentionCache, RetentionPolicy, prefill, scorers


@pytest.mark.slow
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


def test_the_oracle_keeps_what_the_true_answer_looks_at() -> None:
    from locret.labels.labels import answer_labels

    model, ids = build("llama"), prompt(77)
    labels_LKN = answer_labels(model, ids, prompt(5, seed=3), "log_attention", True)
    policy = RetentionPolicy(budget=24, chunk_size=77, stabilizers=0, local_len=1)
    cache = RetentionCache(model, scorers.get("oracle", labels=labels_LKN), policy)
    prefill(model, ids, cache)
    for layer in range(3):
        best_KC = labels_LKN[layer, :, :76].topk(24, dim=-1).indices.sort(dim=-1).values
        assert torch.equal(cache.kept_positions(layer)[0, :, :24], best_KC)
