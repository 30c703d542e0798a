"""Commands under --shard tp in two processes leave what one process leaves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from launches import ROOT, environment, finish, start

pytestmark = pytest.mark.slow
MODEL, HEADS = "checkpoints/tiny", "checkpoints/tiny-heads"
INFER = "locret.infer.command"


def alone(*line: object) -> str:
    """Run a command in one process, and return what it printed."""
    command = [sys.executable, "-m", *map(str, line)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment(), timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def split(*line: object) -> tuple[int, str, str]:
    """Run it in two, which share the heads; return exit code, output and errors."""
    return finish(start("-m", *line, "--shard", "tp"))


def done(*line: object) -> str:
    code, out, err = split(*line)
    assert code == 0, err[-3000:]
    return out


def test_an_answer_and_a_context_are_those_of_one_process(tmp_path: Path) -> None:
    line: tuple[object, ...] = (INFER, "--model", MODEL, "--heads", HEADS, "--max-new-tokens", 12)
    line = (*line, "--device", "cpu", "--question", "What is the pass key?")
    read = (*line, "--prompt-file", "recipes/infer/pass_key.txt", "--budget", 128)
    assert done(*read, "--save-context", tmp_path / "two.ctx") == alone(*read, "--save-context", tmp_path / "one.ctx")
    asked = [alone(*line, "--context", tmp_path / name) for name in ("one.ctx", "two.ctx")]
    assert asked[0] == asked[1] == done(*line, "--context", tmp_path / "one.ctx")
