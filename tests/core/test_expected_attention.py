"""Expected attention equals its slow version, on every forward pass of real reads, whatever rotates the keys."""

from __future__ import annotations

from typing import Any

import oracle as reference
import pytest
import torch
from families import build
from scorer_passes import read_and_answer, watch
from torch import Tensor

from locret import scorers
from locret.backbone.adapters import describe
from locret.backbone.chunk import Chunk

ROTARIES = ["llama", "llama-mha", "llama-yarn", "phi3", "phi3-partial", "phi3-longrope", "qwen3", "gemma3"]


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
        covariance=scorer.covariance,
        value_norm=scorer.value_norm,
        epsilon=scorer.epsilon,
    )


@pytest.mark.parametrize(
    ("family", "positions", "when"),
    [
        *((family, "original", "chunk") for family in ROTARIES),
        ("llama", "original", "prompt_end"),
        ("llama", "compact", "chunk"),
        ("phi3-longrope", "compact", "chunk"),
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
