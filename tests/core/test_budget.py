"""Budgets in bytes and as shares of a prompt, turned into units."""

from __future__ import annotations

from typing import Any

import pytest
from families import build
from hypothesis import given, settings
from hypothesis import strategies as st

from locret import RetentionPolicy
from locret.backbone.adapters import describe
from locret.policy.budget import cache_bytes, largest_budget, parse_bytes, units_of_share
from locret.policy.schedule import plan

KINDS: dict[str, dict[str, Any]] = {
    "fixed": {},
    "linear": {"memory": "linear"},
    "sqrt": {"memory": "sqrt"},
    "decremental": {"memory": "linear", "decremental": True},
}


@pytest.mark.parametrize(
    ("text", "count"),
    [("2GiB", 2 << 30), ("1.5 GB", 1_500_000_000), ("800kib", 800 << 10), ("77", 77), ("3M", 3_000_000)],
)
def test_amounts_of_memory_are_read_in_either_unit(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["2 gigs", "", "-1GiB", "0GiB", "iB", "GiB"])
def test_what_is_no_amount_of_memory_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not an amount of memory; write it like 2GiB|is less than one byte"):
        parse_bytes(text)


def test_shares_round_down_and_keep_at_least_one_unit() -> None:
    assert [units_of_share(share, 1005) for share in (0.1, 1, 0.0001)] == [100, 1005, 1]
    for share in (0, -0.1, 1.01):
        with pytest.raises(ValueError, match=f"{share} is not a share of the prompt; give more than 0 and at most 1"):
            units_of_share(share, 10)


@settings(deadline=None)
@given(
    memory=st.integers(1, 3_000_000),
    kind=st.sampled_from(sorted(KINDS)),
    tokens=st.integers(200, 3000),
)
@pytest.mark.slow
def test_the_largest_budget_fits_and_one_more_does_not(memory: int, kind: str, tokens: int) -> None:
    backbone = describe(build("llama").config)

    def planned(budget: int) -> int:
        rules = RetentionPolicy(budget=budget, stabilizers=0, chunk_size=64, min_chunk=4, **KINDS[kind])
        return cache_bytes(backbone, plan(rules, 3, tokens).capacity(16), 4)

    found = largest_budget(planned, memory, 1, tokens)
    if found is None:
        assert planned(1) > memory
        return
    assert planned(found) <= memory
    # Where chunks shrink, what is left over for the first one makes bytes jump by a few slots.
    assert found == tokens or kind == "decremental" or planned(found + 1) > memory
