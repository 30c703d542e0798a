"""Quest: its bounds by hand and as bounds, its pages, and the oracle against full attention."""

from __future__ import annotations

import oracle as reference
import pytest
import torch
from families import build, prompt
from lookup_runs import INV_FREQ, LAYERS, answered, differs_from_oracle, fresh, method
from transformers import AutoModelForCausalLM

from locret import RetentionCache, RetentionPolicy, generate, lookups, prefill
from locret.shipped import find


def test_bounds_of_a_page_by_hand() -> None:
    keys = torch.tensor([[1.0, -2.0], [3.0, 5.0], [-1.0, 0.0]])
    (low, high), (short, same) = reference.page_bounds(keys, 2)
    assert (low.tolist(), high.tolist()) == ([1, -2], [3, 5])
    assert torch.equal(short, same)
    # 2 wants a large first channel (3), -1 a small second one (-2); no key of the page has both.
    assert reference.upper_bound(torch.tensor([2.0, -1.0]), low, high) == 2 * 3 + 1 * 2


@pytest.mark.parametrize("length", [1, 15, 16, 17, 90])
def test_no_key_of_a_page_exceeds_its_bound(length: int) -> None:
    torch.manual_seed(length)
    keys, queries = torch.randn(length, 6), torch.randn(20, 6)
    for start, (low, high) in zip(range(0, length, 16), reference.page_bounds(keys, 16), strict=True):
        for query in queries:
            assert reference.upper_bound(query, low, high) >= float((keys[start : start + 16] @ query).max()) - 1e-5


@pytest.mark.parametrize(
    ("tokens", "page", "pages", "expected"),
    [(1024, 16, 500, 64), (16, 16, 500, 3), (1024, 16, 40, 40), (100, 16, 500, 6), (16, 16, 2, 2)],
)
def test_pages_that_a_query_head_attends_to(tokens: int, page: int, pages: int, expected: int) -> None:
    assert reference.quest_pages(tokens, page, pages) == expected


def test_the_last_page_counts_where_it_is_always_chosen() -> None:
    keys = torch.cat([torch.ones(1, 6, 2), torch.zeros(1, 1, 2)], dim=1)  # the last page of one token is the worst
    query = torch.ones(1, 2)
    assert 6 not in reference.quest_kept(query, keys, tokens=6, page=2)[0]
    assert reference.quest_kept(query, keys, tokens=6, page=2, last=True)[0] == [0, 1, 2, 3, 6]


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
@torch.no_grad()
def test_oracle_with_a_budget_of_the_prompts_length_is_full_attention(family: str) -> None:
    model, ids = build(family), prompt(43)
    visible = reference.quest_visible(prompt=38, tokens=48, page=16, dense=1)
    logits = reference.read_by_choice(model, ids[0], [38, 1, 1, 1, 1, 1], INV_FREQ, 1.0, visible)
    torch.testing.assert_close(logits[-5:], model(ids).logits[0, -5:], atol=1e-4, rtol=0)


# -- the lookup -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
@pytest.mark.parametrize("options", ["page=3,dense=1", "page=4,dense=2,last_page=true", "page=1,dense=0"])
@pytest.mark.parametrize("tokens", [61, 20, 3])
def test_answers_are_the_oracles(family: str, options: str, tokens: int) -> None:
    model, spec = build(family, **LAYERS), f"quest:{options}"
    lookup = lookups.get(spec)
    assert isinstance(lookup, lookups.QuestLookup)
    numbers = (12, lookup.page, lookup.dense, 1, lookup.last_page)
    visible = reference.quest_visible(tokens - 1, *numbers)
    ours, full = differs_from_oracle(model, prompt(tokens), method(spec, 12), [tokens - 1], visible)
    assert ours < 3e-5
    assert (full > 0.1) == (tokens > 15)


def test_a_budget_of_the_prompts_length_is_the_full_cache() -> None:
    model, ids = build("llama", **LAYERS), prompt(91, batch=2)
    for options in ({}, {"num_beams": 3}):
        settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, **options}
        cache = fresh(model, method("quest:page=4", 91))
        assert torch.equal(generate(model, ids, cache=cache, **settings), model.generate(ids, **settings))


def test_rows_and_turns_do_not_matter() -> None:
    model, ids = build("llama", **LAYERS), prompt(61, batch=2)
    policy, mask = method("quest:page=4", 13), torch.ones_like(ids)
    mask[1, :22] = 0  # its pages begin where its text does
    both = answered(model, fresh(model, policy), ids, attention_mask=mask).logits
    first, second = (answered(model, fresh(model, policy), row).logits for row in (ids[:1], ids[1:, 22:]))
    turns = fresh(model, policy)
    prefill(model, ids[:1, :40], turns)
    prefill(model, ids[:1, 40:], turns)
    later = answered(model, turns.copy(), None).logits
    for pair, one, other, third in zip(both, first, second, later, strict=True):
        torch.testing.assert_close(pair, torch.cat([one, other]), atol=1e-4, rtol=0)
        torch.testing.assert_close(third, one, atol=1e-4, rtol=0)


@pytest.mark.parametrize("tokens", [2048, 8192])
def test_bytes_of_every_tier_are_planned_and_counted(tokens: int) -> None:
    tiny = AutoModelForCausalLM.from_pretrained(find("checkpoints/tiny")).eval()
    cache = fresh(tiny, method("quest:tokens=100", chunk_size=512))
    prefill(tiny, prompt(tokens, vocabulary=890), cache, new_tokens=4)
    memory, backbone = cache.memory(), cache.backbone
    unit = backbone.num_kv_heads * (2 * backbone.head_dim * 4 + 8)
    assert memory.host == memory.host_planned == 3 * (tokens - 2) * unit
    workspace = 513 * backbone.num_kv_heads * backbone.head_dim * 4
    assert memory.actual == (2 * (tokens - 2) + 5 * 513) * unit + workspace
    assert memory.peak == memory.planned == memory.actual
    assert memory.index == memory.index_planned > 0
    generate(tiny, cache=cache, max_new_tokens=3, do_sample=False, eos_token_id=-1)
    # Six pages of 16 for every query head, in three layers and three steps.
    assert cache.memory().moved - memory.moved == 3 * 3 * 96 * backbone.num_heads * 2 * backbone.head_dim * 4


def test_a_page_is_never_larger_than_the_tier() -> None:
    model, moved = build("llama", **LAYERS), []
    for page in (50, 100_000):
        cache = fresh(model, method(f"quest:page={page},tokens=8"))
        prefill(model, prompt(40), cache)
        answered(model, cache, None)
        moved.append(cache.memory().moved)
    assert moved[0] == moved[1] > 0


@pytest.mark.parametrize(
    ("options", "says"),
    [("page=0", "page=0 is too small"), ("dense=-1", "dense=-1 is too small"), ("pages=4", "did you mean page")],
)
def test_options_that_mean_nothing_are_refused(options: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        lookups.get(f"quest:{options}")


def test_options_that_do_not_fit_are_refused_before_anything_is_read() -> None:
    for spec, says in (("quest:dense=6", "dense=6 leaves no layer of 6"), ("quest:tokens=9", "tokens=9, but recall=8")):
        policy = RetentionPolicy(budget=8, host_budget=64, recall=8, recall_by=spec)
        with pytest.raises(ValueError, match=says):
            RetentionCache(build("llama", **LAYERS), "random", policy)
