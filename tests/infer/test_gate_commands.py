"""Gates that others published are methods of every command, from a folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig

sys.path.append(str(Path(__file__).parents[1] / "core"))
import gate_folders

from locret.infer.command import command as infer
from locret.infer.evaluation.command import command as evaluate
from locret.infer.speed.command import command as bench

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "checkpoints" / "tiny")
NAMES = {"kvzap-linear": "kvzap", "fast-kvzip": "fast_kvzip", "dms": "dms"}
SMALL = ["--budget", "64", "--chunk-size", "64"]


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Each method with a gate for the embedded backbone."""
    folder, config = tmp_path_factory.mktemp("gates"), AutoConfig.from_pretrained(TINY)
    for gate in NAMES:
        gate_folders.write(gate, folder / gate, config)
    return [f"{name}:path={folder / gate}" for gate, name in NAMES.items()]


def test_gates_read_a_text_and_are_evaluated_and_timed_beside_others(
    specs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("The tower has twelve steps. " * 40)
    for spec in specs:
        flags = ["--model", TINY, "--scorer", spec, "--prompt-file", str(tmp_path / "text.txt"), *SMALL]
        assert infer([*flags, "--max-new-tokens", "3", "--json"]) == 0
        record = json.loads(capsys.readouterr().out)
        assert record["scorer"]["name" if isinstance(record["scorer"], dict) else 0]
    flags = ["--model", TINY, "--methods", ",".join([*specs, f"{specs[0]}+adaptive_heads"]), *SMALL]
    flags += ["--tasks", "passkey", "--lengths", "200", "--samples", "1", "--figures", "none", "--output"]
    assert evaluate([*flags, str(tmp_path / "evaluation")]) == 0
    table = (tmp_path / "evaluation" / "results.md").read_text()
    assert all(spec in table for spec in specs)
    assert bench(["--model", TINY, "--methods", specs[0], "--lengths", "200", *SMALL, "--dry-run"]) == 0
