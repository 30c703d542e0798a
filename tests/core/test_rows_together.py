"""Rows of different length are read in one batch as long as their chunks are alike, with each row's own results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from families import build, prompt
from ragged_runs import padded
from torch import Tensor, nn

from locret import RetainingHeads, RetentionCache, RetentionPolicy, generate, prefill
from locret.backbone.adapters import find_decoder

LENGTHS = (90, 61, 4, 90, 75)
POLICIES: dict[str, dict[str, Any]] = {
    "fixed": {},
    "original positions": {"positions": "original"},
    "at the end": {"when": "prompt_end"},
    "growing": {"memory": "linear"},
    "a pyramid": {"layer_budgets": "pyramid"},
    "two tiers": {"host_budget": 30, "recall": 4},
    "rounded": {"key_bits": 4, "value_bits": 4},
    "ragged heads": {"head_budgets": "adaptive"},
    "shared by layers": {"memory": "adaptive"},
}


def policy(**changes: Any) -> RetentionPolicy:
    return RetentionPolicy(**{"budget": 24, "chunk_size": 10, "stabilizers": 5, "local_len": 6, **changes})


@contextmanager
def passes(model: nn.Module) -> Iterator[list[tuple[int, ...]]]:
    """Collect the shape of the token ids of every forward pass."""
    shapes: list[tuple[int, ...]] = []

    def note(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        shapes.append(tuple(kwargs["input_ids"].shape))

    hook = find_decoder(model).register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield shapes
    finally:
        hook.remove()


def rows() -> list[Tensor]:
    return [prompt(length, seed=seed) for seed, length in enumerate(LENGTHS)]


def test_rows_that_end_in_the_same_chunk_are_read() -> None:
    model = build("llama")
    ids, mask = padded([prompt(34, seed=1), prompt(36, seed=2), prompt(31, seed=3)])
    logits = prefill(model, ids, RetentionCache(model, "key_norm", policy()), attention_mask=mask)
    for index, row in enumerate(ids):
        alone = prefill(model, row[None, mask[index].bool()], RetentionCache(model, "key_norm", policy()))
        torch.testing.assert_close(logits[index], alone[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_rows_hold_and_answer_what_each_does_alone(family: str, name: str) -> None:
    model, rules = build(family), policy(**POLICIES[name])
    heads = RetainingHeads.for_model(model, hidden_dim=8, seed=0)
    ids, mask = padded(rows())
    cache = RetentionCache(model, heads, rules)
    logits = prefill(model, ids, cache, attention_mask=mask)
    for index, row in enumerate(rows()):
        alone = RetentionCache(model, heads, rules)
        torch.testing.assert_close(logits[index], prefill(model, row, alone)[0], atol=1e-4, rtol=0)
        for layer in cache.backbone.layers:
            for kept, own in zip(cache.kept_positions(layer)[index], alone.kept_positions(layer)[0], strict=True):
                assert torch.equal(kept[kept >= 0], own[own >= 0])


def test_chunks_that_are_alike_are_one_pass() -> None:
    model = build("llama")
    ids, mask = padded(rows())
    with passes(model) as shapes:
        prefill(model, ids, RetentionCache(model, "key_norm", policy()), attention_mask=mask)
    # 4 tokens are local only; 61 are cut into 5 chunks of 10, one of 5 and 6 local; 75 and 90 into 6 and 8 chunks.
    apart = [(1, 4), (1, 5), (1, 6), (1, 9), (1, 6), (2, 4), (2, 6)]
    assert sorted(shapes) == sorted([(4, 10)] * 5 + [(3, 10)] + [(2, 10)] * 2 + apart)


def test_generate_reads_the_first_text_of_a_padded_batch_in_as_few_passes() -> None:
    model = build("llama")
    ids, mask = padded(rows())
    with passes(model) as shapes:
        cache = RetentionCache(model, "key_norm", policy())
        generate(model, ids, attention_mask=mask, cache=cache, max_new_tokens=1, do_sample=False)
    assert shapes.count((4, 10)) == 5


def test_rows_of_one_length_stay_together_to_their_end() -> None:
    model = build("llama")
    same = [prompt(40, seed=1), prompt(40, seed=2), prompt(57, seed=3)]
    ids, mask = padded(same)
    with passes(model) as shapes:
        cache = RetentionCache(model, "key_norm", policy())
        prefill(model, ids, cache, attention_mask=mask)
    assert sorted(shapes) == sorted([(3, 10)] * 3 + [(2, 4), (2, 6)] + [(1, 10)] * 2 + [(1, 1), (1, 6)])


def test_a_second_text_is_read_together_too_where_all_rows_hold_as_much() -> None:
    model = build("llama")
    first, (ids, mask) = prompt(50, batch=len(LENGTHS), seed=9), padded(rows())
    cache = RetentionCache(model, "key_norm", policy())
    prefill(model, first, cache)
    with passes(model) as shapes:
        logits = prefill(model, ids, cache, attention_mask=mask)
    assert (4, 10) in shapes
    for index, row in enumerate(rows()):
        alone = RetentionCache(model, "key_norm", policy())
        prefill(model, first[index : index + 1], alone)
        torch.testing.assert_close(logits[index], prefill(model, row, alone)[0], atol=1e-4, rtol=0)


def test_a_read_that_breaks_off_leaves_the_cache_as_it_was() -> None:
    model = build("llama")
    first, (ids, mask) = prompt(50, batch=len(LENGTHS), seed=9), padded(rows())
    cache = RetentionCache(model, "key_norm", policy())
    prefill(model, first, cache)
    before = [tensor.clone() for tensor in cache.state()[0].values()]
    calls = []

    def stop(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 7:
            raise KeyboardInterrupt

    hook = find_decoder(model).register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        prefill(model, ids, cache, attention_mask=mask)
    hook.remove()
    assert cache.seen == 50
    assert all(torch.equal(*pair) for pair in zip(before, cache.state()[0].values(), strict=True))
    prefill(model, ids, cache, attention_mask=mask)
