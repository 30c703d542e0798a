"""The program of the lab that times sparse attention to a chunk beside dense attention."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from locret.infer.speed.lab import sparse_attention

SMALL = [
    "--shape",
    "tiny",
    "--tokens",
    "128",
    "--slots",
    "128,300",
    "--head-dim",
    "16",
    "--query-heads",
    "2",
    "--repeats=1",
]


def test_the_record_has_time_share_and_error_of_every_strategy(tmp_path: Path) -> None:
    specs = ["a_shape:sinks=4,window=64", "xattention:threshold=0.5,block=32"]
    out = tmp_path / "record"
    assert sparse_attention.command([*SMALL, "--strategies", " ".join(specs), "--output", str(out)]) == 0
    found = json.loads(out.with_suffix(".json").read_text())["found"]
    assert [(one["slots"], one["strategy"]) for one in found] == [(n, spec) for n in (128, 300) for spec in specs]
    assert all(0 < one["share"] <= 1 and one["ratio"]["p50"] > 0 for one in found)
    # What is left out changes the output, and nothing is left out where everything is chosen.
    assert all((one["error"] > 1e-4) == (one["share"] < 1) for one in found)
    assert min(one["share"] for one in found) < 0.7
    assert "| xattention:threshold=0.5,block=32 |" in out.with_suffix(".md").read_text()


@pytest.mark.parametrize(
    ("options", "about"),
    [
        (["--slots", "100"], "--slots 100: give numbers from --tokens 128 on"),
        (["--strategies", "dense"], "--strategies dense is what the others are compared with"),
        (["--strategies", "xatention"], "did you mean xattention"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: list[str], about: str) -> None:
    with pytest.raises(ValueError, match=about):
        sparse_attention.command([*SMALL, *options])
