"""About how long a benchmark takes, before it runs: counted work at the rates that this machine reaches right now."""

from __future__ import annotations

from locret.infer.speed.machine import MachineRates
from locret.infer.speed.plan import BenchPlan

READING, WRITING = 0.6, 0.2
"""Shares of the rates of a matrix product and of a copy that records reach: 0.74 to 0.91, and 0.18 to 0.30."""
_UNTIMED = 2
"""Runs of each method before the rounds: one to warm up, at most as long, and one whose bytes are counted."""


def estimated_seconds(plan: BenchPlan, rates: MachineRates) -> float:
    """Return the seconds that a plan takes, good to about a factor of two.

    Args:
        plan: What is to be measured.
        rates: What the machine does at best, on the threads of the plan.
    """
    seconds = 0.0
    for row in plan.rows():
        reading = row["flops"]["prefill"] / (READING * rates.flops_per_second)
        writing = row["bytes"]["decode"] / (WRITING * rates.bytes_per_second)
        seconds += reading + writing
    return (plan.repeats + _UNTIMED) * seconds


def spoken(seconds: float) -> str:
    """Return a time to wait as people say it."""
    if seconds < 90:
        whole = max(1, round(seconds))
        return f"{whole} second{'' if whole == 1 else 's'}"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} minutes"
    return f"{seconds / 3600:,.0f} hours"
