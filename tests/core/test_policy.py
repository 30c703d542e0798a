"""A policy that cannot work is refused when it is read, with the setting, the value and the way out."""

from __future__ import annotations

import pytest

from locret import RetentionPolicy


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"budget": 0}, "budget=0 is too small; it must be 1 or more"),
        ({"budget": 100, "stabilizers": 100}, "stabilizers=100 leaves no room for scored units in budget=100; "
         "raise budget or lower stabilizers to at most 99"),
        ({"chunk_size": 0}, "chunk_size=0 is too small"),
        ({"local_len": 0}, "local_len=0 is too small"),
        ({"stabilizers": -1}, "stabilizers=-1 is negative; use 0 to protect nothing"),
        ({"positions": "absolute"}, 'positions="absolute" is unknown; choose one of compact, original'),
        ({"head_budgets": "ragged"}, 'head_budgets="ragged" is unknown; choose one of uniform, adaptive'),
        ({"head_floor": 1.5}, "head_floor=1.5 is no share of the budget; give 0 to 1, such as 0.2"),
        ({"decode_budget": 164}, "decode_budget=164 cannot hold local_len=100 protected units"),
    ],
)  # fmt: skip
def test_impossible_numbers_are_refused(numbers: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError) as error:
        RetentionPolicy(**numbers)
    assert message in str(error.value)


def test_defaults_are_those_of_the_original_package() -> None:
    policy = RetentionPolicy()
    assert (policy.budget, policy.chunk_size, policy.stabilizers, policy.local_len) == (6000, 3072, 2500, 100)
    assert RetentionPolicy(**policy.to_dict()) == policy
