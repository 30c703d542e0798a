"""`locret-bench`: how fast a backbone reads and writes, in how much memory, against what the machine can do.

    locret-bench --shape cpu-512 --lengths 8K,16K --methods full,floor,locret --output bench

Backbones of random weights need no download.
"""

from __future__ import annotations

import json
import shlex
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from locret.base.files import write_text
from locret.cli.command import parse_options, print_json, run, warnings_as_lines
from locret.infer.speed.bench_options import OPTION_CLASSES, BenchOptions, BenchOutput

if TYPE_CHECKING:
    from locret.infer.speed.plan import BenchPlan

DESCRIPTION = "Measure how fast a backbone reads and writes, in how much memory, against what the machine can do."


def command(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Raises:
        ValueError: For anything the user must change.
        OSError: If a Hub, a disk or a device's memory fails.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    (options, output), chosen = parse_options("locret-bench", DESCRIPTION, OPTION_CLASSES, arguments)
    with warnings_as_lines("locret-bench", quiet=output.quiet):
        _execute(options, output, chosen, _line(arguments))
    return 0


def _execute(options: BenchOptions, output: BenchOutput, chosen: set[str], line: str) -> None:
    from locret.infer.speed.resolve import make_plan

    with output.held() as paths:
        plan = make_plan(options, chosen)
        if output.dry_run:
            _print_plan(plan, output)
        elif not chosen:
            _propose(plan)
        else:
            _measure(output, plan, line, paths)


def _measure(output: BenchOutput, plan: BenchPlan, line: str, paths: Mapping[str, Path]) -> None:
    """Measure a plan; print and write the record."""
    from locret.infer.speed import report
    from locret.infer.speed.measure import measure
    from locret.infer.speed.record import make_record

    if plan.device is None:
        warnings.warn("there is no CUDA device here: all that would be measured is unknown", stacklevel=2)
    found = None if plan.device is None else measure(plan, quiet=output.quiet)
    record = {"command": line, **make_record(plan, found)}
    page = report.page(record, line)
    if output.json:
        print_json(record)
    else:
        print(page, end="")
    if paths:
        write_text(paths["json"], json.dumps(record, indent=1) + "\n")
        write_text(paths["md"], page)


def _propose(plan: BenchPlan) -> None:
    """Print what would be measured without any option.

    Raises:
        ValueError: Always: a measurement of minutes is to be asked for.
    """
    from locret.infer.speed.plan import plan_lines
    from locret.infer.speed.report import numbers

    print("\n".join([f"Shape {plan.shape}. {numbers(plan.resolved())}", "", *plan_lines(plan.rows())]))
    raise ValueError(
        f"nothing has been measured yet; give --shape {plan.shape} to measure this, which takes minutes, --lengths 2K "
        "for less, or --help"
    )


def _print_plan(plan: BenchPlan, output: BenchOutput) -> None:
    """Print what would be measured: JSON for programs, a table for people."""
    from locret.infer.sizing import follow_line
    from locret.infer.speed.plan import plan_lines
    from locret.infer.speed.report import numbers

    rows, config = plan.rows(), plan.resolved()
    print_json({"config": config, "not_given": plan.policy.following(), "plan": rows})
    if not output.quiet:
        sys.stderr.write("\n".join([numbers(config), "", follow_line(plan.policy), *plan_lines(rows)]) + "\n")


def _line(arguments: Sequence[str]) -> str:
    """Return the command for others to repeat, without what belongs to one machine: the path of the output."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        name = argument.partition("=")[0].replace("_", "-")
        if skip:
            skip = False
        elif name == "--output":
            skip = "=" not in argument
        elif name != "--overwrite":
            kept.append(argument)
    return shlex.join(["locret-bench", *kept])


def main() -> None:
    """Entry point of `locret-bench`."""
    run(command, prog="locret-bench")


if __name__ == "__main__":
    main()
