"""Every family: with nothing evicted full attention, with eviction the slow oracle's choices and logits."""

from __future__ import annotations

import math

import oracle as reference
import pytest
import torch
from families import LLAMA3, LONGROPE, build, prompt

from locret import RetainingHeads, RetentionCache, RetentionPolicy, prefill, scorers


def frequencies(family: str) -> tuple[torch.Tensor, float]:
    """Compute the family's rotary frequencies and magnitude by hand, from the published formulas."""
    plain = 10000.0 ** -(torch.arange(0, 8, 2).float() / 8)
    if family == "phi3-longrope":
        magnitude = math.sqrt(1 + math.log(512 / 64) / math.log(64))
        return plain / torch.tensor(LONGROPE["long_factor"]), magnitude
    if family == "llama-3.1-rope":
        scaled = []
        for frequency in plain.tolist():
            wavelength, original = 2 * math.pi / frequency, LLAMA3["original_max_position_embeddings"]
            smooth = min(max((original / wavelength - 1.0) / (4.0 - 1.0), 0.0), 1.0)
            scaled.append(smooth * frequency + (1 - smooth) * frequency / 8.0)
        return torch.tensor(scaled), 1.0
    if family == "phi3-partial":
        return 10000.0 ** -(torch.arange(0, 4, 2).float() / 4), 1.0
    return plain, 1.0


@pytest.mark.parametrize("positions", ["compact", "original"])
@pytest.mark.parametrize(
    "family",
    ["llama", "llama-mqa", "llama-3.1-rope", "mistral", "qwen2", "qwen3", "phi3", "phi3-partial", "phi3-longrope"],
)
@torch.no_grad()
def test_eviction_equals_the_slow_oracle(family: str, positions: str) -> None:
    model, ids = build(family), prompt(71)
    heads = RetainingHeads.for_model(model, hidden_dim=12, seed=1)
    inv_freq, magnitude = frequencies(family)
    history, logits = reference.read_prompt(
        model, heads, ids[0], inv_freq, magnitude, (20, 9, 6, 5), positions == "original"
    )
    policy = RetentionPolicy(budget=20, chunk_size=9, stabilizers=6, local_len=5, positions=positions)
    kept: list[list[list[list[int]]]] = []

    def record(cache: RetentionCache) -> None:
        kept.append([cache.kept_positions(layer)[0].tolist() for layer in range(3)])

    ours = prefill(model, ids, RetentionCache(model, heads, policy), on_chunk=record)
    assert kept == history
    torch.testing.assert_close(ours[0], logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_sliding_layers_keep_true_positions_while_the_others_are_compacted(family: str) -> None:
    """Where nothing of the middle is worth keeping, both position modes see the same distances and must agree."""
    model, ids = build(family), prompt(120)
    logits = {}
    for positions in ("compact", "original"):
        # The newest 40 units stay, contiguous, so their distances are the same in both modes.
        policy = RetentionPolicy(budget=40, chunk_size=10, stabilizers=39, local_len=1, positions=positions)
        cache = RetentionCache(model, scorers.get("streaming", sinks=0), policy)
        logits[positions] = prefill(model, ids, cache)
        assert cache.kept_positions(1)[0, 0].tolist() == list(range(79, 120))
    torch.testing.assert_close(logits["compact"], logits["original"], atol=1e-4, rtol=0)


def test_longrope_uses_long_factors_below_the_original_length_and_is_put_back_afterwards() -> None:
    model, ids = build("phi3-longrope"), prompt(40)
    with torch.no_grad():
        before = model(ids).logits
        policy = RetentionPolicy(budget=50, chunk_size=10, stabilizers=0, local_len=1)
        inside = prefill(model, ids, RetentionCache(model, "random", policy))
        after = model(ids).logits
    assert torch.equal(before, after)
    assert (inside - before[:, -1]).abs().max() > 1e-2
