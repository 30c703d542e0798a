"""What `locret-bench` measures on a GPU comes from the device's own allocator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from locret.infer.speed.command import command

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; none is here"),
]
FLAGS = ["--shape", "cpu-512", "--device", "cuda", "--dtype", "bfloat16", "--repeats", "2", "--quiet"]


def measured(folder: Path, *flags: str) -> dict[tuple[str, int], Any]:
    assert command([*FLAGS, *flags, "--output", str(folder / "record")]) == 0
    record = json.loads((folder / "record.json").read_text())
    assert record["machine"]["matmul_flops_per_second"]["p50"] > 1e12
    return {(row["method"], row["length"]): row for row in record["results"]}


def test_peaks_of_the_device_hold_what_is_planned_and_stay_flat(tmp_path: Path) -> None:
    rows = measured(tmp_path, "--lengths", "8K,32K", "--methods", "full,floor,locret")
    for row in rows.values():
        assert row["error"] is None
        assert row["planned_bytes"]["weights"] < row["bytes"]["peak"]
        assert row["bytes"]["cache"] <= row["planned_bytes"]["cache"]
    short, long = (rows["locret", length]["bytes"]["peak"] for length in (8192, 32768))
    assert long <= 1.01 * short
    small, large = (rows["full", length]["planned_bytes"]["cache"] for length in (8192, 32768))
    assert large > 3.9 * small


def test_what_does_not_fit_is_out_of_memory_and_the_rest_is_measured(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    request.addfinalizer(lambda: torch.cuda.set_per_process_memory_fraction(1.0, 0))
    torch.cuda.set_per_process_memory_fraction(2**30 / total, 0)
    rows = measured(tmp_path, "--lengths", "256K", "--methods", "full,locret")
    assert rows["full", 262144]["error"] == "out of memory"
    assert rows["full", 262144]["prefill"] is None
    assert rows["locret", 262144]["error"] is None
    assert rows["locret", 262144]["bytes"]["peak"] <= 2**30
