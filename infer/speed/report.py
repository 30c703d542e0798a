"""What was measured, as plain data and as tables; what was not is "unknown", never estimated."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from locret.base.tables import markdown
from locret.environment import versions
from locret.infer.speed.measure import Measurements
from locret.infer.speed.plan import BenchPlan
from locret.infer.speed.ways import LLAMACPP

UNKNOWN = "unknown"
_MIB = 2**20


def make_record(plan: BenchPlan, found: Measurements | None) -> dict[str, Any]:
    """Return everything that is known about a plan; what was not measured is None.

    Returns:
        `config`, `versions`, `machine` and `results` (a row per method and length). Rates, shares and ratios are p20,
        p50 and p80 over rounds.
    """
    done, device = found or Measurements(), plan.device
    flops, copies = ([rates[at] for rates in done.rates] for at in (0, 1))
    return {
        "config": plan.resolved(),
        "versions": versions(),
        "machine": {
            "device": None if device is None else device.type,
            "name": None if device is None else device_name(device),
            "matmul_flops_per_second": quantiles(flops),
            "copy_bytes_per_second": quantiles(copies),
        },
        "results": [_result(plan, done, row, at) for at, row in enumerate(plan.rows())],
    }


def _result(plan: BenchPlan, found: Measurements, row: dict[str, Any], at: int) -> dict[str, Any]:
    name, length = row["method"], row["length"]
    runs, work = found.samples.get((name, length), []), plan.work(plan.methods[at % len(plan.methods)], length)
    if not runs:
        error = "no CUDA device here" if plan.device is None else "out of memory"
        return {**row, "error": error, "prefill": None, "decode": None, "bytes": None}
    read, written = runs[0].read, runs[0].written
    moved = (written.moved - read.moved) / plan.options.new_tokens
    row["error"], row["bytes"] = None, {**written._asdict(), "moved_per_token": moved, "peak": runs[0].peak}
    for index, (part, tokens) in enumerate({"prefill": length, "decode": plan.options.new_tokens}.items()):
        seconds, best = [run[:2][index] for run in runs], [rates[index] for rates in found.rates]
        # How many bytes other weights than those of --dtype have is not counted.
        rounded = name == LLAMACPP or bool(plan.source and plan.source.quantising())
        counted = [] if rounded and part == "decode" else [work[part] / one for one in seconds]
        row[part] = {
            "seconds": quantiles(seconds),
            "tokens_per_second": quantiles([tokens / one for one in seconds]),
            "share": quantiles([one / rate for one, rate in zip(counted, best, strict=False)]),
        }
        for other in ("full", "floor"):
            theirs = [run[:2][index] for run in found.samples.get((other, length), [])]
            row[part][f"times_{other}"] = quantiles([a / b for a, b in zip(seconds, theirs, strict=False)])
    return row


def quantiles(values: Sequence[float]) -> dict[str, float] | None:
    """Return p20, p50 and p80, to six digits; None of nothing."""
    if not values:
        return None
    points = torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64))
    return {name: float(f"{value:.6g}") for name, value in zip(("p20", "p50", "p80"), points.tolist(), strict=True)}


def device_name(device: torch.device) -> str:
    """Return what a GPU or this machine's processor calls itself."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(named), platform.processor() or platform.machine())


# By the title of a column the path to its number, how that is written, and its unit.
_COLUMNS: dict[str, tuple[str, str, float]] = {
    "method": ("method", "", 1),
    "tokens": ("length", ",", 1),
    "read s": ("prefill.seconds.p50", ".3g", 1),
    "of `full`": ("prefill.times_full.p50", ".2f", 1),
    "of `floor`": ("prefill.times_floor.p50", ".2f", 1),
    "of matmul": ("prefill.share.p50", ".0%", 1),
    "written tokens/s": ("decode.tokens_per_second.p50", ",.4g", 1),
    "of `full` ": ("decode.times_full.p50", ".2f", 1),
    "of `floor` ": ("decode.times_floor.p50", ".2f", 1),
    "of copy": ("decode.share.p50", ".0%", 1),
    "cache MiB": ("bytes.cache", ",.2f", _MIB),
    "host MiB": ("bytes.host", ",.2f", _MIB),
    "fetched KiB / token": ("bytes.moved_per_token", ",.1f", 2**10),
    "peak MiB": ("bytes.peak", ",.1f", _MIB),
}


def _cell(row: Any, path: str, form: str, unit: float) -> str:
    for name in path.split("."):
        row = None if row is None else row.get(name)
    return UNKNOWN if row is None else format(row if unit == 1 else row / unit, form)


def page(record: Mapping[str, Any], command: str) -> str:
    """Return a record as a Markdown page: what was measured, the table, and how to repeat it."""
    config, machine, rows = record["config"], record["machine"], record["results"]
    policy = config["policy"]
    threads = f", {config['threads']} CPU threads" if machine["device"] == "cpu" else ""
    place = f"{machine['name'] or 'no CUDA device, so nothing was measured'}{threads}"
    rates = [machine[name] for name in ("matmul_flops_per_second", "copy_bytes_per_second")]
    product, copy = (UNKNOWN if rate is None else f"{rate['p50'] / 1e9:,.4g}" for rate in rates)
    found = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    missing = [f"* {row['method']}, {row['length']:,} tokens: {row['error']}." for row in rows if row["error"]]
    lines = [
        f"# How fast {config['shape'] or config['model']} reads and writes",
        "",
        f"{place}, {config['dtype']}. Budget {policy['budget']:,}, chunks of {policy['chunk_size']:,}, "
        f"{policy['stabilizers']:,} stabilizers, {policy['local_len']:,} local tokens; {config['new_tokens']} new "
        f"tokens; {config['repeats']} rounds.",
        "",
        "Medians over the rounds. Times of `full` and `floor` are ratios within a round: below 1 is faster. Reading is "
        f"a share of the operations of a matrix product ({product} GFLOP/s), writing of the bytes of a copy ({copy} "
        "GB/s), both measured in every round. The peak is a GPU's, all tensors included.",
        "",
        *markdown(list(_COLUMNS), ([_cell(row, *how) for how in _COLUMNS.values()] for row in rows)),
        "",
        *missing,
        *([""] if missing else []),
        f"`{command}`",
        "",
        f"{found[:1].upper()}{found[1:]}.",
    ]
    return "\n".join(lines) + "\n"
