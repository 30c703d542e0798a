"""What the user chose comes before what is recommended, and stabilizers that nobody chose follow a small budget."""

from __future__ import annotations

from typing import Any

import pytest

from locret.infer.evaluation.options import BudgetOptions
from locret.infer.options import PolicyOptions
from locret.infer.speed.options import BenchOptions
from locret.infer.speed.resolve import make_plan
from locret.policy.resolve import resolve, resolve_options


@pytest.mark.parametrize(
    ("own", "recommended", "stabilizers"),
    [
        ({"budget": 40_000}, {}, 2500),  # the default
        ({"budget": 1000}, {}, 250),
        ({"budget": 1000}, {"stabilizers": 64}, 64),
        ({"budget": 100}, {"stabilizers": 64}, 25),
        ({"budget": 100, "stabilizers": 80}, {"stabilizers": 64}, 80),
        ({}, {"budget": 256, "stabilizers": 100}, 64),
        ({}, {}, 1500),
    ],
)
def test_stabilizers_that_nobody_chose_are_at_most_a_quarter(
    own: dict[str, int], recommended: dict[str, Any], stabilizers: int
) -> None:
    assert resolve(own, recommended, follow_budget=True).stabilizers == stabilizers


def test_without_following_the_budget_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="stabilizers=2500 leaves no room for scored units in budget=1000"):
        resolve({"budget": 1000}, {}, follow_budget=False)
    with pytest.raises(ValueError, match="budget='many' is not a whole number"):
        resolve({"budget": "many"}, {}, follow_budget=True)


def test_all_commands_resolve_a_small_budget_alike() -> None:
    """What `locret-infer` takes from bytes or a share, `locret-eval` from a list, `locret-bench` below its preset."""
    inferred = resolve_options(PolicyOptions(chunk_size=512), {"chunk_size"}, {"stabilizers": 100}, 300)
    (evaluated,) = BudgetOptions(budget="300", chunk_size=512).policies({"budget", "chunk_size"}, {"stabilizers": 100})
    assert inferred == evaluated
    assert (inferred.budget, inferred.chunk_size, inferred.stabilizers) == (300, 512, 75)
    plan = make_plan(BenchOptions(shape="cpu-512", methods="locret", budget=100), {"budget"})
    assert (plan.policy.budget, plan.policy.stabilizers) == (100, 25)
