"""Two tiers, where no random run goes: all of an answer recalled, beams, and bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import prompt

from locret import RetentionCache, RetentionPolicy, generate, load_cache, prefill, save_cache

GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None}
NUMBERS = {"budget": 16, "chunk_size": 12, "stabilizers": 4, "local_len": 5, "host_budget": 19, "recall": 4}
EVERYTHING = {"when": "prompt_end", "host_budget": "all", "recall": 500}
UNIT = 2 * 8 * 4 + 8
"""Bytes of key, value, score and position."""
both_positions = pytest.mark.parametrize("positions", ["compact", "original"])


def new_cache(model: Any, **changes: Any) -> RetentionCache:
    return RetentionCache(model, "key_norm", RetentionPolicy(**{**NUMBERS, **changes}))


def read(model: Any, tokens: int = 71, **changes: Any) -> RetentionCache:
    cache = new_cache(model, **changes)
    prefill(model, prompt(tokens), cache)
    return cache


def answer(model: Any, cache: RetentionCache, ids: torch.Tensor | None = None, new: int = 9) -> torch.Tensor:
    options = {"output_logits": True, "return_dict_in_generate": True, **GREEDY}
    return torch.stack(generate(model, ids, cache=cache, max_new_tokens=new, **options).logits, dim=1)


@both_positions
@pytest.mark.parametrize("tokens", [47, 1])
def test_an_answer_that_evicts_loses_nothing_where_everything_is_recalled(
    model: Any, positions: str, tokens: int
) -> None:
    ids, changes = prompt(tokens), {"positions": positions, "decode_budget": 22, "decode_interval": 5, **EVERYTHING}
    cache = new_cache(model, **changes)
    theirs: Any = model.generate(ids, max_new_tokens=40, output_logits=True, return_dict_in_generate=True, **GREEDY)
    torch.testing.assert_close(answer(model, cache, ids, 40), torch.stack(theirs.logits, 1), atol=2e-4, rtol=0)
    assert cache.memory().units <= 22
    assert cache.memory().host_units >= tokens + 39 - 22


@pytest.mark.parametrize("tokens", [30, 71, 130, 300])
def test_a_tier_is_as_large_as_the_text_although_its_length_is_unknown(model: Any, tokens: int) -> None:
    known, streamed = read(model, tokens, host_budget=100), new_cache(model, host_budget=100)
    prefill(model, iter(prompt(tokens)[0].tolist()), streamed)
    assert streamed.memory().host_units == known.memory().host_units
    assert streamed.memory().host == known.memory().host <= 3 * 2 * min(100, tokens) * UNIT


def test_bytes_of_a_tier_and_of_what_is_recalled_are_what_one_counts_by_hand(model: Any) -> None:
    cache = read(model)
    memory = cache.memory()
    assert memory.host == 3 * 2 * 19 * UNIT
    answer(model, cache, new=5)
    # The last token of the prompt is fed again for its logits, and the fifth new one is never fed.
    assert cache.memory().moved - memory.moved == 5 * 3 * 2 * 4 * 8 * 8


def test_a_tier_that_an_answer_filled_is_no_larger_than_it_may_be_and_is_saved_in_order(
    model: Any, tmp_path: Path
) -> None:
    cache = read(model, 20, decode_budget=22, decode_interval=1)
    answer(model, cache, new=40)
    memory = cache.memory()
    assert memory.host == memory.host_planned == 3 * 2 * 19 * UNIT
    save_cache(cache, tmp_path / "a.ctx")
    again = load_cache(tmp_path / "a.ctx", model, "key_norm")
    prefill(model, prompt(9), cache), prefill(model, prompt(9), again)
    assert torch.equal(answer(model, again), answer(model, cache))
