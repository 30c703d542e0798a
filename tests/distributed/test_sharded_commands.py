"""Commands under --shard fsdp in two processes leave what one process leaves, and say one sentence when one dies."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from launches import alone, done, finish, short_text, start
from safetensors.torch import load_file

pytestmark = pytest.mark.slow
MODEL, HEADS = "checkpoints/tiny", "checkpoints/tiny-heads"
TRAIN, EVAL, INFER = "locret.train.command", "locret.infer.evaluation.command", "locret.infer.command"
TIMES = ("prefill_seconds", "decode_seconds")
POLICY = ("--policy.budget=48", "--policy.chunk_size=64", "--policy.stabilizers=8", "--policy.local_len=8")


def sharded(*line: object) -> str:
    """Run it in two, each with half of the backbone."""
    return done("-m", *line, "--shard", "fsdp")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return rows whose lengths, and so numbers of chunks, differ by much."""
    draw, path = random.Random(0), tmp_path_factory.mktemp("rows") / "rows.json"
    words = ["the", "grass", "is", "green", "and", "sky", "blue", "sun", "yellow"]
    texts = [" ".join(draw.choice(words) for _ in range(20 + 90 * (n % 3))) for n in range(10)]
    path.write_text(
        json.dumps(
            [{"instruction": f"The key is {n}77. {t} The key?", "output": f"{n}77"} for n, t in enumerate(texts)]
        )
    )
    return path


def test_training_leaves_the_heads_of_one_process(rows: Path, tmp_path: Path) -> None:
    line = (TRAIN, "--model", MODEL, "--dataset", rows, "--steps", 3, "--warmup-steps", 1, "--hidden-dim", 16)
    line = (
        *line,
        "--log-every",
        1,
        "--eval-rows",
        3,
        "--eval-every",
        2,
        *POLICY,
    )  # an odd number of rows held out
    alone(*line, "--gradient-accumulation", 2, "--output", tmp_path / "one")
    sharded(*line, "--output", tmp_path / "two")
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    (first, *rest), (other, *others) = (logged(tmp_path / name) for name in ("one", "two"))
    assert first == other
    assert [record["total"] for record in rest] == pytest.approx([record["total"] for record in others], abs=1e-6)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("one", "two")]
    assert configs[0]["base_weights"] == configs[1]["base_weights"] is not None


def logged(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_an_evaluation_and_an_answer_are_those_of_one_process(tmp_path: Path) -> None:
    line = (EVAL, "--model", MODEL, "--heads", HEADS, "--methods", "full,locret,snapkv", "--tasks", "passkey")
    line = (*line, "--lengths", "200,500", "--samples", 2, "--budget", 64, "--chunk-size", 64, "--stabilizers", 16)
    alone(*line, "--local-len", 8, "--output", tmp_path / "one")
    table = sharded(*line, "--local-len", 8, "--output", tmp_path / "two")
    records = [(tmp_path / name / "samples.jsonl").read_text().splitlines() for name in ("one", "two")]
    one, two = ([{k: v for k, v in json.loads(r).items() if k not in TIMES} for r in found] for found in records)
    assert len(one) == 12
    assert one == two
    assert table.count("| method |") == 1
    assert len(list((tmp_path / "two").glob("*.png"))) == len(list((tmp_path / "one").glob("*.png")))
    ask = (INFER, "--model", MODEL, "--heads", HEADS, "--prompt-file", short_text(tmp_path), "--budget", 64)
    ask = (*ask, "--question", "What is the pass key?", "--chunk-size", 128, "--max-new-tokens", 12, "--device", "cpu")
    assert sharded(*ask) == alone(*ask)


def children(launcher: int) -> list[psutil.Process]:
    return [one for one in psutil.Process(launcher).children() if TRAIN in one.cmdline()]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_dies_ends_the_other_with_one_sentence(victim: int, rows: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    line = ("-m", TRAIN, "--model", MODEL, "--dataset", rows, "--output", out, "--steps", 10000, "--hidden-dim", 16)
    running = start(*line, "--warmup-steps", 1, "--log-every", 1, "--shard", "fsdp")
    try:
        deadline, log = time.monotonic() + 120, out / "log.jsonl"
        # Once there is a record, both processes save what they have when a launcher interrupts them.
        while time.monotonic() < deadline and not (log.is_file() and log.stat().st_size) and running.poll() is None:
            time.sleep(0.1)
        assert log.stat().st_size
        ranks = {one.environ()["RANK"]: one for one in children(running.pid)}
        os.kill(ranks[str(victim)].pid, signal.SIGKILL)
        killed = time.monotonic()
        code, _, err = finish(running, 60)
        assert time.monotonic() - killed < 60
        assert code != 0
        said = f"locret-train: process {victim} of 2 has ended early; --resume goes on from the last checkpoint"
        # Where torchrun sees the death before the other process waits for the dead one, it ends that one, which leaves
        # the line to process 0 and the death to torchrun's own report.
        ended = re.search(rf"rank +: {1 - victim} .*\n +exitcode +: 143 ", err) is not None
        assert err.count(said) == (not ended), err[-3000:]
        assert err.count("locret-train: interrupted") == (ended and victim == 1), err[-3000:]
        assert 'train/command.py", line' not in err
    finally:
        running.terminate()


def test_processes_with_other_options_are_refused(rows: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\nfrom locret.cli.command import run\nfrom locret.train.command import command\n"
        "run(command, [*sys.argv[1:], '--alpha', '0.' + os.environ['RANK']], prog='locret-train')\n"
    )
    line = (program, "--model", MODEL, "--dataset", rows, "--output", tmp_path / "out", "--shard", "fsdp")
    code, _, err = finish(start(*line))
    assert code != 0
    assert err.count("--alpha is 0.0 in process 0 and 0.1 in process 1; start all processes with the same options") == 1
    assert not (tmp_path / "out").exists()
