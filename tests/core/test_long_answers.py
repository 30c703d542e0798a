"""A long answer stays within its budget, whatever rates it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import build, prompt
from test_scorers import GREEDY, RATES_ANSWERS, make, policy_of

from locret import RetentionCache, generate, prefill, scorers
from locret.cache.layer import RetentionLayer

PROMPT, BUDGET, INTERVAL = 97, 36, 7


@pytest.mark.parametrize(
    ("name", "answer_tokens"), [("retaining_heads", 4096), *((name, 700) for name in RATES_ANSWERS)]
)
@pytest.mark.slow
def test_the_budget_holds_while_a_long_answer_is_written(
    monkeypatch: pytest.MonkeyPatch, name: str, answer_tokens: int
) -> None:
    model = build("llama", num_hidden_layers=1, max_position_embeddings=8192)
    fills, append = [], RetentionLayer.append

    def watched(layer: RetentionLayer, *args: Any) -> None:
        append(layer, *args)
        fills.append(layer.fill)

    policy = policy_of(name, decode_budget=BUDGET, decode_interval=INTERVAL)
    scorer = make(name, model)
    if name == "oracle":  # it knows as many tokens as it has labels for
        scorer = scorers.get(
            name, labels=torch.rand(1, 2, PROMPT + answer_tokens, generator=torch.Generator().manual_seed(0))
        )
    cache = RetentionCache(model, scorer, policy)
    logits = prefill(model, prompt(PROMPT), cache, new_tokens=answer_tokens)
    monkeypatch.setattr(RetentionLayer, "append", watched)
    answer = generate(model, None, cache=cache, max_new_tokens=answer_tokens, **GREEDY)
    assert logits.isfinite().all()
    assert answer.shape == (1, answer_tokens)
    assert (
        len(fills) == answer_tokens
    )  # the prompt's last token is read with the answer, the answer's last one is not read
    assert max(fills) == BUDGET
    # Once full it is emptied by the interval, again and again: never more, never less.
    assert min(fills[INTERVAL:]) == BUDGET - INTERVAL + 1
    assert cache.governed[0].capacity == BUDGET
    assert cache.memory().peak <= cache.memory().planned
    kept = cache.kept_positions(0)[0]
    assert (kept.diff(dim=-1) > 0).all()
    end = PROMPT + answer_tokens - 1
    assert (kept[:, -policy.local_len :] == torch.arange(end - policy.local_len, end)).all()
    assert not cache.kept_scores(0).isnan().any()
