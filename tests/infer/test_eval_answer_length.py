"""`--max-new-tokens` replaces the limit of generated tasks, which fits the embedded tokenizer; without it all stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from eval_runs import records

LINE = ("--methods", "full,random", "--tasks", "multikey", "--lengths", "400", "--samples", "2", "--budget", "64")
LINE = (*LINE, "--chunk-size", "64", "--local-len", "8", "--figures", "none")


@pytest.fixture
def evaluate(evaluate_with: Any) -> Any:
    """Return a function that runs the command and gives exit code, output and errors."""
    return evaluate_with(*LINE)


@pytest.mark.slow
def test_answers_of_generated_tasks_are_as_long_as_was_asked_and_begin_alike(evaluate: Any, tmp_path: Path) -> None:
    found = {}
    for name, flags in (("usual", ()), ("longer", ("--max-new-tokens", 40)), ("shorter", ("--max-new-tokens", 5))):
        code, _, err = evaluate("--output", tmp_path / name, *flags)
        assert code == 0, err
        found[name] = records(tmp_path / name)
    lengths = {name: {record["generated_tokens"] for record in own} for name, own in found.items()}
    assert lengths == {"usual": {24}, "longer": {40}, "shorter": {5}}  # a random backbone never ends its turn
    for shorter, usual, longer in zip(found["shorter"], found["usual"], found["longer"], strict=True):
        assert usual["prediction"].startswith(shorter["prediction"])
        assert longer["prediction"].startswith(usual["prediction"])


@pytest.mark.slow
def test_the_limit_is_part_of_the_configuration_only_where_it_was_given(evaluate: Any, tmp_path: Path) -> None:
    plans = [json.loads(evaluate("--dry-run", *flags)[1]) for flags in ((), ("--max-new-tokens", 300))]
    options = {"version": 2, "keys": 8, "digits": 7}
    assert [plan["config"]["tasks"]["multikey"] for plan in plans] == [options, {**options, "max_new_tokens": 300}]
    sizes = [plan["policies"][0]["planned_cache_bytes"] for plan in plans]
    assert sizes[1] > sizes[0]  # room for the answer is planned
    assert evaluate("--output", tmp_path)[0] == 0
    code, _, err = evaluate("--output", tmp_path, "--resume", "--max-new-tokens", 40)
    assert code == 2
    assert "holds an evaluation of another configuration (other tasks)" in err
