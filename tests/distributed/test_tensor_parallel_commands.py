"""Commands under --shard tp in two processes leave what one process leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
from launches import done, short_text

pytestmark = pytest.mark.slow
MODEL, HEADS = "checkpoints/tiny", "checkpoints/tiny-heads"
INFER = "locret.infer.command"


def alone(*line: object) -> str:
    """Run a command in one process, and return what it printed."""
    return done("-m", *line, processes=1)


def split(*line: object) -> str:
    """Run it in two, which share the heads."""
    return done("-m", *line, "--shard", "tp")


def test_an_answer_and_a_context_are_those_of_one_process(tmp_path: Path) -> None:
    line: tuple[object, ...] = (INFER, "--model", MODEL, "--heads", HEADS, "--max-new-tokens", 12)
    line = (*line, "--device", "cpu", "--question", "What is the pass key?")
    read = (*line, "--prompt-file", short_text(tmp_path), "--budget", 128)
    assert split(*read, "--save-context", tmp_path / "two.ctx") == alone(*read, "--save-context", tmp_path / "one.ctx")
    asked = [alone(*line, "--context", tmp_path / name) for name in ("one.ctx", "two.ctx")]
    assert asked[0] == asked[1] == split(*line, "--context", tmp_path / "one.ctx")
