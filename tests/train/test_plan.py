"""`locret-train --dataset LongAlpaca` is a complete command, and what cannot fit is refused before it is tried."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_server import HubServer, Repo
from training_cases import refused, train, train_arguments, write_backbone
from transformers import AutoConfig, LlamaConfig

from locret import RetainingHeads
from locret.backbone.adapters import describe
from locret.data.training.sources import ALIASES
from locret.loading.options import BackboneSource
from locret.policy.policy import RetentionPolicy
from locret.train.memory_plan import backbone_parameters, known_config, step_flops
from locret.train.training_options import BackboneOptions, Loss, RunOptions, default_output

PHI = "microsoft/Phi-3-mini-128k-instruct"


def published(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
def test_one_option_is_a_complete_command(tmp_path: Path) -> None:
    """The default backbone and data set come from the Hub, after the plan; the heads go to a named folder."""
    model = write_backbone(tmp_path / "model")
    rows = [{"instruction": f"The number of Oslo is {n}. What is it?", "output": f"It is {n}."} for n in range(20)]
    longalpaca = ALIASES["LongAlpaca"]
    with HubServer() as hub:
        hub.repos[PHI] = Repo(commits={"a" * 40: published(model)}, branches={"main": "a" * 40})
        weights = (model / "model.safetensors").read_bytes()
        hub.blobs[hashlib.sha256(weights).hexdigest()] = weights
        files = {longalpaca.files[0]: json.dumps(rows).encode()}
        hub.repos[f"datasets/{longalpaca.repo}"] = Repo(commits={longalpaca.revision: files})
        environment = {
            **os.environ,
            **hub.environment(),
            "HF_HOME": str(tmp_path / "home"),
            "ACCELERATE_USE_CPU": "true",
        }
        command = [sys.executable, "-m", "locret.train.command", "--dataset", "LongAlpaca"]
        run = {"capture_output": True, "text": True, "timeout": 200, "env": environment, "cwd": tmp_path}
        dry: Any = subprocess.run([*command, "--dry-run"], **run)
        assert dry.returncode == 0, dry.stderr[-2000:]
        assert hub.requests == []  # nothing is fetched for a plan
        assert "# an unknown number of rows\n" in dry.stdout
        assert "operations a step, 54 minutes for all steps on a GPU that does 1e+14 a second;" in dry.stdout
        done: Any = subprocess.run([*command, "--steps", "2"], **run)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (
        f"plan: 2 steps on LongAlpaca for {PHI}, into checkpoints/Phi-3-mini-128k-instruct-LongAlpaca-heads"
        in done.stderr
    )
    heads = RetainingHeads.from_pretrained(tmp_path / "checkpoints" / "Phi-3-mini-128k-instruct-LongAlpaca-heads")
    assert heads.config.base_model == PHI
    assert heads.config.training is not None
    assert heads.config.training["dataset"] == longalpaca.repo
    again: Any = subprocess.run([*command, "--steps", "2"], **{**run, "env": {**environment, "HF_HUB_OFFLINE": "1"}})
    assert again.returncode == 2
    assert "holds an earlier run; choose another folder, go on with --resume" in again.stderr


def test_the_default_backbone_is_the_one_that_the_default_policy_is_for() -> None:
    config = known_config(BackboneSource(model=BackboneOptions().model))
    shape = describe(config)
    assert (shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.head_dim) == (32, 32, 32, 96)
    assert shape.max_positions == 131072
    assert backbone_parameters(config) == 3_821_079_552  # as published
    assert RunOptions().policy == RetentionPolicy()
    assert known_config(BackboneSource(model=PHI, revision="main")) is None
    assert known_config(BackboneSource(model="another/backbone")) is None


def test_output_is_named_after_backbone_and_data() -> None:
    assert default_output("org/model-7b", "LongAlpaca") == "checkpoints/model-7b-LongAlpaca-heads"
    assert default_output("checkpoints/tiny/", "data/rows.jsonl") == "checkpoints/tiny-rows-heads"
    assert default_output("/a/b.1", "owner/set.v2") == "checkpoints/b.1-set.v2-heads"


def test_planned_operations_are_those_that_are_counted(paths: tuple[Path, Path]) -> None:
    """PyTorch counts a forward pass; attention is causal, so half of what it counts for it is done."""
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModel

    config = AutoConfig.from_pretrained(paths[0])
    model = AutoModel.from_pretrained(paths[0], attn_implementation="eager")
    tokens = 100
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, tokens, dtype=torch.long))
    shape = describe(config)
    attention = 4 * shape.num_layers * shape.num_heads * shape.head_dim * tokens**2
    planned = step_flops(config, backbone_parameters(config), 0, tokens)
    assert planned == pytest.approx(counter.get_total_flops() - attention / 2, rel=0.02)
    assert step_flops(LlamaConfig(num_local_experts=8), 1, 1, 1) is None


TOO_LARGE = [
    (["--hidden-dim=100000000000"], "--hidden-dim 100000000000 makes heads that take"),
    (["--steps=" + "9" * 30], "is not a whole number of 64 bits"),
    (["--gradient-accumulation=" + "9" * 30], "is not a whole number of 64 bits"),
    (["--seed=" + "9" * 30], "is not a whole number of 64 bits"),
]


@pytest.mark.parametrize(("more", "expected"), TOO_LARGE, ids=[more[0].partition("=")[0] for more, _ in TOO_LARGE])
def test_what_cannot_fit_is_refused(
    paths: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], expected: str
) -> None:
    code, message = refused(capsys, train_arguments(paths, tmp_path / "run", *more))
    assert (code, expected in message) == (2, True), message
    assert not (tmp_path / "run").exists()


def test_absurd_numbers_that_change_nothing_simply_work(
    paths: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--max-prompt-tokens=1000000000000", "--keep-checkpoints=1000000000000", "--log-every=1000000000000"]
    assert train(paths, tmp_path / "run", *options, "--steps=1") == 0
    assert "operations a step; the time it takes here" in capsys.readouterr().err  # nobody asks for a GPU here
    assert train(paths, tmp_path / "dry", "--steps=1000000000000000", "--dry-run") == 0
    assert " hours for all steps on a GPU that does 1e+14 a second; the time it takes here" in capsys.readouterr().out


def test_a_backbone_larger_than_the_device_is_refused_from_its_config(
    paths: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(paths[0], tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    config.update(hidden_size=2**17, intermediate_size=2**19, num_hidden_layers=400)
    (folder / "config.json").write_text(json.dumps(config))
    code, message = refused(capsys, train_arguments((folder, paths[1]), tmp_path / "run"))
    assert (code, "--model takes" in message, "choose a smaller backbone or --dtype" in message) == (2, True, True), (
        message
    )


NAMES = [
    (["--dataset=NoSuchSet", "--model=org/nowhere"], "--dataset NoSuchSet: no data set of that name"),
    (["--dataset="], "--dataset is missing; give LongAlpaca or another set"),
    (["--model=no/such/folder"], "--model no/such/folder: there is no such folder"),
    (["--output="], "--output is empty; give a value, or leave it out"),
    (["--report-to=tensorbord"], "--report-to tensorbord is unknown; choose tensorboard"),
    (["--report-to=none,tensorboard"], "contradicts itself; drop none or the others"),
]


@pytest.mark.parametrize(("more", "expected"), NAMES, ids=[more[0] for more, _ in NAMES])
def test_names_are_refused_before_the_network_is_asked(
    paths: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    hub: HubServer,
    more: list[str],
    expected: str,
) -> None:
    code, message = refused(capsys, train_arguments(paths, tmp_path / "run", *more))
    assert (code, expected in message) == (2, True), message
    assert hub.requests == []
    assert not (tmp_path / "run").exists()


def test_a_folder_that_wandb_left_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    importlib.invalidate_caches()
    with pytest.raises(ValueError, match="--report-to wandb needs a package that is not installed"):
        RunOptions(report_to="wandb")


def test_curves_go_where_they_are_asked_to(
    paths: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(paths, tmp_path / "none", "--report-to=none", "--steps=1") == 0
    assert not (tmp_path / "none" / "tensorboard").exists()
    assert len((tmp_path / "none" / "log.jsonl").read_text().splitlines()) == 1
    try:
        import wandb  # noqa: F401
    except ImportError:
        code, message = refused(capsys, train_arguments(paths, tmp_path / "run", "--report-to=tensorboard,wandb"))
        assert (code, "--report-to wandb needs a package that is not installed; pip install wandb" in message) == (
            2,
            True,
        )
    else:
        monkeypatch.setenv("WANDB_MODE", "offline")
        assert train(paths, tmp_path / "run", "--report-to=tensorboard,wandb", "--steps=2") == 0
        assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
        assert (tmp_path / "run" / "tensorboard").is_dir()


@pytest.mark.parametrize("field", ["alpha", "temperature"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1", None])
def test_a_loss_refuses_what_is_not_a_number(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field}=.* is not a finite number"):
        Loss(**{field: value})
