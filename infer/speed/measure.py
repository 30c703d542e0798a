"""Measures a plan: bytes first, in runs that are not timed, then seconds, in rounds that run everything once."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from tqdm.auto import tqdm

from locret.infer.speed.machine import MachineRates, measure_rates, now
from locret.infer.speed.methods import BenchMethod
from locret.infer.speed.peaks import RunPeaks, measure_peaks
from locret.infer.speed.plan import BenchPlan
from locret.infer.speed.runs import BenchSetup, make_setup, new_run
from locret.infer.speed.side_by_side import in_turns

Key = tuple[str, int]
"""Method and prompt tokens."""
_RATES: Key = ("machine", 0)
T = TypeVar("T")


@dataclass(frozen=True)
class Seconds:
    """One timed run."""

    prefill: float
    """From the prompt's ids to the first new token on the host."""
    decode: float
    """For all new tokens, by transformers' `generate`."""


@dataclass(frozen=True)
class Measurements:
    """What came out, round by round. What ran out of memory is missing."""

    rates: list[MachineRates] = field(default_factory=list)
    seconds: dict[Key, list[Seconds]] = field(default_factory=dict)
    peaks: dict[Key, RunPeaks] = field(default_factory=dict)


def measure(plan: BenchPlan, *, quiet: bool = False) -> Measurements:
    """Measure everything in a plan that has a device, with a progress bar where standard error is a terminal.

    Args:
        plan: What is measured.
        quiet: Show no bar.

    Raises:
        ValueError: If weights are missing or broken, or the cap is more than the device has.
        OSError: If the backbone alone does not fit.
    """
    device = plan.device
    assert device is not None
    with settings(plan):
        try:
            setup = make_setup(plan)
        except torch.OutOfMemoryError as error:
            raise OSError(
                f"{device} is out of memory before a prompt is read; take a smaller --shape or --dtype, or raise "
                "--memory-cap"
            ) from error
        cases = [(method, length) for length in plan.lengths for method in plan.methods]
        guard = _Guard()
        peaks: dict[Key, RunPeaks] = {}
        sides: dict[Key, Callable[[], Any]] = {
            (method.name, length): _side(guard, setup, method, length) for method, length in cases
        }
        sides = {_RATES: lambda: measure_rates(device, plan.dtype), **sides}
        total = len(cases) + plan.repeats * len(sides)
        with tqdm(total=total, desc="measuring", unit="run", disable=True if quiet else None) as bar:
            for method, length in cases:
                found = guard.run((method.name, length), partial(_warm_peaks, setup, method, length))
                if found is not None:
                    peaks[method.name, length] = found
                bar.update()
            rounds = in_turns(sides, plan.repeats, bar)
        rates: list[Any] = rounds.pop(_RATES)
    seconds = {key: found for key, found in rounds.items() if key not in guard.failed}
    return Measurements(rates, seconds, {key: peak for key, peak in peaks.items() if key in seconds})


class _Guard:
    """Runs what may run out of memory; what once did is not tried again."""

    def __init__(self) -> None:
        self.failed: set[Key] = set()

    def run(self, key: Key, call: Callable[[], T]) -> T | None:
        if key in self.failed:
            return None
        try:
            return call()
        except torch.OutOfMemoryError:
            self.failed.add(key)
        # Here, because the exception held on to everything that was allocated.
        _free()
        return None


def _side(guard: _Guard, setup: BenchSetup, method: BenchMethod, length: int) -> Callable[[], Seconds | None]:
    def run_once() -> Seconds | None:
        found = guard.run((method.name, length), partial(_time, setup, method, length))
        gc.collect()
        return found

    return run_once


def _time(setup: BenchSetup, method: BenchMethod, length: int) -> Seconds:
    device, run = setup.prompt_1N.device, new_run(setup, method, length)
    start = now(device)
    first = run.read()
    between = now(device)
    new = run.write(first)
    end = now(device)
    assert len(new) == setup.plan.new_tokens
    return Seconds(between - start, end - between)


def _warm_peaks(setup: BenchSetup, method: BenchMethod, length: int) -> RunPeaks:
    """Count bytes after a short read, so that what is set up only once is neither counted nor timed."""
    policy = setup.plan.policy
    short = min(length, policy.budget + 2 * policy.chunk_size + policy.local_len)
    _time(setup, method, short)
    _free()
    found = measure_peaks(setup, method, length)
    _free()
    return found


def _free() -> None:
    """Give memory back to the device; not between timed runs, which would pay for taking it again."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def settings(plan: BenchPlan) -> Iterator[None]:
    """Take the plan's threads and its cap on memory, for as long as it is measured."""
    threads, device = torch.get_num_threads(), plan.device
    assert device is not None
    torch.set_num_threads(plan.threads)
    if plan.memory_cap is not None:
        total = torch.cuda.get_device_properties(device).total_memory
        if plan.memory_cap > total:
            raise ValueError(
                f"--memory-cap is {plan.memory_cap:,} bytes, but {device} has {total:,}; lower it, or drop it"
            )
        # By number, None for the current device: a device without one is refused here.
        torch.cuda.set_per_process_memory_fraction(plan.memory_cap / total, device.index)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if plan.memory_cap is not None:
            torch.cuda.set_per_process_memory_fraction(1.0, device.index)
