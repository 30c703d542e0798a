"""Commands under --shard tp in two processes leave what one process leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import launches
import pytest
from launches import alone, finish, short_text, start

pytestmark = pytest.mark.slow
MODEL, HEADS = "checkpoints/tiny", "checkpoints/tiny-heads"
EVAL, INFER = "locret.infer.evaluation.command", "locret.infer.command"


def split(*line: object) -> tuple[int, str, str]:
    """Run it in two, which share the heads; return exit code, output and errors."""
    return finish(start("-m", *line, "--shard", "tp"))


def done(*line: object) -> str:
    return launches.done("-m", *line, "--shard", "tp")


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_answer_is_that_of_one_process(tmp_path: Path) -> None:
    line: tuple[object, ...] = (INFER, "--model", MODEL, "--heads", HEADS, "--max-new-tokens", 12)
    line = (*line, "--device", "cpu", "--question", "What is the pass key?")
    read = (*line, "--prompt-file", short_text(tmp_path), "--budget", 128)
    assert done(*read) == alone(*read)


def test_an_evaluation_is_that_of_one_process(tmp_path: Path) -> None:
    line: tuple[object, ...] = (EVAL, "--model", MODEL, "--heads", HEADS, "--methods", "full,locret")
    line = (*line, "--tasks", "passkey", "--lengths", "300", "--samples", 1, "--budget", 64, "--chunk-size", 64)
    line = (*line, "--stabilizers", 16, "--local-len", 8, "--figures", "none")
    alone(*line, "--output", tmp_path / "one")
    table = done(*line, "--output", tmp_path / "two")
    assert table.count("| method |") == 1
    assert "of 2 processes that share the KV heads: bytes are those of one" in table
    found = [records(tmp_path / name / "samples.jsonl") for name in ("one", "two")]
    assert len(found[0]) == len(found[1]) == 2
    for ours, theirs in zip(*found, strict=True):
        different = {key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key)}
        assert different - {"prefill_seconds", "decode_seconds"} == {"cache_bytes", "peak_bytes", "kv_ranks"}
        assert theirs["kv_ranks"] == 2
        assert ours["cache_bytes"] == 2 * theirs["cache_bytes"]
        assert ours["peak_bytes"] == 2 * theirs["peak_bytes"]


def test_what_cannot_be_is_refused_in_a_sentence() -> None:
    line = (INFER, "--model", MODEL, "--heads", HEADS, "--prompt-file", "recipes/infer/pass_key.txt", "--question", "?")
    code, out, err = split(*line, "--budget", 128, "--head-budgets", "adaptive")
    assert code != 0
    assert out == ""
    said = [line for line in err.splitlines() if line.startswith("locret-infer: ")]
    assert said
    reason = 'head_budgets="adaptive" lets all heads of a layer compete'
    assert all(reason in line for line in said), "one sentence, and no trace of the program"
