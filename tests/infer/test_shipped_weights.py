"""The shipped heads keep what the shipped backbone needs, within a budget where other methods lose it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from locret.infer.evaluation.command import command

CHECKPOINTS = Path(__file__).resolve().parents[2] / "checkpoints"
SAMPLES = 4


@pytest.mark.slow
@pytest.mark.parametrize("task", ["passkey", "number"])
def test_shipped_heads_answer_what_the_full_cache_answers_and_other_methods_do_not(task: str, tmp_path: Path) -> None:
    weights = ["--model", CHECKPOINTS / "tiny", "--heads", CHECKPOINTS / "tiny-heads", "--device", "cpu"]
    methods = ["--methods", "full,locret,untrained,random,streaming", "--budget", 128]
    texts = ["--tasks", task, "--lengths", 2048, "--samples", SAMPLES]
    rest = ["--dtype", "float32", "--threads", 1, "--figures", "none", "--quiet", "--output", tmp_path / "out"]
    assert command([str(argument) for argument in [*weights, *methods, *texts, *rest]]) == 0
    cells = json.loads((tmp_path / "out" / "results.json").read_text())["cells"]
    right = {cell["method"]: cell["score"] / 100 * SAMPLES for cell in cells}
    # 3 or 4, as many, and at most 1 of 4 were right when this was written; one more may differ on another machine.
    assert right["full"] >= SAMPLES - 2
    assert right["locret"] >= SAMPLES - 2
    assert max(right["untrained"], right["random"], right["streaming"]) <= 1
