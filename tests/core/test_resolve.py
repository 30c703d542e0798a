"""What the user chose comes before what is recommended, and what nobody chose follows a small budget, at every door."""

from __future__ import annotations

from typing import Any

import pytest

from locret.policy.resolve import resolve

PAPER = {"budget": 6000, "chunk_size": 3072, "stabilizers": 2500, "local_len": 100}
SMALL = {"budget": 256, "chunk_size": 1024, "stabilizers": 100, "local_len": 32}


@pytest.mark.parametrize(
    ("own", "recommended", "numbers"),
    [
        ({}, {}, PAPER),
        ({"budget": 40_000}, {}, {**PAPER, "budget": 40_000}),
        ({"budget": 1000}, {}, {"stabilizers": 250, "chunk_size": 1000, "local_len": 100}),
        ({"budget": 1000}, {"stabilizers": 64}, {"stabilizers": 64}),
        ({"budget": 100}, {"stabilizers": 64}, {"stabilizers": 25}),
        ({"budget": 100, "stabilizers": 80}, {"stabilizers": 64}, {"stabilizers": 80}),
        ({}, SMALL, SMALL),
        ({"budget": 256}, SMALL, SMALL),
        ({"budget": 1000}, SMALL, {**SMALL, "budget": 1000}),
        ({"budget": 128}, SMALL, {"budget": 128, "chunk_size": 512, "stabilizers": 32, "local_len": 32}),
        ({"budget": 16, "chunk_size": None}, SMALL, {"chunk_size": 512, "stabilizers": 4, "local_len": 16}),
        ({"budget": 1000}, {"budget": 256}, {"stabilizers": 250}),
        ({"decode_budget": None}, {"decode_budget": 1000}, {"decode_budget": None}),
    ],
)
def test_what_nobody_chose_is_recommended_or_follows_a_smaller_budget(
    own: dict[str, Any], recommended: dict[str, Any], numbers: dict[str, Any]
) -> None:
    policy = resolve(own, recommended)
    assert {name: getattr(policy, name) for name in numbers} == numbers


def test_given_numbers_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="stabilizers=2500 leaves no room for scored units in budget=1000"):
        resolve({"budget": 1000, "stabilizers": 2500}, {})
    with pytest.raises(ValueError, match="budget='many' is not a whole number"):
        resolve({"budget": "many"}, {})
