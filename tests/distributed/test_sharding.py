"""Two processes with a part of the backbone each leave what one process with the whole leaves, to the last bit."""

from __future__ import annotations

import json
import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from launches import ROOT, alone, done, finish, found, start
from safetensors.torch import load_file

pytestmark = pytest.mark.long
MODEL = ("--model", "checkpoints/tiny", "--heads", "checkpoints/tiny-heads")
TRAIN, EVAL, INFER = "locret.train.command", "locret.infer.evaluation.command", "locret.infer.command"
TIMES = ("prefill_seconds", "decode_seconds")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return rows whose lengths, and so numbers of chunks, differ by much."""
    draw, path = random.Random(0), tmp_path_factory.mktemp("rows") / "rows.json"
    words = ["the", "grass", "is", "green", "and", "sky", "blue", "sun", "yellow"]
    texts = [" ".join(draw.choice(words) for _ in range(20 + 90 * (n % 3))) for n in range(10)]
    made = [{"instruction": f"The key is {n}77. {t} The key?", "output": f"{n}77"} for n, t in enumerate(texts)]
    path.write_text(json.dumps(made))
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Return a pass key in as much text as a test takes."""
    whole, path = (ROOT / "recipes/infer/pass_key.txt").read_text(), tmp_path / "pass_key.txt"
    key = whole.index("pass key")
    path.write_text(whole[:1500] + whole[key - 300 : key + 600])
    return path


@pytest.mark.parametrize("shard", ["fsdp", pytest.param("zero3", marks=pytest.mark.engine)])
def test_parts_of_a_backbone_do_what_the_whole_does(shard: str, tmp_path: Path) -> None:
    if shard == "zero3" and find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    checks = found(shard, tmp_path, DS_ACCELERATOR="cpu")
    assert all(0.49 < share < 0.52 for share in checks["share"])
    assert checks["same"] == [True, True], "fingerprints, and where ids go"
    assert checks["train_step"] == [0.0, 0.0]
    for same in (*checks["read"], *checks["alone"], *checks["adapter"]):
        assert same["logits"] == 0.0
        assert same["kept"]
        assert same["kept_after"]
        assert same["tokens"][0] == same["tokens"][1]
        assert same["bytes"][0] == same["bytes"][2]


def test_training_leaves_the_heads_of_one_process(rows: Path, tmp_path: Path) -> None:
    line = (TRAIN, *MODEL[:2], "--dataset", rows, "--steps=3", "--warmup-steps=1", "--hidden-dim=16", "--log-every=1")
    line = (*line, "--eval-rows", 3, "--eval-every", 2, "--policy.budget=48", "--policy.chunk_size=64")  # an odd number
    alone(*line, "--gradient-accumulation", 2, "--output", tmp_path / "one")
    done("-m", *line, "--shard", "fsdp", "--output", tmp_path / "two")
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("one", "two")]
    assert configs[0]["base_weights"] == configs[1]["base_weights"] is not None


@pytest.mark.parametrize("shard", ["fsdp", "tp"])
def test_an_evaluation_an_answer_and_a_context_are_those_of_one_process(shard: str, tmp_path: Path, text: Path) -> None:
    line: tuple[Any, ...] = (EVAL, *MODEL, "--methods", "full,locret", "--tasks", "passkey", "--lengths", "200,500")
    line = (*line, "--samples", 2, "--budget", 64, "--chunk-size", 64, "--stabilizers", 16)
    alone(*line, "--output", tmp_path / "one")
    table = done("-m", *line, "--output", tmp_path / "two", "--shard", shard)
    assert table.count("| method |") == 1
    records = [(tmp_path / name / "samples.jsonl").read_text().splitlines() for name in ("one", "two")]
    one, two = ([{k: v for k, v in json.loads(r).items() if k not in TIMES} for r in lines] for lines in records)
    assert len(one) == 8
    for ours, theirs in zip(one, two, strict=True):
        different = {key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key)}
        assert different == ({"cache_bytes", "peak_bytes", "kv_ranks"} if shard == "tp" else set())
        assert shard == "fsdp" or ours["cache_bytes"] == 2 * theirs["cache_bytes"]
    text_options = ("--prompt-file", text, "--budget", 64, "--chunk-size", 128, "--device", "cpu")
    ask: tuple[Any, ...] = (INFER, *MODEL, "--question", "What is the pass key?", "--max-new-tokens", 12)
    assert alone(*ask, *text_options) == done("-m", *ask, *text_options, "--shard", shard)


def test_processes_with_different_options_are_one_sentence(rows: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\nfrom locret.cli.command import run\nfrom locret.train.command import command\n"
        "run(command, [*sys.argv[1:], '--alpha', '0.' + os.environ['RANK']], prog='locret-train')\n"
    )
    line = (program, *MODEL[:2], "--dataset", rows, "--output", tmp_path / "out", "--shard", "fsdp")
    code, _, err = finish(start(*line))
    assert code != 0
    assert err.count("--alpha is 0.0 in process 0 and 0.1 in process 1; start all processes with the same options") == 1
    assert not (tmp_path / "out").exists()
