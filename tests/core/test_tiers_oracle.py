"""Both tiers against the slow oracle: what the second one holds, and what answers that recall from it say."""

from __future__ import annotations

from typing import Any

import oracle as reference
import pytest
import torch
from families import build, prompt
from test_families import frequencies

from locret import RetainingHeads, RetentionCache, RetentionPolicy, generate, prefill

GREEDY = {"do_sample": False, "eos_token_id": None, "output_logits": True, "return_dict_in_generate": True}


@pytest.mark.parametrize(
    ("family", "tokens", "host_budget", "recall", "changes"),
    [
        ("llama", 71, 13, 3, {}),
        ("llama-mqa", 71, "all", 5, {"positions": "original"}),
        ("qwen3", 67, 13, 13, {"host_by": "recency"}),
        ("phi3-partial", 71, "all", 1, {}),
        ("phi3-longrope", 88, 30, 4, {}),
        ("llama-3.1-rope", 71, 13, 3, {"host_by": "recency", "positions": "original"}),
        ("llama", 26, 13, 3, {}),
        ("llama", 25, 13, 3, {}),
        ("llama", 5, 13, 3, {}),
        ("llama", 29, 13, 3, {"local_len": 28}),
    ],
)
@torch.no_grad()
def test_tiers_equal_the_slow_oracle(
    family: str, tokens: int, host_budget: int | str, recall: int, changes: dict[str, Any]
) -> None:
    numbers = {"budget": 20, "chunk_size": 9, "stabilizers": 6, "local_len": 5, **changes}
    policy = RetentionPolicy(**numbers, host_budget=host_budget, recall=recall)
    compare(family, policy, [prompt(tokens)])


@pytest.mark.parametrize("positions", ["compact", "original"])
@pytest.mark.parametrize("host_budget", ["all", 17])
@torch.no_grad()
def test_a_second_text_after_an_answer_equals_the_slow_oracle(positions: str, host_budget: int | str) -> None:
    numbers = {"budget": 20, "chunk_size": 9, "stabilizers": 6, "local_len": 5, "positions": positions}
    policy = RetentionPolicy(**numbers, host_budget=host_budget, recall=3)
    compare("llama", policy, [prompt(53), prompt(31, seed=5), prompt(4, seed=2)])


def compare(family: str, policy: RetentionPolicy, texts: list[torch.Tensor]) -> None:
    """Read texts and answer after each, and compare the last answer's logits, and what the second tier holds."""
    model = build(family)
    heads = RetainingHeads.for_model(model, hidden_dim=12, seed=1)
    cache, read = RetentionCache(model, heads, policy), []
    for ids in texts:
        first = prefill(model, ids, cache)
        ours: Any = generate(model, cache=cache, max_new_tokens=7, **GREEDY)
        read.append((ids[0], ours.sequences[0, -7:-1]))
    inv_freq, magnitude = frequencies(family)
    held, logits = reference.answer_with_recall(
        model,
        heads,
        read,
        inv_freq,
        magnitude,
        (policy.budget, policy.chunk_size, policy.stabilizers, policy.local_len),
        (policy.host_budget if isinstance(policy.host_budget, int) else None, policy.recall),
        original_positions=policy.positions == "original",
        by_recency=policy.host_by == "recency",
    )
    for layer, positions in zip(cache.governed, held, strict=True):
        assert layer.host is not None
        assert layer.host.fill == len(positions[0])
        assert not layer.host.fill or layer.host.store.held("positions")[0].tolist() == positions
    torch.testing.assert_close(first[0], logits[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.cat(ours.logits), logits, atol=1e-4, rtol=0)
