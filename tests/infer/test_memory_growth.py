"""The benchmark of growing memory counts what is really allocated, and says what is really planned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from locret.backbone.instrument import NAME, locret_attention
from locret.infer.speed.allocations import marked, peak_bytes
from locret.infer.speed.lab import memory_growth as benchmark
from locret.infer.speed.lab.memory_growth import GrowthOptions, planned

MIB = 2**20


def test_marked_allocations_count_until_they_are_freed_and_the_peak_is_of_one_moment() -> None:
    before = torch.empty(8 * MIB, dtype=torch.uint8)

    def side() -> None:
        nonlocal before
        del before  # memory from before lowers nothing
        with marked():
            kept = torch.empty(MIB, dtype=torch.uint8)
        torch.empty(4 * MIB, dtype=torch.uint8)
        with marked():
            more = torch.empty(2 * MIB, dtype=torch.uint8)
        del kept, more
        with marked():
            torch.empty(MIB, dtype=torch.uint8)

    peaks = peak_bytes(side)
    assert peaks.marked == pytest.approx(3 * MIB, rel=0.01)
    assert peaks.everything == pytest.approx(5 * MIB, rel=0.01)


def plans(**numbers: int) -> dict[str, dict[str, object]]:
    usual = {"tokens": 8256, "budget": 512, "chunk_size": 128, "min_chunk": 64, "stabilizers": 64, "local_len": 64}
    return planned(*GrowthOptions(**{**usual, **numbers}).all_plans(set()))


def test_plans_say_what_every_pass_attends_to() -> None:
    found = plans(budget=128, min_chunk=16)
    for plan in found.values():
        assert sum(plan["tokens"]) == 8256
        assert plan["chunks"] == 64
    assert set(found["fixed"]["attended"][1:-1]) == {256}  # m_max + c
    assert set(found["linear+decremental"]["attended"][1:-1]) <= {191, 192}  # c + mean of the memory sizes before
    assert found["linear"]["attended"][1:-1] == sorted(found["linear"]["attended"][1:-1])
    # As many tokens times as many units as with equal chunks: what shrinking them saves is the peak.
    assert found["linear+decremental"]["work"] == found["linear"]["work"] < found["fixed"]["work"]
    assert found["linear+decremental"]["peak_units"] < 0.8 * found["linear"]["peak_units"]


def test_with_a_budget_of_four_chunks_the_peak_falls_but_the_largest_pass_grows() -> None:
    found = plans(min_chunk=16, local_len=16, tokens=8208)
    fixed, shrinking = found["fixed"], found["linear+decremental"]
    assert (fixed["peak_units"], shrinking["peak_units"]) == (640, 528)
    assert shrinking["smallest_chunk"] == 16
    assert shrinking["largest_matrix"] > fixed["largest_matrix"]


@pytest.mark.parametrize("plan", ["cubic", "linear+cubic"])
def test_an_unknown_plan_is_named(plan: str) -> None:
    with pytest.raises(ValueError, match=r"\+cubic is unknown; did you mean"):
        GrowthOptions(plans=plan).all_plans(set())


@pytest.mark.parametrize("scorer", ["h2o", "locret"])
@pytest.mark.slow
def test_a_record_holds_ratios_bytes_and_plans_of_real_reads(tmp_path: Path, backbone: Path, scorer: str) -> None:
    numbers = ["--tokens", "136", "--budget", "16", "--chunk-size", "16", "--min-chunk", "4", "--stabilizers", "4"]
    more = ["--local-len", "8", "--repeats", "2", "--output", str(tmp_path / "record")]
    more += ["--hidden-dim", "8"] if scorer == "locret" else []
    assert benchmark.command(["--model", str(backbone), "--scorer", scorer, *numbers, *more]) == 0
    record = json.loads((tmp_path / "record.json").read_text())
    assert set(record["ratios"]) == {"fixed/linear", "fixed/sqrt", "fixed/linear+decremental"}
    assert all(0 < ratio["p20"] <= ratio["p50"] <= ratio["p80"] for ratio in record["ratios"].values())
    for name, held in record["bytes"].items():
        # 2 layers and 2 KV heads; keys and values of 8 float32, a score and a position; rotated keys or scratch.
        slots = record["plans"][name]["peak_units"]
        assert held["cache"] == slots * 2 * (2 * (2 * 32 + 8) + 32)
        assert held["cache"] < held["cache + attention"] < held["everything"]
    page = (tmp_path / "record.md").read_text()
    assert "| linear+decremental | 8 |" in page
    assert f"--scorer {scorer} " in page
    # The attention that everybody else uses is back.
    from transformers import AttentionInterface

    assert AttentionInterface()[NAME] is locret_attention
