"""A picture that is not drawn is named, with the reason and the way out."""

from __future__ import annotations

import pytest
from eval_runs import cases

from locret.data import tasks
from locret.data.tasks import get
from locret.data.tasks.task import MadeSamples
from locret.infer.evaluation import methods
from locret.infer.evaluation.allotment import Allotment
from locret.infer.evaluation.left_out import left_out
from locret.infer.evaluation.runner import Case, plan_runs

POLICY = Allotment({"budget": 64, "chunk_size": 512, "stabilizers": 16, "local_len": 8})
HEAT, CONSISTENCY = "heat_map_random_64.png", "consistency.png"
STEPS = ["retention_steps_random.png", "retention_steps_tova.png"]
PLACES = cases([tasks.get("number")], [600], 1, 0)
CURVE = "no accuracy_by_budget.png: it needs several budgets, such as --budget 64,128"


def published() -> list[Case]:
    task = get("leval/quality")
    return [Case(MadeSamples(task, 0, 1, 0), task, 0, 0, 4096, 0)]


@pytest.mark.parametrize(
    ("drawn", "named", "places", "lines"),
    [
        (["accuracy_by_stabilizers.png", HEAT, *STEPS, CONSISTENCY], "random,tova", PLACES, []),
        ([HEAT, *STEPS, CONSISTENCY], "full,random,tova", PLACES, [CURVE]),
        ([HEAT, *(name.replace(".", "-agnostic.") for name in STEPS), CONSISTENCY], "random,tova", PLACES, [CURVE]),
        (
            [],
            "random",
            cases([tasks.get("variable_tracking")], [8192], 1, 0),
            [
                CURVE,
                "no heat_map_*.png: it needs a task with a single needle, such as --tasks passkey",
                "no retention_steps_*.png: it needs a prompt longer than --chunk-size and --local-len together; lower "
                "--chunk-size or raise --lengths",
                "no consistency.png: it needs a length of at most 6,144 tokens",
            ],
        ),
        (
            ["accuracy_by_budget.png", HEAT, STEPS[0], CONSISTENCY],
            "random,tova",
            PLACES,
            [
                "no retention_steps_tova.png: it needs a prompt longer than --chunk-size and --local-len together; "
                "lower --chunk-size or raise --lengths"
            ],
        ),
        (
            ["heat_map_full_all.png"],
            "full",
            PLACES,
            [
                "no accuracy_by_budget.png, retention_steps_*.png, consistency.png: they need a method with a budget, "
                "such as --methods random"
            ],
        ),
        (
            [HEAT],
            "random",
            published(),
            [
                CURVE,
                "no retention_steps_*.png, consistency.png: they need a task whose texts are generated here, such as "
                "--tasks passkey",
            ],
        ),
    ],
)
def test_every_kind_that_is_missing_is_named_with_its_reason(
    drawn: list[str], named: str, places: list[Case], lines: list[str]
) -> None:
    runs = plan_runs([methods.get(name) for name in named.split(",")], [POLICY])
    assert left_out(drawn, places, runs) == lines
