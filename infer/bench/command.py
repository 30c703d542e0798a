"""`locret-bench`: how fast a backbone reads and writes, in how much memory, against what the machine can do.

    locret-bench --shape cpu-512 --lengths 8K,16K --methods full,floor,locret --output bench

Backbones of random weights need no download. With --vs, peers run beside ours in environments of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from locret.cli import parse_options, print_json, run
from locret.infer.bench.options import OPTION_CLASSES, BenchOptions, BenchOutput
from locret.infer.warning_lines import warnings_as_lines

if TYPE_CHECKING:
    from locret.infer.bench.plan import BenchPlan

DESCRIPTION = "Measure how fast a backbone reads and writes, in how much memory, against what the machine can do."


def command(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Raises:
        ValueError: For anything the user must change.
        OSError: If a Hub, a disk or a device's memory fails.
    """
    (options, output), chosen = parse_options("locret-bench", DESCRIPTION, OPTION_CLASSES, argv)
    with warnings_as_lines("locret-bench", quiet=output.quiet):
        _execute(options, output, chosen)
    return 0


def _execute(options: BenchOptions, output: BenchOutput, chosen: set[str]) -> None:
    from locret.infer.bench.resolve import make_plan

    output.paths()
    plan = make_plan(options, chosen)
    if output.dry_run:
        _print_plan(plan, output)


def _print_plan(plan: BenchPlan, output: BenchOutput) -> None:
    """Print what would be measured: JSON for programs, a table for people."""
    from locret.infer.bench.plan import plan_lines

    rows = plan.rows()
    print_json({"config": plan.resolved(), "plan": rows})
    if not output.quiet:
        sys.stderr.write("\n".join(plan_lines(rows)) + "\n")


def main() -> None:
    """Entry point of `locret-bench`."""
    run(command)


if __name__ == "__main__":
    main()
