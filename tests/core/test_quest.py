"""Quest: its bounds by hand and as bounds, its pages, and the oracle against full attention."""

from __future__ import annotations

import oracle as reference
import pytest
import torch
from families import build, prompt
from lookup_runs import LAYERS, differs_from_oracle, fresh, method

from locret import RetentionCache, RetentionPolicy, generate, lookups


@pytest.mark.parametrize("length", [1, 15, 16, 17, 90])
def test_no_key_of_a_page_exceeds_its_bound(length: int) -> None:
    torch.manual_seed(length)
    keys, queries = torch.randn(length, 6), torch.randn(20, 6)
    for start, (low, high) in zip(range(0, length, 16), reference.page_bounds(keys, 16), strict=True):
        for query in queries:
            assert reference.upper_bound(query, low, high) >= float((keys[start : start + 16] @ query).max()) - 1e-5


def test_the_last_page_counts_where_it_is_always_chosen() -> None:
    keys = torch.cat([torch.ones(1, 6, 2), torch.zeros(1, 1, 2)], dim=1)  # the last page of one token is the worst
    query = torch.ones(1, 2)
    assert 6 not in reference.quest_kept(query, keys, tokens=6, page=2)[0]
    assert reference.quest_kept(query, keys, tokens=6, page=2, last=True)[0] == [0, 1, 2, 3, 6]


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
