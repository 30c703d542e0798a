"""The demonstration: it trains, evaluates, draws, and fails where trained heads fail."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from locret import RetainingHeads
from locret.infer.demo import DemoOptions, first_answer, shares, typed, verdict

TRAINING = """
model: ignored
dataset: ignored
hidden_dim: 8
steps: 3
policy: {budget: 32, chunk_size: 32, stabilizers: 8, local_len: 16}
"""
EVALUATION = """
methods: [full, locret, untrained]
tasks: [passkey]
lengths: 512
model: ignored
"""

SHIPPED = """
methods: [full, locret, untrained]
tasks: [passkey]
lengths: [512, 1024]
budget: [64, 128]
model: ignored
"""
TINY = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny"


@pytest.mark.slow
def test_demo_trains_heads_and_fails_where_the_backbone_finds_nothing(
    demo: Callable[..., Any], backbone: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="the pictures need locret[eval]")
    (tmp_path / "train.yaml").write_text(TRAINING)
    (tmp_path / "eval.yaml").write_text(EVALUATION)
    recipes = ("--recipe", tmp_path / "train.yaml", "--evaluation", tmp_path / "eval.yaml")
    training = ("--rows", 3, "--steps", 3, "--row-tokens", 512)
    output = tmp_path / "demo"
    outcome = demo("--model", backbone, "--output", output, "--samples", 2, *recipes, *training)
    assert outcome.code == 1, outcome.err
    assert "$ locret-train --config" in outcome.out
    assert "$ locret-eval --config" in outcome.out
    assert "trained heads should keep at least 50% of the full cache's score" in outcome.out
    assert RetainingHeads.from_pretrained(output / "training").config.policy["budget"] == 32
    table = (output / "evaluation" / "results.md").read_text()
    assert all(f"| {method} |" in table for method in ("full", "locret", "untrained"))
    assert (output / "evaluation" / "heat_map_passkey.png").read_bytes().startswith(b"\x89PNG")
    assert "pass key" in (output / "text.txt").read_text()


@pytest.mark.slow
def test_demo_ends_with_the_table_and_the_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the pictures need locret[eval]")
    (tmp_path / "eval.yaml").write_text(SHIPPED)
    command = [sys.executable, "-m", "locret.infer.demo", "--model", str(TINY), "--heads", f"{TINY}-heads"]
    command += ["--evaluation", str(tmp_path / "eval.yaml"), "--samples", "2", "--output", str(tmp_path / "demo")]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert "$ locret-train" not in outcome.stdout
    folder = tmp_path / "demo" / "evaluation"
    assert (folder / "results.md").read_text().strip() in outcome.stdout
    pictures = {path.name for path in folder.glob("*.png")}
    assert {"accuracy_by_budget.png", "heat_map_passkey.png"} <= pictures
    shown = [line.removeprefix("picture: ") for line in outcome.stdout.splitlines() if line.startswith("picture: ")]
    assert sorted(shown) == sorted(str(folder / name) for name in pictures)


def test_demo_without_a_backbone_says_what_to_give(demo: Callable[..., Any], tmp_path: Path) -> None:
    outcome = demo("--model", tmp_path, "--output", tmp_path / "out")
    assert outcome.code == 2
    assert "holds no backbone; give a folder with one, or leave --model out" in outcome.err
    assert not (tmp_path / "out").exists()


def test_the_first_answer_comes_without_a_warning(recwarn: pytest.WarningsRecorder, capsys: Any) -> None:
    first_answer()
    assert "What is the pass key? " in capsys.readouterr().out
    assert [str(one.message) for one in recwarn if "embedded backbone" in str(one.message)] == []


def test_a_command_that_is_not_on_path_is_named_with_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / ".venv" / "bin" / "locret-infer"
    script.parent.mkdir(parents=True)
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(script.with_name("python")))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert typed("locret-infer") == ".venv/bin/locret-infer"
    assert typed("locret-other") == "locret-other"
    monkeypatch.setenv("PATH", str(script.parent))
    assert typed("locret-infer") == "locret-infer"


def test_demo_refuses_to_train_nothing() -> None:
    with pytest.raises(ValueError, match="--steps 0 is too small; give 1 or more"):
        DemoOptions(steps=0)


def test_the_verdict_compares_means_over_tasks() -> None:
    cells = [
        {"method": method, "score": score}
        for method, scores in {"full": (100, 80), "locret": (90, 60), "untrained": (0, 10)}.items()
        for score in scores
    ]
    scores = shares({"cells": cells})
    assert scores == {"full": 90, "locret": 75, "untrained": 5}
    assert verdict(scores, 0.8) is None
    assert verdict(scores, 0.9) is not None
    assert verdict({**scores, "untrained": 80}, 0.5) is not None
    assert verdict({"full": 0, "locret": 0, "untrained": 0}, 0.5) is not None
