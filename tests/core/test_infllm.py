"""InfLLM: the slow oracle, the tier of blocks, and the fast path, which agrees with the oracle to float rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oracle as reference
import pytest
import torch
from families import build, prompt
from oracle.infllm import Memory, Numbers
from test_families import frequencies

from locret import RetentionCache, RetentionPolicy, generate, prefill, save_cache
from locret.lookups.infllm import InfLLM

SMALL = "local=12,block=4,init=3,topk=2,cached=3,repr_topk=2"


def policy_of(options: str, **numbers: int) -> RetentionPolicy:
    return RetentionPolicy(recall_by=f"infllm:{options}", **numbers)


def oracle(policy: RetentionPolicy) -> Numbers:
    made = policy.blocks()
    local, block, init, topk, _, repr_topk = made.numbers
    return Numbers(block, init, local, topk, repr_topk)


def slowly(
    model: Any, family: str, ids_T: torch.Tensor, policy: RetentionPolicy
) -> tuple[list[torch.Tensor], list[Memory]]:
    """Read a prompt as `prefill` does, the last token on its own."""
    passes = [*(ids_T[:-1].split(policy.chunk_size) if len(ids_T) > 1 else []), ids_T[-1:]]
    return reference.infllm(model, passes, *frequencies(family), oracle(policy))


def test_one_number_is_enough() -> None:
    llama = InfLLM(local=4096, block=128, init=128, topk=16, cached=32, repr_topk=4).completed(10**6)
    assert InfLLM(local=4096).completed(10**6) == llama
    assert InfLLM().completed(10**6) == llama
    small = InfLLM(local=256).completed(10**6)
    assert small.numbers == (256, 8, 8, 16, 32, 4)
    for budget in (30, 64, 100, 256, 1024, 6000):
        made = InfLLM().completed(budget)
        assert made.units <= budget
        assert InfLLM(local=made.local + 1).completed(10**6).units > budget or made.local == 4096


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"local": 0}, "local=0 is too small; it must be 1 or more"),
        ({"topk": 9, "cached": 8}, "topk=9 is above cached=8, but more blocks would be seen than may lie"),
        ({"repr_topk": 9, "block": 8}, "repr_topk=9 is above block=8, but a block has no more tokens"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match="lookup infllm: ") as error:
        InfLLM(**options)  # type: ignore[arg-type]
    assert message in str(error.value)
    with pytest.raises(ValueError, match="holds 552 units on the device .* but budget=400; raise budget to 552"):
        InfLLM(block=32, local=256, topk=4).completed(400)


@pytest.mark.parametrize("length", [1, 3, 15, 16, 20, 44])
@torch.no_grad()
def test_reading_equals_the_oracle(length: int) -> None:
    """Shorter than the first tokens, as long as these and the window, a block more or less, many execution blocks."""
    model, ids, policy = build("llama"), prompt(length), policy_of(SMALL, chunk_size=9)
    cache = RetentionCache(model, "streaming", policy)
    logits, memories = slowly(model, "llama", ids[0], policy)
    torch.testing.assert_close(prefill(model, ids, cache)[0], logits[-1], atol=1e-4, rtol=0)
    assert cache.memory().host_units == 4 * (max(length - 1 - 15, 0) // 4)
    for layer, memory in zip(cache.governed, memories, strict=True):
        # The oracle forms blocks when a pass ends, the cache when the next one begins.
        formed = memory.blocks[: layer.blocks.counts[0]]
        assert len(memory.blocks) == max(length - 15, 0) // 4
        keys = [unit.key_KD for block in formed for unit in block.units]
        if keys:
            held = layer.blocks.tensors["keys"][0].flatten(1, 2)[:, : layer.blocks.fill]
            torch.testing.assert_close(held, torch.stack(keys, dim=1), atol=1e-5, rtol=0)


@torch.no_grad()
def test_rows_of_different_lengths_equal_runs_of_their_own() -> None:
    model, ids = build("llama"), prompt(59, batch=4)
    policy, lengths = policy_of(SMALL, chunk_size=9), (59, 33, 10, 2)
    answer: dict[str, Any] = {"max_new_tokens": 14, "do_sample": False, "eos_token_id": None}
    mask = torch.stack([(torch.arange(59) >= 59 - length).long() for length in lengths])
    cache = RetentionCache(model, "streaming", policy)
    ours = generate(model, ids, cache=cache, attention_mask=mask, **answer)
    for row, length in enumerate(lengths):
        alone = RetentionCache(model, "streaming", policy)
        expected = generate(model, ids[row : row + 1, 59 - length :], cache=alone, **answer)
        assert torch.equal(ours[row, 59:], expected[0, length:])
        assert cache.governed[0].blocks.counts[row] == alone.governed[0].blocks.counts[0]


def test_what_contradicts_the_method_is_refused() -> None:
    for rule in ({"recall": 8}, {"positions": "original"}, {"decode_budget": 900}):
        (name,) = rule
        with pytest.raises(ValueError, match=f"has a rule of its own for {name}, so .* leave {name} out"):
            RetentionPolicy(recall_by="infllm:local=64", **{"host_budget": "all", **rule})  # type: ignore[arg-type]


def test_what_cannot_go_on_from_blocks_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    model = build("llama")
    cache = RetentionCache(model, "streaming", policy_of(SMALL, chunk_size=9))
    prefill(model, prompt(40), cache)
    with pytest.raises(ValueError, match="a file has no place for the blocks that recall_by=infllm"):
        save_cache(cache, tmp_path / "read.safetensors")
    assert not list(tmp_path.iterdir())
    assert generate(model, cache=cache, max_new_tokens=4, eos_token_id=None).shape == (1, 4)
