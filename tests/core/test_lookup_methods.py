"""Lookups that are methods of their own, OmniKV, Quest and InfLLM, against the oracles of their papers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oracle as reference
import pytest
import torch
from families import build, prompt
from oracle.infllm import Memory, Numbers
from oracle.sparse_reading import Visible
from test_families import frequencies
from torch import Tensor

from locret import RetentionCache, RetentionPolicy, generate, load_cache, lookups, prefill, save_cache
from locret.lookups.infllm import InfLLM
from locret.lookups.omnikv import default_filters, dense_layers

GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None}
LAYERS = {"num_hidden_layers": 6, "layer_types": ["full_attention"] * 6}
INV_FREQ = 10000.0 ** -(torch.arange(0, 8, 2).float() / 8)


def method(spec: str, recall: int | None = None, **changes: Any) -> RetentionPolicy:
    """Return the policy of a lookup that is a method of its own."""
    own = lookups.get(spec).as_method()
    assert own is not None
    given = {} if recall is None else {"recall": recall}
    return RetentionPolicy(**{"chunk_size": 17, **own, "recall_by": spec, **given, **changes})


def fresh(model: Any, policy: RetentionPolicy) -> RetentionCache:
    """Return a cache that keeps the newest units in fast memory."""
    return RetentionCache(model, "streaming:sinks=0", policy)


def answered(model: Any, cache: RetentionCache, ids: Tensor | None, tokens: int = 5, **options: Any) -> Any:
    """Return the answer with its logits."""
    asked = {"max_new_tokens": tokens, "output_logits": True, "return_dict_in_generate": True}
    return generate(model, ids, cache=cache, **asked, **GREEDY, **options)


@torch.no_grad()
def differs_from_oracle(
    model: Any, ids: Tensor, policy: RetentionPolicy, passes: list[int], visible: Visible
) -> tuple[float, float]:
    """Return by how much logits of an answer differ from the oracle's, and from full attention's.

    The last token of the prompt is fed once more for its logits, so that it is read as an answer is.
    """
    out = answered(model, fresh(model, policy), ids)
    ours, text = torch.stack(out.logits)[:, 0], out.sequences[0, :-1]
    steps = [*passes, *[1] * len(ours)]
    theirs = reference.read_by_choice(model, text, steps, INV_FREQ, 1.0, visible)[-len(ours) :]
    full = model(text[None]).logits[0, -len(ours) :]
    return float((ours - theirs).abs().max()), float((ours - full).abs().max())


def test_filter_and_dense_layers_are_the_published_ones_scaled_for_other_depths() -> None:
    published = {32: (2, 8, 18), 48: (6, 11, 30), 80: (4, 19, 41)}
    scaled = {28: (2, 7, 16), 36: (2, 9, 20), 64: (4, 16, 36), 15: (3,), 8: (2,)}  # 2, 8 and 18 of 32; or 8 of 32 alone
    assert {layers: default_filters(layers) for layers in {**published, **scaled}} == {**published, **scaled}
    assert dense_layers((2, 8, 18), 32) == [0, 1, 2, 3, 8, 9, 18, 19]
    assert dense_layers((3, 11, 30), 48) == [0, 1, 2, 3, 4, 11, 12, 30, 31]  # Yi-9B, multi-step


@pytest.mark.parametrize("family", ["llama", "phi3"])
@pytest.mark.parametrize(
    ("options", "newest"),
    [
        ("", 1),
        (",selector=raw", 1),
        (",selector=exp,window=5", 5),
        (",selector=uniform,window=5", 5),
        (",prefill=1", 1),
    ],
)
def test_answers_of_omnikv_are_the_oracles(family: str, options: str, newest: int) -> None:
    tokens = 61 if family == "llama" else 20
    model, spec = build(family, **LAYERS), f"omnikv:filter_layers=0-3{options}"
    lookup: Any = lookups.get(spec)
    scaling, sparse = model.model.layers[0].self_attn.scaling, 17 if lookup.prefill else tokens
    rest = tokens - 1
    passes = [min(sparse, rest - start) for start in range(0, rest, sparse)]
    numbers = (lookup.selector, lookup.window, min(newest, rest), lookup.prefill)
    visible = reference.omnikv_visible((0, 3), 6, tokens, 12, scaling, *numbers)
    ours, full = differs_from_oracle(model, prompt(tokens), method(spec, 12), passes, visible)
    assert ours < 3e-5
    assert (full > 0.1) == (tokens > 14 + newest)


@pytest.mark.parametrize("options", ["", ",selector=exp,window=5", ",tokens=0.25"])
def test_rows_turns_and_files_do_not_matter(options: str, tmp_path: Path) -> None:
    model, ids = build("llama", **LAYERS), prompt(61, batch=2)
    policy = method(f"omnikv:filter_layers=0-3{options}", 9)
    mask = torch.ones_like(ids)
    mask[1, :20] = 0
    both = answered(model, fresh(model, policy), ids, attention_mask=mask).logits
    first, second = (answered(model, fresh(model, policy), row).logits for row in (ids[:1], ids[1:, 20:]))
    turns = fresh(model, policy)
    prefill(model, ids[:1, :40], turns)  # a second text is read densely too, the first one's units included
    prefill(model, ids[:1, 40:], turns)
    later = answered(model, turns.copy(), None).logits
    save_cache(turns, tmp_path / "text.ctx")
    loaded = answered(model, load_cache(tmp_path / "text.ctx", model, "streaming:sinks=0"), None).logits
    for pair, one, other, third, fourth in zip(both, first, second, later, loaded, strict=True):
        torch.testing.assert_close(pair, torch.cat([one, other]), atol=1e-4, rtol=0)
        torch.testing.assert_close(third, one, atol=1e-4, rtol=0)
        torch.testing.assert_close(fourth, third, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["llama", "phi3"])
@pytest.mark.parametrize("options", ["page=3,dense=1", "page=4,dense=2,last_page=true", "page=1,dense=0"])
def test_answers_of_quest_are_the_oracles(family: str, options: str) -> None:
    tokens = 61 if family == "llama" else 20
    model, spec = build(family, **LAYERS), f"quest:{options}"
    lookup = lookups.get(spec)
    assert isinstance(lookup, lookups.QuestLookup)
    assert [lookup.resident(layer, 6) for layer in range(6)] == [True] * lookup.dense + [False] * (6 - lookup.dense)
    numbers = (12, lookup.page, lookup.dense, 2, lookup.last_page)
    visible = reference.quest_visible(tokens, *numbers)
    ours, full = differs_from_oracle(model, prompt(tokens), method(spec, 12), [tokens - 1], visible)
    assert ours < 3e-5
    assert (full > 0.1) == (tokens > 15)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("codes:bits=2", 'lookup "codes" was retired; release 0.1.0'),
        ("omnikv:filter_layers=8-2", "filter_layers=8-2 are not layers in ascending order; write 2-8-18"),
        ("omnikv:tokens=0", "tokens=0 is neither a number of units nor a share"),
        ("omnikv:window=4", "window=4 is what uniform and exp look from"),
        ("omnikv:filter_layers=2-9", "filter_layers=2-9 names layers that a backbone of 3 does not have"),
        ("omnikv:filter_layers=1", "filter_layers=1 leave no sparse layer of 3"),
        ("omnikv:tokens=100", "tokens=100, but recall=8; leave tokens out, or recall as many"),
        ("quest:dense=3", "dense=3 leaves no layer of 3"),
        ("infllm:local=0", "lookup infllm: local=0 is too small; it must be 1 or more"),
        ("infllm:topk=9,cached=8", "topk=9 is above cached=8, but more blocks would be seen than may lie"),
        ("infllm:repr_topk=9,block=8", "repr_topk=9 is above block=8, but a block has no more tokens"),
    ],
)
def test_a_lookup_that_makes_no_sense_or_does_not_fit_is_refused_before_anything_is_read(spec: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        RetentionCache(build("llama"), "random", RetentionPolicy(budget=8, host_budget=64, recall=8, recall_by=spec))


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
    with pytest.raises(ValueError, match="holds 552 units on the device .* but budget=400; raise budget to 552"):
        InfLLM(block=32, local=256, topk=4).completed(400)


@pytest.mark.parametrize("length", [1, 3, 15, 18, 19, 44])
@torch.no_grad()
def test_reading_equals_the_oracle(length: int) -> None:
    """Shorter than the first tokens, as long as these and the window, a block less or more, many execution blocks."""
    model, ids, policy = build("llama"), prompt(length), policy_of(SMALL, chunk_size=9)
    cache = RetentionCache(model, "streaming", policy)
    logits, memories = slowly(model, "llama", ids[0], policy)
    torch.testing.assert_close(prefill(model, ids, cache)[0], logits[-1], atol=1e-4, rtol=0)
    assert cache.memory().host_units == 4 * (max(length - 1 - 15, 0) // 4)
    for layer, memory in zip(cache.governed, memories, strict=True):
        # The oracle forms blocks when a pass ends, the cache when the next one begins.
        formed = memory.blocks[: layer.blocks.counts[0]]
        assert len(memory.blocks) == policy.blocks().formed(length) == max(length - 15, 0) // 4
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
