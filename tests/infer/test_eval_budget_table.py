"""Budgets stand side by side where that says everything, and not at all where it would not."""

from __future__ import annotations

from typing import Any

from locret.infer.evaluation import budget_table


def cell(method: str, budget: int | None, score: float, task: str = "passkey", **changes: Any) -> dict[str, Any]:
    size = 1024 if budget is None else 2 * budget
    rates = {"prefill_tokens_per_second": 1000.0 + score, "decode_tokens_per_second": None}
    return {
        "task": task, "tokens": 2048, "method": method, "budget": budget, "score": score, "peak_bytes": size, **rates
    } | changes  # fmt: skip


def test_scores_and_bytes_of_all_budgets_stand_in_one_row() -> None:
    cells = [cell("full", None, 100.0)] + [
        cell("h2o", budget, score, task)
        for task, scores in (("passkey", (20.0, 60.0)), ("number", (0.0, 40.0)))
        for budget, score in zip((256, 128), reversed(scores), strict=True)
    ]
    lines = budget_table.table([*cells, cell("full", None, 90.0, "number")]).splitlines()
    assert lines[0] == "Budgets 128 / 256:"
    assert lines[2].startswith("| method | passkey @ 2,048 | number @ 2,048 | mean | peak cache |")
    assert lines[4] == "| full | 100 | 90 | 95 | 1 KiB | 1,095 |  |"
    assert lines[5] == "| h2o | 20 / 60 | 0 / 40 | 10 / 50 | 256 B / 512 B | 1,030 |  |"
    assert len(lines) == 6


def test_a_score_that_is_not_there_yet_leaves_a_gap() -> None:
    cells = [cell("h2o", 128, 20.0), cell("h2o", 256, 60.0), cell("h2o", 256, 40.0, "number")]
    assert "| h2o | 20 / 60 |  / 40 | 20 / 50 |" in budget_table.table(cells)


def test_one_budget_or_two_runs_of_a_budget_make_no_such_table() -> None:
    assert budget_table.table([cell("h2o", 128, 20.0), cell("full", None, 100.0)]) == ""
    assert budget_table.table([cell("h2o", 128, 20.0), cell("h2o", 128, 30.0), cell("h2o", 256, 30.0)]) == ""
