"""InfLLM: the slow oracle, the tier of blocks, and the fast path, which agrees with the oracle to float rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oracle as reference
import pytest
import torch
from families import build, prompt
from oracle.infllm import Block, Memory, Numbers, Unit, choose, move_old, representative
from test_families import frequencies

from locret import RetentionCache, RetentionPolicy, generate, prefill, save_cache, scorers
from locret.backbone.adapters import find_decoder
from locret.backbone.rotary import long_factors
from locret.base.method_spec import parse
from locret.cache.blocks import Blocks, representatives
from locret.cache.limits import planned_bytes, planned_host_bytes
from locret.infer import methods
from locret.lookups.infllm import PRESETS, InfLLM

SMALL = "local=12,block=4,init=3,topk=2,cached=3,repr_topk=2"
EVERYTHING = "local=12,block=4,init=3,topk=100,cached=100,repr_topk=2,far=original"


def policy_of(options: str, **numbers: int) -> RetentionPolicy:
    return RetentionPolicy(recall_by=f"infllm:{options}", **numbers)


def oracle(policy: RetentionPolicy) -> Numbers:
    made = policy.blocks()
    local, block, init, topk, _, repr_topk = made.numbers
    return Numbers(block, init, local, topk, repr_topk, made.per_head, made.far == "original")


def slowly(
    model: Any, family: str, ids_T: torch.Tensor, policy: RetentionPolicy
) -> tuple[list[torch.Tensor], list[Memory]]:
    """Read a prompt as `prefill` does, the last token on its own."""
    passes = [*(ids_T[:-1].split(policy.chunk_size) if len(ids_T) > 1 else []), ids_T[-1:]]
    return reference.infllm(model, passes, *frequencies(family), oracle(policy))


# -- the oracle -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "phi3-longrope"])
@torch.no_grad()
def test_the_oracle_with_everything_recalled_at_true_distances_is_full_attention(family: str) -> None:
    model, ids = build(family), prompt(61)
    every = Numbers(block=4, init=3, local=10, topk=100, repr_topk=2, true_distance=True)
    logits, memories = reference.infllm(model, list(ids[0].split(7)), *frequencies(family), every)
    with long_factors(find_decoder(model)):
        torch.testing.assert_close(logits[-1], model(ids).logits[0, -1], atol=1e-4, rtol=0)
    assert len(memories[0].blocks) == (61 - 3 - 10) // 4


@torch.no_grad()
def test_the_oracle_with_a_window_of_the_texts_length_is_full_attention() -> None:
    model, ids = build("llama"), prompt(40)
    logits, memories = reference.infllm(
        model, list(ids[0].split(9)), *frequencies("llama"), Numbers(block=4, init=3, local=40, topk=1, repr_topk=2)
    )
    torch.testing.assert_close(logits[-1], model(ids).logits[0, -1], atol=1e-4, rtol=0)
    assert not memories[0].blocks


@pytest.mark.parametrize("tokens", [2, 3, 13, 16, 17, 40])
def test_every_token_is_in_one_place_in_the_order_of_the_text(tokens: int) -> None:
    memory, numbers = Memory(), Numbers(block=4, init=3, local=10, topk=2, repr_topk=1)
    for position in range(tokens):
        memory.recent.append(Unit(position, torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1)))
        move_old(memory, numbers)
    places = [unit.position for unit in memory.first]
    places += [unit.position for block in memory.blocks for unit in block.units]
    assert places + [unit.position for unit in memory.recent] == list(range(tokens))
    assert len(memory.first) == min(max(tokens - 10, 0), 3)
    assert len(memory.blocks) == max(tokens - 13, 0) // 4


# -- the numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_the_published_settings(preset: str) -> None:
    made = InfLLM(preset=preset).completed(10**6)
    assert {name: getattr(made, name) for name in PRESETS[preset]} == PRESETS[preset]
    assert InfLLM(preset=preset, local=64, topk=1).completed(10**6).local == 64


def test_one_number_is_enough() -> None:
    llama = InfLLM(preset="llama-3").completed(10**6)
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
        ({"decay": 1.5}, "decay=1.5 is not a share; it must lie between 0 and 1"),
        ({"far": "near"}, 'far="near" is unknown; choose one of fixed, original'),
        ({"preset": "llama3"}, 'preset="llama3" is unknown; did you mean llama-3?'),
        ({"block": "x"}, "block='x' is not a whole number"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match="lookup infllm: ") as error:
        InfLLM(**options)  # type: ignore[arg-type]
    assert message in str(error.value)


def test_numbers_beyond_the_budget_are_refused() -> None:
    with pytest.raises(ValueError, match="holds 552 units on the device .* but budget=400; raise budget to 552"):
        InfLLM(block=32, local=256, topk=4).completed(400)
    with pytest.raises(ValueError, match="holds 21 units on the device .* but budget=20; raise budget"):
        InfLLM().completed(20)


# -- the tier ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("decay", "brought"), [(None, [2, 1, 1, 1]), (0.5, [2, 1, 1, 1])])
def test_a_block_is_brought_once_and_the_one_not_used_for_longest_or_with_the_least_attention_leaves(
    decay: float | None, brought: list[int]
) -> None:
    tier, keys = Blocks(numbers(topk=2, cached=2, decay=decay)), torch.randn(2, 4 * 5, 6)
    tier.begin(keys[None], keys[None], heads=2)
    tier.add(0, keys, keys, torch.rand(2, 1, 4 * 5))
    each, found = 2 * 2 * 5 * 6 * 4, []  # keys and values of two heads
    for blocks, attention in (([0, 1], [4.0, 1.5]), ([1, 2], [1.0, 0.5]), ([1, 3], [9.0, 9.0]), ([1, 2], [0.0, 0.0])):
        before, tier._chosen = tier.moved, torch.tensor([[blocks]])
        tier._bring(0, 0, torch.tensor(blocks))
        tier.note(torch.tensor(attention).repeat_interleave(5).div(10).expand(1, 2, -1))
        tier._clock += 1
        found.append((tier.moved - before) // each)
        where = tier.tensors["slots"][0, 0]
        assert torch.equal(tier.tensors["near_keys"][0, :, where[blocks]], tier.tensors["keys"][0, :, blocks])
    assert found == brought


def numbers(**options: Any) -> InfLLM:
    return InfLLM(local=10, block=5, init=0, repr_topk=2, **options).completed(10**6)


def test_representatives_and_lookup_equal_the_slow_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    keys, attention = torch.randn(2, 4 * 5, 6, generator=generator), torch.rand(2, 3, 4 * 5, generator=generator)
    units = [Unit(i, keys[:, i], keys[:, i], attention[..., i].flatten()) for i in range(20)]
    slow = [reference_block(units[5 * nth : 5 * nth + 5]) for nth in range(4)]
    fast = representatives(keys.unflatten(1, (4, 5)), attention.unflatten(2, (4, 5)), 2)
    torch.testing.assert_close(fast, torch.stack([block.vector_ND for block in slow]))
    query = torch.randn(1, 6, 7, 6, generator=generator)
    for per_head, choosers in ((False, [range(6)]), (True, [range(3), range(3, 6)])):
        tier = Blocks(numbers(topk=2, cached=3, per_head=per_head))
        tier.begin(keys[None], keys[None], heads=6)
        tier.add(0, keys, keys, attention)
        expected = [choose(query[0].transpose(0, 1), slow, 2, heads) for heads in choosers]
        found, _, chosen = tier.recall(query)
        assert chosen.tolist() == [expected]
        for head in range(2):
            blocks = expected[head if per_head else 0]
            assert torch.equal(found[0, head], torch.cat([keys[head, 5 * nth : 5 * nth + 5] for nth in blocks]))


def reference_block(units: list[Unit]) -> Block:
    return Block(units, representative(units, 2))


# -- the fast path ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 3, 15, 16, 20, 44])
@pytest.mark.parametrize("options", ["", ",per_head=true", ",far=original", ",decay=0.5"])
@torch.no_grad()
def test_reading_equals_the_oracle(options: str, length: int) -> None:
    """Shorter than the first tokens, as long as these and the window, a block more or less, many execution blocks."""
    model, ids, policy = build("llama"), prompt(length), policy_of(SMALL + options, chunk_size=9)
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


@pytest.mark.parametrize(
    "family", ["phi3-longrope", "llama-3.1-rope", "llama-mqa", "llama-mha", "mistral", "qwen2", "qwen3", "phi3-partial"]
)
@torch.no_grad()
def test_scaled_and_grouped_backbones_equal_the_oracle(family: str) -> None:
    model, ids = build(family), prompt(40)
    policy = policy_of(SMALL, chunk_size=11)
    logits, _ = slowly(model, family, ids[0], policy)
    ours = prefill(model, ids, RetentionCache(model, "streaming", policy))
    torch.testing.assert_close(ours[0], logits[-1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("chunk_size", [5, 64])
def test_everything_recalled_at_its_own_distance_is_full_attention(family: str, chunk_size: int) -> None:
    model, ids = build(family), prompt(90)
    expected = model.generate(ids, max_new_tokens=9, do_sample=False, eos_token_id=None)
    cache = RetentionCache(model, "streaming", policy_of(EVERYTHING, chunk_size=chunk_size))
    ours = generate(model, ids, cache=cache, max_new_tokens=9, do_sample=False, eos_token_id=None)
    assert torch.equal(ours, expected)
    assert cache.memory().host_units > 64


@torch.no_grad()
def test_an_answer_equals_the_oracle_whoever_feeds_the_prompts_last_token() -> None:
    model, ids, policy = build("llama"), prompt(40), policy_of(SMALL, chunk_size=9)
    cache = RetentionCache(model, "streaming", policy)
    answer = generate(model, ids, cache=cache, max_new_tokens=12, do_sample=False, eos_token_id=None)[0, 40:]
    passes = [*ids[0, :-1].split(9), ids[0, -1:], *answer[:-1].split(1)]
    logits, memories = reference.infllm(model, passes, *frequencies("llama"), oracle(policy))
    assert [int(one.argmax()) for one in logits[-12:]] == answer.tolist()
    again = RetentionCache(model, "streaming", policy)
    prefill(model, ids, again)
    twin = generate(model, cache=again.copy(), max_new_tokens=12, do_sample=False, eos_token_id=None)[0]
    assert torch.equal(twin, answer)
    assert torch.equal(generate(model, cache=again, max_new_tokens=12, do_sample=False, eos_token_id=None)[0], answer)
    for layer, fed_twice, memory in zip(cache.governed, again.governed, memories, strict=True):
        slow = torch.stack([unit.attention_N for unit in memory.recent[-12:]], dim=1)
        for one in (layer, fed_twice):
            near = torch.stack([column[0, :, one.fill - 12 : one.fill] for column in one._attention()], dim=1)
            torch.testing.assert_close(near.flatten(0, 1), slow, atol=1e-5, rtol=0)


@torch.no_grad()
def test_rows_of_different_lengths_equal_runs_of_their_own() -> None:
    model, ids = build("llama"), prompt(59, batch=4)
    policy, lengths = policy_of(SMALL, chunk_size=9), (59, 33, 10, 2)
    mask = torch.stack([(torch.arange(59) >= 59 - length).long() for length in lengths])
    cache = RetentionCache(model, "streaming", policy)
    ours = generate(model, ids, cache=cache, attention_mask=mask, max_new_tokens=14, do_sample=False, eos_token_id=None)
    for row, length in enumerate(lengths):
        alone = RetentionCache(model, "streaming", policy)
        expected = generate(
            model, ids[row : row + 1, 59 - length :], cache=alone, max_new_tokens=14, do_sample=False, eos_token_id=None
        )
        assert torch.equal(ours[row, 59:], expected[0, length:])
        assert cache.governed[0].blocks.counts[row] == alone.governed[0].blocks.counts[0]


@torch.no_grad()
def test_rows_of_one_length_beams_and_a_second_text_equal_runs_of_their_own() -> None:
    model, ids, policy = build("llama"), prompt(41, batch=2), policy_of(SMALL, chunk_size=9)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    both = RetentionCache(model, "streaming", policy)
    read = [prefill(model, ids[:, part], both) for part in (slice(0, 30), slice(30, 41))][-1]
    beams = generate(model, cache=both, num_beams=3, **options)
    for row in range(2):
        alone = RetentionCache(model, "streaming", policy)
        for part in (slice(0, 30), slice(30, 41)):
            logits = prefill(model, ids[row : row + 1, part], alone)
        torch.testing.assert_close(read[row], logits[0], atol=1e-4, rtol=0)
        assert torch.equal(generate(model, cache=alone, num_beams=3, **options)[0], beams[row])


# -- memory -----------------------------------------------------------------------------------------------------------


def test_memory_on_the_device_is_constant_and_all_of_it_is_planned() -> None:
    model, policy = build("llama", max_position_embeddings=65536), policy_of("local=64,block=8,topk=4", budget=200)
    fast, near = set(), policy.blocks().near
    for tokens in (300, 1000, 2500):
        cache = RetentionCache(model, "streaming", policy)
        generate(model, prompt(tokens), cache=cache, max_new_tokens=10, eos_token_id=None)
        memory = cache.memory()
        assert memory.planned == memory.actual == memory.peak
        assert memory.host_planned == memory.host
        blocks = (tokens + 10 - 1 - 64 - 4) // 8
        assert memory.host_units == 8 * ((tokens + 9 - 1 - 64 - 4) // 8)
        assert memory.host == 3 * blocks * (2 * 8 * 2 + 4) * 8 * 4
        assert planned_bytes(cache.backbone, cache.scorer, policy, 4, tokens, 10) == memory.planned
        assert planned_host_bytes(cache.backbone, cache.scorer, policy, 4, tokens, 10) == memory.host
        assert max(layer.capacity for layer in cache.governed) == near + policy.chunk_size
        fast.add(memory.actual)
    assert len(fast) == 1


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "name"),
    [
        ({"recall": 8, "host_budget": "all"}, "recall"),
        ({"host_budget": 64}, "host_budget"),
        ({"positions": "original"}, "positions"),
        ({"when": "prompt_end"}, "when"),
        ({"layer_budgets": "pyramid"}, "layer_budgets"),
        ({"head_budgets": "adaptive"}, "head_budgets"),
        ({"memory": "linear"}, "memory"),
        ({"decode_budget": 900}, "decode_budget"),
    ],
)
def test_what_contradicts_the_method_is_refused(numbers: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"has a rule of its own for {name}, so .* leave {name} out"):
        RetentionPolicy(recall_by="infllm:local=64", **numbers)


def test_a_scorer_of_its_own_is_refused() -> None:
    policy = RetentionPolicy(recall_by="infllm:local=64")
    for scorer in ("snapkv", scorers.get("streaming", sinks=9)):
        with pytest.raises(ValueError, match="take scorer streaming without options, and set init and local"):
            RetentionCache(build("llama"), scorer, policy)


def test_numbers_that_nobody_gave_follow() -> None:
    policy = RetentionPolicy(recall_by="infllm", budget=256)
    assert (policy.chunk_size, policy.local_len, policy.stabilizers) == (policy.blocks().numbers[0], 1, 0)
    assert policy.changed(budget=6000).chunk_size == 512


def test_it_is_a_method_of_every_command() -> None:
    method = methods.find(parse("infllm:block=32,local=256,topk=4"), "method", methods.names())
    assert method.policy(RetentionPolicy(budget=600)).blocks().numbers == (256, 32, 8, 4, 8, 4)
    with pytest.raises(ValueError, match="method infllm:local=256: .* but budget=64; raise budget to 528"):
        methods.find(parse("infllm:local=256"), "method", []).policy(RetentionPolicy(budget=64))
    with pytest.raises(ValueError, match='has no option "size"'):
        methods.find(parse("infllm:size=4"), "method", [])
    assert "infllm" in methods.names()


def test_what_cannot_go_on_from_blocks_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    model = build("llama")
    cache = RetentionCache(model, "streaming", policy_of(SMALL, chunk_size=9))
    prefill(model, prompt(40), cache)
    with pytest.raises(ValueError, match="a file has no place for the blocks that recall_by=infllm"):
        save_cache(cache, tmp_path / "read.safetensors")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="holds blocks in host memory, not in a file"):
        RetentionCache(model, "streaming", policy_of(SMALL), disk=tmp_path / "units")
    assert generate(model, cache=cache, max_new_tokens=4, eos_token_id=None).shape == (1, 4)


def test_a_prompt_of_unknown_length_is_read_in_the_same_memory() -> None:
    model, policy, ids = build("llama"), policy_of(SMALL, chunk_size=9), prompt(50)
    whole, streamed = (RetentionCache(model, "streaming", policy) for _ in range(2))
    torch.testing.assert_close(prefill(model, iter(ids[0].tolist()), streamed), prefill(model, ids, whole))
    memory = streamed.memory()
    assert memory.planned == memory.actual == whole.memory().actual
    assert memory.host_planned == memory.host
