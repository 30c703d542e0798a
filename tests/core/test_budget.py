"""Budgets in bytes and as shares of a prompt, turned into units."""

from __future__ import annotations

import pytest

from locret.policy.budget import parse_bytes, units_of_share


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
