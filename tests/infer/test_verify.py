"""`locret-verify`: no false alarm on any family, and the command's own manners."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from locret.infer.verify import command, verify
from locret.infer.verify.suite import CHECKS

sys.path.append(str(Path(__file__).parents[1] / "core"))

from families import FAMILIES, build

TINY = ["--model", "checkpoints/tiny", "--heads", "checkpoints/tiny-heads"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_raises_a_false_alarm(family: str, dtype: torch.dtype) -> None:
    report = verify(build(family).to(dtype), "snapkv", tokens=128)
    assert report.ok, report.table()
    assert {row.check for row in report.rows} == {check.name for check in CHECKS}


def test_the_embedded_pair_passes_and_leaves_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.command([*TINY, "--quick", "--quiet", "--json", "--output", str(tmp_path / "record")]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["ok"]
    assert json.loads((tmp_path / "record" / "verify.json").read_text()) == shown
    assert "FAILED" not in (tmp_path / "record" / "verify.md").read_text()
