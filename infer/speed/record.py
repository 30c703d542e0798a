"""What was measured as plain data: rates, shares of the machine's, ratios within a round, and where it was taken."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from locret.environment import versions
from locret.infer.speed.cost import Cost
from locret.infer.speed.machine import COPY_BYTES, MATMUL_SIZE, MachineRates
from locret.infer.speed.measure import Key, Measurements, Seconds
from locret.infer.speed.methods import BenchMethod
from locret.infer.speed.plan import BenchPlan
from locret.infer.speed.side_by_side import quantiles

PARTS = ("prefill", "decode")
UNKNOWN = "no CUDA device here"
OUT_OF_MEMORY = "out of memory"


def make_record(plan: BenchPlan, found: Measurements | None) -> dict[str, Any]:
    """Return everything that is known about a plan.

    Args:
        plan: What was to be measured.
        found: What came out; None where the device is missing, so that everything measured is None.

    Returns:
        `config`, `versions`, `machine`, `results` (a row per method and length) and `growth` (how a method's seconds
        grow from one length to the next). Rates, shares and ratios are p20, p50 and p80 over rounds.
    """
    found = found or Measurements()
    return {
        "config": plan.resolved(),
        "versions": versions(),
        "machine": _machine(plan, found.rates),
        "results": [_result(plan, found, method, length) for length in plan.lengths for method in plan.methods],
        "growth": [row for method in plan.methods for row in _growth(plan, found, method)],
    }


def _machine(plan: BenchPlan, rates: Sequence[MachineRates]) -> dict[str, Any]:
    device = plan.device
    measured = {} if device is None else {"matmul_size": MATMUL_SIZE[device.type], "copied": COPY_BYTES[device.type]}
    return {
        "device": None if device is None else device.type,
        "name": None if device is None else device_name(device),
        "matmul_flops_per_second": quantiles([one.flops_per_second for one in rates]) if rates else None,
        "copy_bytes_per_second": quantiles([one.bytes_per_second for one in rates]) if rates else None,
        **measured,
    }


def _result(plan: BenchPlan, found: Measurements, method: BenchMethod, length: int) -> dict[str, Any]:
    key = method.name, length
    row = plan.row(method, length)
    runs, peaks, work = found.seconds.get(key, []), found.peaks.get(key), plan.cost(method, length)
    error = None if runs else UNKNOWN if plan.device is None else OUT_OF_MEMORY
    row.update(error=error, peak_bytes=None if peaks is None else peaks.to_dict())
    tokens = {"prefill": length, "decode": plan.new_tokens}
    for part in PARTS:
        seconds = _of(runs, part)
        row[part] = _speed(seconds, tokens[part], work[part], found.rates) if seconds else None
    row["ratios"] = {part: _ratios(found, key, part, row["base"]) for part in PARTS}
    if peaks is not None:
        row["moved_bytes_per_token"] = peaks.moved[1] / plan.new_tokens
    row["seconds"] = {part: _of(runs, part) for part in PARTS}
    return row


def _speed(seconds: Sequence[float], tokens: int, work: Cost, rates: Sequence[MachineRates]) -> dict[str, Any]:
    flops, moved = [work.flops / one for one in seconds], [work.bytes / one for one in seconds]
    pairs = list(zip(seconds, rates, strict=True))
    return {
        "seconds": quantiles(seconds),
        "seconds_per_token": quantiles([one / tokens for one in seconds]),
        "tokens_per_second": quantiles([tokens / one for one in seconds]),
        "flops_per_second": quantiles(flops),
        "bytes_per_second": quantiles(moved),
        "share_of_matmul": quantiles([work.flops / one / rate.flops_per_second for one, rate in pairs]),
        "share_of_copy": quantiles([work.bytes / one / rate.bytes_per_second for one, rate in pairs]),
    }


def _ratios(found: Measurements, key: Key, part: str, base: str | None) -> dict[str, dict[str, float]]:
    """Return full attention's seconds over this method's, and this method's over others', round by round.

    The others are the floor, and `base`: what has fewer of its modifiers.
    """
    name, length = key
    own, ratios = _of(found.seconds.get(key, []), part), {}
    full, floor = (_of(found.seconds.get((other, length), []), part) for other in ("full", "floor"))
    if own and full and name != "full":
        ratios["full/this"] = quantiles([a / b for a, b in zip(full, own, strict=True)])
    if own and floor and name != "floor":
        ratios["this/floor"] = quantiles([a / b for a, b in zip(own, floor, strict=True)])
    if own and base is not None and (fewer := _of(found.seconds.get((base, length), []), part)):
        ratios["this/base"] = quantiles([a / b for a, b in zip(own, fewer, strict=True)])
    return ratios


def _growth(plan: BenchPlan, found: Measurements, method: BenchMethod) -> list[dict[str, Any]]:
    rows = []
    for short, long in zip(plan.lengths, plan.lengths[1:], strict=False):
        before, after = (_of(found.seconds.get((method.name, length), []), "prefill") for length in (short, long))
        ratio = quantiles([b / a for a, b in zip(before, after, strict=True)]) if before and after else None
        rows.append({"method": method.name, "from": short, "to": long, "tokens": long / short, "seconds": ratio})
    return rows


def _of(runs: Sequence[Seconds], part: str) -> list[float]:
    return [getattr(one, part) for one in runs]


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
