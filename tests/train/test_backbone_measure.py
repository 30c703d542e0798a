"""What a trained backbone answers exactly, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from checkpoints.build.measure import command

TINY = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny"


@pytest.mark.parametrize("named", ["[passkey,multikey]", "passkey,multikey"])
def test_the_command_prints_shares_by_task_and_length(named: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--model", str(TINY), "--tasks", named, "--tokens", "300,400", "--samples", "2"]
    assert command(asked) == 0
    lengths = {"300": 1.0, "400": 1.0}
    assert json.loads(capsys.readouterr().out) == {"passkey": lengths, "multikey": lengths}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tasks", "[passky]"], '"passky".*did you mean passkey'),
        (["--device", "tpu"], "--device tpu"),
        (["--samples", "0"], "--samples 0 is too small; give 1 or more"),
        (["--tokens", "1km"], "--tokens 1km is not a list of whole numbers; write it like 256,128"),
        (["--tokens", "0,5"], "--tokens 0,5 holds a prompt without tokens; give 1 or more"),
        (["--tasks", "longbench/qasper"], "--tasks longbench/qasper has texts of its own"),
        (
            ["--tasks", "passkey,lookalikes/keys", "--tokens", "300,120"],
            "sample 1 of 100 of lookalikes/keys cannot be made of --tokens 120",
        ),
        (["--model", "checkpoints/nothing"], "--model checkpoints/nothing"),
        (["--model", "checkpoints/tiny-heads"], "holds retaining heads; give them as --heads"),
    ],
)
def test_what_cannot_be_measured_is_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        command([*([] if "--model" in flags else ["--model", str(TINY)]), *flags])
