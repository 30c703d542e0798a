"""A record says what was measured, and "unknown" where nothing was."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from locret.infer.speed import machine
from locret.infer.speed.bench_options import BenchOptions
from locret.infer.speed.command import command
from locret.infer.speed.machine import MachineRates
from locret.infer.speed.measure import Measurements, Seconds
from locret.infer.speed.peaks import PeakBytes, RunPeaks
from locret.infer.speed.record import make_record
from locret.infer.speed.report import page
from locret.infer.speed.resolve import make_plan

NUMBERS = {"budget": 32, "chunk_size": 24, "stabilizers": 8, "local_len": 7, "new_tokens": 4, "threads": 1}
FLAGS = [part for name, value in NUMBERS.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def record_of(found: Measurements | None, methods: str = "full,floor,locret", lengths: str = "100") -> dict[str, Any]:
    given = {"shape": "tiny", "lengths": lengths, "methods": methods, "device": "cpu", **NUMBERS}
    return make_record(make_plan(BenchOptions(**given), set(given)), found)


def measurements() -> Measurements:
    peaks = RunPeaks(PeakBytes(10, 20, 30), PeakBytes(10, 20, 5))
    return Measurements(
        rates=[MachineRates(4e9, 2e9), MachineRates(8e9, 4e9)],
        seconds={
            ("full", 100): [Seconds(6.0, 4.0), Seconds(12.0, 8.0)],
            ("floor", 100): [Seconds(2.0, 1.0), Seconds(4.0, 2.0)],
            ("locret", 100): [Seconds(3.0, 2.0), Seconds(6.0, 4.0)],
        },
        peaks={(name, 100): peaks for name in ("full", "floor", "locret")},
    )


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(machine.MATMUL_SIZE, "cpu", 32)
    monkeypatch.setitem(machine.COPY_BYTES, "cpu", 2**20)


def test_ratios_are_taken_within_a_round() -> None:
    full, floor, locret = record_of(measurements())["results"]
    assert locret["ratios"]["prefill"]["full/this"] == {"p20": 2.0, "p50": 2.0, "p80": 2.0}
    assert locret["ratios"]["prefill"]["this/floor"]["p50"] == 1.5
    assert locret["ratios"]["decode"] == {
        "full/this": {"p20": 2.0, "p50": 2.0, "p80": 2.0},
        "this/floor": {"p20": 2.0, "p50": 2.0, "p80": 2.0},
    }
    assert set(full["ratios"]["prefill"]) == {"this/floor"}
    assert set(floor["ratios"]["prefill"]) == {"full/this"}


def test_rates_are_work_over_seconds_and_shares_of_the_machine() -> None:
    locret = record_of(measurements())["results"][2]
    prefill, decode = locret["prefill"], locret["decode"]
    assert prefill["seconds"]["p50"] == 4.5
    assert prefill["tokens_per_second"]["p80"] == pytest.approx(100 / 6 + 0.8 * (100 / 3 - 100 / 6), rel=1e-5)
    assert decode["seconds_per_token"]["p50"] == 0.75
    rates = [locret["flops"]["prefill"] / seconds for seconds in (3.0, 6.0)]
    assert prefill["flops_per_second"]["p50"] == pytest.approx(sum(rates) / 2, rel=1e-5)
    shares = [rates[0] / 4e9, rates[1] / 8e9]
    assert prefill["share_of_matmul"]["p50"] == pytest.approx(sum(shares) / 2, rel=1e-5)
    copies = [locret["bytes"]["decode"] / 2.0 / 2e9, locret["bytes"]["decode"] / 4.0 / 4e9]
    assert decode["share_of_copy"]["p50"] == pytest.approx(sum(copies) / 2, rel=1e-5)


def test_growth_compares_neighbouring_lengths_round_by_round() -> None:
    found = Measurements(
        rates=[MachineRates(1.0, 1.0)] * 2,
        seconds={("full", 50): [Seconds(1, 1), Seconds(2, 1)], ("full", 100): [Seconds(4, 1), Seconds(8, 1)]},
    )
    (row,) = record_of(found, "full", "50,100")["growth"]
    assert (row["from"], row["to"], row["tokens"], row["seconds"]["p50"]) == (50, 100, 2.0, 4.0)


def test_a_page_shows_what_is_known_and_how_to_repeat_it() -> None:
    text = page(record_of(measurements()), "locret-bench --shape tiny")
    assert "unknown" not in text
    assert "`locret-bench --shape tiny`" in text
    assert {"2.00", "1.50"} <= set(text.split())  # of `floor`: writing and reading


def test_what_ran_out_of_memory_is_named_and_has_no_numbers() -> None:
    found = measurements()
    del found.seconds["full", 100], found.peaks["full", 100]
    record = record_of(found)
    full, _, locret = record["results"]
    assert full["error"] == "out of memory"
    assert full["prefill"] is full["decode"] is full["peak_bytes"] is None
    assert "full/this" not in locret["ratios"]["prefill"]
    text = page(record, "locret-bench")
    assert "* full, 100 tokens: out of memory." in text
    assert "unknown" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_without_a_gpu_its_rows_are_unknown_and_never_a_number(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    base = tmp_path / "llama-3.1-8b"
    assert command(["--shape", "llama-3.1-8b", "--output", str(base), "--methods", "full,locret"]) == 0
    out, err = capsys.readouterr()
    assert err == "locret-bench: warning: there is no CUDA device here: all that would be measured is unknown\n"
    record = json.loads((tmp_path / "llama-3.1-8b.json").read_text())
    assert record["machine"]["device"] is record["machine"]["matmul_flops_per_second"] is None
    for row in record["results"]:
        assert row["error"] == "no CUDA device here"
        assert row["prefill"] is row["decode"] is row["peak_bytes"] is None
        assert row["planned_bytes"]["weights"] > 16e9
    assert (tmp_path / "llama-3.1-8b.md").read_text() == out
    assert "unknown" in out


@pytest.mark.usefixtures("small_machine")
@pytest.mark.slow
def test_the_command_measures_and_writes_a_whole_record(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = ["--shape", "tiny", "--lengths", "60,120", "--repeats", "2", *FLAGS]
    assert command([*flags, "--output", str(tmp_path / "record"), "--json", "--quiet"]) == 0
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert err == ""
    assert record == json.loads((tmp_path / "record.json").read_text())
    assert record["command"] == " ".join(["locret-bench", *flags, "--json", "--quiet"])
    assert {"locret", "torch", "transformers", "python"} <= set(record["versions"])
    assert record["config"]["policy"]["budget"] == 32
    assert [(row["method"], row["length"]) for row in record["results"]] == [
        (name, length) for length in (60, 120) for name in ("full", "floor", "locret")
    ]
    for row in record["results"]:
        assert row["error"] is None
        assert row["prefill"]["tokens_per_second"]["p50"] > 0
        peak = row["peak_bytes"]["prefill"]
        assert peak["total"] == peak["weights"] + peak["cache"] + peak["workspace"]
    assert len(record["growth"]) == 3
    assert (tmp_path / "record.md").read_text().startswith("# How fast tiny reads and writes\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["record.json", "record.md"]


@pytest.mark.usefixtures("small_machine")
@pytest.mark.parametrize("terminal", [False, True])
def test_a_measurement_counts_runs_in_a_terminal(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    flags = ["--shape", "tiny", "--lengths", "60", "--methods", "full,floor", "--repeats", "2", "--json", *FLAGS]
    assert command(flags) == 0
    out, err = capsys.readouterr()
    assert len(json.loads(out)["results"]) == 2
    # Each method warms up once; in both rounds it is timed, as the machine is.
    assert ("8/8" in err) == terminal
    assert terminal or not err
