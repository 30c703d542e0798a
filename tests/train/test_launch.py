"""Settings of accelerate's launcher that would override an option, or do nothing here, are refused in one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from training_cases import refused, train, train_arguments

from locret import RetainingHeads

SETTINGS = [
    (
        {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "3"},
        "is not what --gradient-accumulation says (1); unset it, or launch",
    ),
    ({"ACCELERATE_MIXED_PRECISION": "bf16"}, "is not what --mixed-precision says (no); unset it, or launch with"),
    ({"ACCELERATE_USE_DEEPSPEED": "true"}, "heads are not trained with DeepSpeed"),
    ({"ACCELERATE_USE_FSDP": "True"}, "heads are not trained with FSDP"),
    ({"ACCELERATE_USE_MEGATRON_LM": "1"}, "heads are not trained with Megatron-LM"),
    ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, "heads are not trained with a parallelism config"),
    ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "compiles nothing here"),
    ({"ACCELERATE_GRADIENT_CLIPPING": "1.0"}, "has no effect here; unset it and use --clip and --clip-limit"),
]


@pytest.mark.parametrize(("settings", "expected"), SETTINGS, ids=[next(iter(given)) for given, _ in SETTINGS])
def test_a_setting_that_does_something_else_here_is_refused(
    paths: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, str],
    expected: str,
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    code, message = refused(capsys, train_arguments(paths, tmp_path / "run"))
    assert (code, expected in message) == (2, True), message
    assert all(f"{name}={value}" in message for name, value in settings.items())
    assert not (tmp_path / "run").exists()


def test_settings_that_agree_are_fine(
    paths: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `accelerate launch` sets by itself, and a number that is the option's."""
    for name, value in {
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2",
        "ACCELERATE_MIXED_PRECISION": "no",
        "ACCELERATE_DYNAMO_BACKEND": "NO",
        "ACCELERATE_DYNAMO_MODE": "default",
        "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "False",
        "ACCELERATE_USE_CPU": "True",
    }.items():
        monkeypatch.setenv(name, value)
    assert train(paths, tmp_path / "run", "--gradient-accumulation=2", "--steps=2") == 0
    assert RetainingHeads.from_pretrained(tmp_path / "run").config.training["rows"] == 4  # type: ignore[index]


@pytest.mark.slow
def test_two_processes_that_accelerate_does_not_start_are_refused(paths: tuple[Path, Path], tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--module"]
    arguments = train_arguments(paths, tmp_path / "run")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MASTER_", "ACCELERATE"))}
    command = [*launch, "locret.train.command", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert "says that several processes were asked for, but only one was started" in done.stderr
    assert "torchrun --nproc-per-node N -m locret.train.command" in done.stderr
    assert not (tmp_path / "run").exists()
