"""Lookups of the second tier: what each finds, against the slow version, and how much of the exact choice it keeps."""

from __future__ import annotations

from typing import Any

import oracle as reference
import pytest
import torch
from families import build, prompt
from torch import Tensor

from locret import RetentionCache, RetentionPolicy, generate, lookups, prefill
from locret.backbone.attention import View
from locret.lookups import Ask, Lookup

GREEDY = {"do_sample": False, "eos_token_id": None}


def drawn(units: int, queries: int = 3, rows: int = 2, empty: int = 0, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries (B, 4, L, 8), keys (B, 2, H, 8) and positions; the last row begins with empty slots."""
    draw = torch.Generator().manual_seed(seed)
    keys = torch.randn(rows, 2, units, 8, generator=draw) * torch.tensor([9.0, 3, 1, 1, 1, 1, 1, 1])
    positions = torch.arange(units).expand(rows, 2, units).clone()
    keys[-1, :, :empty], positions[-1, :, :empty] = 0, -1
    return torch.randn(rows, 4, queries, 8, generator=draw), keys, positions


def choose(lookup: Lookup, query: Tensor, keys: Tensor, positions: Tensor, count: int) -> Tensor:
    ranks = lookup.choose(
        Ask(
            query=query,
            window=query,
            near=View(keys, keys),
            keys=keys,
            positions=positions,
            padded=bool((positions < 0).any()),
            index=lookup.index(keys, positions),
            count=count,
            scaling=0.3,
            nth=5,
            layers=8,
            generating=True,
            fed=False,
            shared={},
        )
    )
    assert ranks is not None
    assert ranks.dtype == torch.int64
    return ranks


@pytest.mark.parametrize(("units", "count", "empty"), [(40, 7, 0), (33, 33, 0), (1, 1, 0), (35, 8, 20), (50, 12, 45)])
def test_every_query_gets_as_many_units_as_it_asked_for(units: int, count: int, empty: int) -> None:
    query, keys, positions = drawn(units, empty=empty)
    ranks = choose(lookups.get("exact"), query, keys, positions, count)
    assert ranks.shape == (2, 2, 3, count)
    assert ranks.min() >= 0
    assert ranks.max() < units
    assert all(len(set(one)) == count for one in ranks.flatten(0, 2).tolist())
    found = positions[:, :, None].expand(-1, -1, 3, -1).gather(3, ranks) >= 0
    assert found[0].all()
    assert (found[1].sum(-1) == min(count, units - empty)).all()  # every unit that there is before what is none


@pytest.mark.parametrize("units", [9, 200])
def test_exact_is_the_slow_choice(units: int) -> None:
    query, keys, positions = drawn(units)
    ranks = choose(lookups.get("exact"), query, keys, positions, 5)
    for head in range(2):
        logits = query[1, 2 * head : 2 * head + 2, 2] @ keys[1, head].T
        assert sorted(ranks[1, head, 2].tolist()) == reference.best_units(logits, 5)


@pytest.mark.parametrize("spec", ["exact", "quest:page=4"])
@pytest.mark.parametrize("tokens", [90, 150])
def test_a_cache_plans_the_bytes_of_its_indexes(spec: str, tokens: int) -> None:
    model = build("llama")
    policy = RetentionPolicy(budget=12, chunk_size=12, local_len=5, host_budget=33, recall=6, recall_by=spec)
    cache = RetentionCache(model, "key_norm", policy)
    planned = cache.memory().index_planned
    prefill(model, prompt(tokens), cache)
    assert cache.memory().index == cache.memory().index_planned == planned
    assert (planned > 0) == (spec != "exact")


@pytest.mark.parametrize(("spec", "positions"), [("exact", "compact"), ("exact", "original"), ("quest", "original")])
def test_with_everything_recalled_every_lookup_is_full_attention(spec: str, positions: str) -> None:
    model, ids = build("llama"), prompt(61)
    settings = {"budget": 7, "chunk_size": 12, "local_len": 5, "stabilizers": 2, "when": "prompt_end"}
    policy = RetentionPolicy(**settings, host_budget="all", recall=500, recall_by=spec, positions=positions)
    options = {"max_new_tokens": 6, "output_logits": True, "return_dict_in_generate": True, **GREEDY}
    cache = RetentionCache(model, "key_norm", policy)
    prefill(model, ids, cache)
    ours: Any = generate(model, cache=cache, **options)
    theirs: Any = model.generate(ids, **options)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(theirs.logits), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("ques", 'lookup "ques" is unknown; did you mean quest'),
        ("codes:bits=2", 'lookup "codes" was retired; release 0.1.0'),
        ("quest:page=2.5", "is not a whole number"),
        ("pages", 'lookup "pages" was retired; release 0.1.0'),
        ("omnikv:filter_layers=8-2", "filter_layers=8-2 are not layers in ascending order; write 2-8-18"),
        ("omnikv:filter_layers=2-x", "filter_layers=2-x are not layers"),
        ("omnikv:selector=first", 'selector="first" is unknown; choose one of uniform, exp, last, raw'),
        ("omnikv:tokens=0", "tokens=0 is neither a number of units nor a share"),
        ("omnikv:tokens=1.5", "tokens=1.5 is neither"),
        ("omnikv:memory=1.5", "memory=1.5 is not a share"),
        ("omnikv:tokens=9,memory=0.5", "tokens=9 and memory=0.5 both say"),
        ("omnikv:window=0", "window=0 is too small"),
        ("omnikv:window=4", "window=4 is what uniform and exp look from"),
        ("omnikv:prefill=-1", "prefill=-1 is too small"),
        ("omnikv:filters=2", 'has no option "filters"; did you mean filter_layers'),
        ("quest:page=0", "page=0 is too small"),
        ("quest:dense=-1", "dense=-1 is too small"),
    ],
)
def test_a_lookup_that_makes_no_sense_is_refused(spec: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        lookups.get(spec)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("omnikv:filter_layers=2-9", "filter_layers=2-9 names layers that a backbone of 3 does not have"),
        ("omnikv:filter_layers=1", "filter_layers=1 leave no sparse layer of 3"),
        ("omnikv:memory=0.5", "memory=0.5 is no more than the dense layers take"),
        ("omnikv:tokens=100", "tokens=100, but recall=8; leave tokens out, or recall as many"),
        ("quest:dense=3", "dense=3 leaves no layer of 3"),
        ("quest:tokens=9", "tokens=9, but recall=8"),
    ],
)
def test_a_lookup_that_does_not_fit_is_refused_before_anything_is_read(spec: str, says: str) -> None:
    policy = RetentionPolicy(budget=8, host_budget=64, recall=8, recall_by=spec)
    with pytest.raises(ValueError, match=says):
        RetentionCache(build("llama"), "random", policy)
