"""What the user chose comes before what is recommended, and what nobody chose follows a small budget, at every door."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from locret import RetentionPolicy
from locret.infer.evaluation.eval_options import BudgetOptions
from locret.infer.infer_options import PolicyOptions
from locret.infer.speed.bench_options import BenchOptions
from locret.infer.speed.resolve import make_plan
from locret.policy.resolve import resolve, resolve_options
from locret.train.training_options import RunOptions

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


@pytest.mark.parametrize("recommended", [{}, {"stabilizers": 100}, SMALL])
@pytest.mark.parametrize("budget", [100, 300, 2500, 7000])
def test_all_doors_resolve_a_budget_alike(budget: int, recommended: dict[str, Any]) -> None:
    expected = resolve({"budget": budget}, recommended)
    assert resolve_options(PolicyOptions(budget=budget), {"budget"}, recommended) == expected
    assert resolve_options(PolicyOptions(), set(), recommended, budget) == expected
    assert [one.policy(1) for one in BudgetOptions(budget=str(budget)).allotments({"budget"}, recommended)] == [
        expected
    ]
    if recommended:
        return
    assert RetentionPolicy(budget=budget) == RetentionPolicy.from_dict({"budget": budget}, "policy") == expected
    assert RunOptions(output="x", policy=PolicyOptions(budget=budget)).policy == expected


def test_the_bench_takes_its_shape_or_the_heads_for_a_recommendation() -> None:
    plan = make_plan(BenchOptions(shape="cpu-512", methods="locret", budget=100), {"budget"})
    assert (plan.policy.budget, plan.policy.stabilizers) == (100, 25)
    pair = {"model": "checkpoints/tiny", "heads": "checkpoints/tiny-heads", "methods": "locret", "lengths": 600}
    plan = make_plan(BenchOptions(**pair), set(pair))  # type: ignore[arg-type]
    assert (plan.policy.budget, plan.policy.chunk_size, plan.policy.stabilizers, plan.policy.local_len) == (
        256, 512, 64, 32,
    )  # fmt: skip


def test_a_budget_alone_is_enough_for_training(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from locret.train.command import command

    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"document": "a b c", "question": "d?", "answer": "e"}) + "\n")
    run = ["--model", "checkpoints/tiny", "--dataset", str(rows), "--output", str(tmp_path / "out")]
    assert command([*run, "--policy.budget", "1024", "--dry-run"]) == 0
    assert "stabilizers: 256" in capsys.readouterr().out
