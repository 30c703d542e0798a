"""Commands under --shard tp in two processes leave what one process leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import launches
import pytest
from launches import alone, finish, short_text, start
from safetensors.torch import load_file

pytestmark = pytest.mark.slow
MODEL, HEADS = "checkpoints/tiny", "checkpoints/tiny-heads"
TRAIN, EVAL, INFER = "locret.train.command", "locret.infer.evaluation.command", "locret.infer.command"
CLOSE = 1e-6
TIED = 0.02
"""How far overlaps may be apart: of a short row's few best tokens, two that are almost equal may change places."""
MEASURED = {"tokens_per_second", "memory_bytes"}


def split(*line: object) -> tuple[int, str, str]:
    """Run it in two, which share the heads; return exit code, output and errors."""
    return finish(start("-m", *line, "--shard", "tp"))


def done(*line: object) -> str:
    return launches.done("-m", *line, "--shard", "tp")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.json"
    texts = [
        {"instruction": f"The key is {n}77. {'Grass is green. ' * (5 * n)}?", "output": f"{n}77"} for n in range(9)
    ]
    path.write_text(json.dumps(texts))
    return path


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def weights(folder: Path) -> dict[str, Any]:
    return load_file(folder / "model.safetensors")


def assert_same_heads(one: Path, other: Path) -> None:
    first, second = weights(one), weights(other)
    assert list(first) == list(second)
    assert max(float((first[name] - second[name]).abs().max()) for name in first) < CLOSE


def test_training_leaves_the_heads_of_one_process_and_goes_on_with_any_number(rows: Path, tmp_path: Path) -> None:
    line: tuple[object, ...] = (TRAIN, "--model", MODEL, "--dataset", rows, "--hidden-dim", 16, "--steps", 4)
    line = (*line, "--save-every", 2, "--log-every", 1, "--eval-rows", 2, "--clip", "norm", "--clip-limit", 0.01)
    alone(*line, "--output", tmp_path / "one")
    done(*line, "--output", tmp_path / "two")
    assert_same_heads(tmp_path / "one", tmp_path / "two")
    for first, second in zip(*(records(tmp_path / name / "log.jsonl") for name in ("one", "two")), strict=True):
        assert set(first) == set(second)
        for name in set(first) - MEASURED:
            near = TIED if "overlap" in name else 1e-5
            assert first[name] == pytest.approx(second[name], abs=near), f"{name}: everything is counted once"
    alone(TRAIN, "--resume", tmp_path / "two" / "checkpoint-2", "--output", tmp_path / "then-one")
    done(*line, "--resume", tmp_path / "one" / "checkpoint-2", "--output", tmp_path / "then-two")
    for name in ("then-one", "then-two"):
        assert_same_heads(tmp_path / "one", tmp_path / name)


def test_an_answer_and_a_context_are_those_of_one_process(tmp_path: Path) -> None:
    line: tuple[object, ...] = (INFER, "--model", MODEL, "--heads", HEADS, "--max-new-tokens", 12)
    line = (*line, "--device", "cpu", "--question", "What is the pass key?")
    read = (*line, "--prompt-file", short_text(tmp_path), "--budget", 128)
    assert done(*read, "--save-context", tmp_path / "two.ctx") == alone(*read, "--save-context", tmp_path / "one.ctx")
    asked = [alone(*line, "--context", tmp_path / name) for name in ("one.ctx", "two.ctx")]
    assert asked[0] == asked[1] == done(*line, "--context", tmp_path / "one.ctx")


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
