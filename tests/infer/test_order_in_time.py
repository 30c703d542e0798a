"""Which of several statements is the newest: what heads keep is enough to tell, by ranks as by places in the text."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from eval_runs import records

from locret import shipped
from locret.infer.evaluation.command import command


@pytest.mark.slow
def test_the_newest_of_several_is_found_among_kept_units(tmp_path: Path) -> None:
    line = ["--model", shipped.find("checkpoints/world"), "--heads", shipped.find("checkpoints/world-heads")]
    line += ["--methods", "full,locret,locret+original,random", "--tasks", "world/latest", "--lengths", "1024"]
    line += ["--samples", "6", "--questions", "4", "--protocol", "agnostic", "--budget", "64", "--chunk-size", "128"]
    line += ["--stabilizers", "8", "--local-len", "8", "--batch-size", "8"]
    command([*map(str, line), "--figures", "none", "--quiet", "--output", str(tmp_path / "run")])
    found: dict[str, list[float]] = {}
    for one in records(tmp_path / "run"):
        found.setdefault(one["method"], []).append(one["score"])
    right = {method: statistics.fmean(scores) for method, scores in found.items()}
    assert right["full"] >= 0.9, right
    assert min(right["locret"], right["locret+original"]) >= right["full"] - 0.1, right
    assert right["random"] <= 0.3, right
