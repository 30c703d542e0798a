"""A policy that cannot work is refused when it is read, with the setting, the value and the way out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from locret import RetentionPolicy
from locret.cache.limits import check_slots
from locret.policy.schedule import plan


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"budget": 0}, "budget=0 is too small; it must be 1 or more"),
        ({"budget": 100, "stabilizers": 100}, "stabilizers=100 leaves no room for scored units in budget=100; "
         "raise budget, lower stabilizers to at most 99, or leave them out to follow the budget"),
        ({"chunk_size": 0}, "chunk_size=0 is too small"),
        ({"local_len": 0}, "local_len=0 is too small"),
        ({"stabilizers": -1}, "stabilizers=-1 is too small; it must be 0 or more"),
        ({"positions": "absolute"}, 'positions="absolute" is unknown; choose one of compact, original'),
        ({"head_budgets": "ragged"}, 'head_budgets="ragged" is unknown; choose one of uniform, adaptive'),
        ({"head_floor": 1.5}, "head_floor=1.5 is not a share; it must lie between 0 and 1"),
        ({"decode_budget": 164, "local_len": 100, "decode_interval": 64}, "decode_budget=164 cannot hold local_len=1"),
    ],
)  # fmt: skip
def test_impossible_numbers_are_refused(numbers: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError) as error:
        RetentionPolicy(**numbers)
    assert message in str(error.value)


WHOLE = [name for name, value in RetentionPolicy().to_dict().items() if type(value) is int or name == "decode_budget"]


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 7000.5, 7000.0, "7000", True, [7000], torch.tensor(7e3)])
def test_a_number_that_is_not_whole_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name}=.* is not a whole number; give one"):
        RetentionPolicy(**{name: value})


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"budget": None}, "budget=None is not a whole number; give one such as 6000"),
        ({"decode_budget": 0.5}, "decode_budget=0.5 is not a whole number; give one, or leave it out"),
        ({"head_floor": float("nan")}, "head_floor=nan is not a finite number; give one such as 0.2"),
        ({"head_floor": float("inf")}, "head_floor=inf is not a finite number"),
        ({"head_floor": "0.2"}, "head_floor='0.2' is not a finite number"),
        ({"head_floor": True}, "head_floor=True is not a finite number"),
        ({"when": None}, "when=None is not a text; give one such as 'chunk'"),
        ({"decremental": 1}, "decremental=1 is not true or false; give one such as False"),
    ],
)
def test_a_value_of_another_type_is_refused(numbers: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        RetentionPolicy(**numbers)
    assert message in str(error.value)


def test_defaults_are_those_of_the_original_package() -> None:
    policy = RetentionPolicy()
    assert (policy.budget, policy.chunk_size, policy.stabilizers, policy.local_len) == (6000, 3072, 2500, 100)
    assert RetentionPolicy.from_dict(policy.to_dict(), "policy") == policy


@pytest.mark.parametrize(
    ("given", "numbers"),
    [
        ({}, (6000, 3072, 2500, 100)),
        ({"budget": 6000}, (6000, 3072, 2500, 100)),
        ({"budget": 16384}, (16384, 3072, 2500, 100)),
        ({"budget": 5999}, (5999, 3072, 1499, 100)),
        ({"budget": 1024}, (1024, 1024, 256, 100)),
        ({"budget": 64}, (64, 512, 16, 64)),
        ({"budget": 1}, (1, 512, 0, 1)),
        ({"budget": 1024, "stabilizers": 1000, "chunk_size": 4096}, (1024, 4096, 1000, 100)),
        ({"budget": 64, "local_len": 100}, (64, 512, 16, 100)),
    ],
)
def test_what_is_not_given_follows_from_the_budget(given: dict[str, int], numbers: tuple[int, ...]) -> None:
    policy = RetentionPolicy(**given)  # type: ignore[arg-type]
    assert (policy.budget, policy.chunk_size, policy.stabilizers, policy.local_len) == numbers
    assert set(policy.following()) == {"stabilizers", "local_len", "chunk_size"} - set(given)
    assert RetentionPolicy.from_dict(given, "policy") == policy


def test_stabilizers_are_no_matter_where_everything_is_selected_at_the_prompts_end() -> None:
    policy = RetentionPolicy(budget=64, when="prompt_end", stabilizers=64)
    assert policy.idle()["stabilizers"] == "when chunk"
    assert "stabilizers" not in replace(policy, stabilizers=0).idle(), "which says what is so anyway"
    assert "stabilizers" not in RetentionPolicy(budget=64, when="prompt_end").following()
    assert plan(policy, 2, None).steps[0].protected == (0, 0)
    check_slots(policy, 64)
    with pytest.raises(
        ValueError,
        match='merge="none" makes 65 units per KV head, more than budget=64 holds beside',
    ):
        check_slots(policy, 65)
    with pytest.raises(ValueError, match="stabilizers=64 leaves no room"):
        replace(policy, when="chunk")


def test_another_budget_keeps_what_was_given_and_follows_with_the_rest() -> None:
    small = RetentionPolicy().changed(budget=1024)
    assert small == RetentionPolicy(budget=1024)
    assert small.changed(budget=6000) == RetentionPolicy()
    assert RetentionPolicy(budget=1024, stabilizers=7).changed(budget=6000).stabilizers == 7
    with pytest.raises(ValueError, match="stabilizers=2500 leaves no room for scored units in budget=1024; raise "):
        RetentionPolicy(stabilizers=2500).changed(budget=1024)
    saved = RetentionPolicy.from_dict(RetentionPolicy().to_dict(), "policy")
    assert saved.following() == []
    with pytest.raises(ValueError, match="stabilizers=2500 leaves no room"):
        saved.changed(budget=1024)


def test_a_number_taken_from_another_policy_is_the_one_that_it_shows() -> None:
    small = RetentionPolicy(budget=64)
    assert small.stabilizers == 16
    assert RetentionPolicy(budget=1024, stabilizers=small.stabilizers).stabilizers == 16
    assert replace(small, budget=1024).stabilizers == 16
