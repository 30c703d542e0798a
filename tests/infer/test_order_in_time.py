"""Which of several is the newest: a backbone tells it by distances, which ranks among the kept units take away."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from eval_runs import records

from locret import shipped
from locret.infer.evaluation.command import command


@pytest.mark.slow
def test_the_newest_of_several_is_found_by_positions_in_the_text_and_not_by_ranks(tmp_path: Path) -> None:
    line = ("--model", shipped.find("checkpoints/world"), "--heads", shipped.find("checkpoints/world-heads"))
    line += ("--methods", "full,locret,locret+original,expected_attention,expected_attention+compact")
    line += (
        "--tasks",
        "world/latest",
        "--lengths",
        "1024",
        "--samples",
        "6",
        "--questions",
        "4",
        "--protocol",
        "agnostic",
    )
    line += ("--budget", "64", "--chunk-size", "128", "--stabilizers", "8", "--local-len", "8", "--batch-size", "8")
    command([*map(str, line), "--figures", "none", "--quiet", "--output", str(tmp_path / "run")])
    found: dict[str, list[float]] = {}
    for one in records(tmp_path / "run"):
        found.setdefault(one["method"], []).append(one["score"])
    right = {method: statistics.fmean(scores) for method, scores in found.items()}
    assert right["locret+original"] >= right["full"] - 0.1, "the units are there"
    for method, other in (("locret+original", "locret"), ("expected_attention", "expected_attention+compact")):
        assert right[method] >= right[other] + 0.15, right
