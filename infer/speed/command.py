"""`locret-bench`: how fast a backbone reads and writes, in how much memory, against what the machine can do.

    locret-bench --shape cpu-512 --lengths 8K,16K --methods full,floor,locret --output bench

Backbones of random weights need no download.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence

from locret.base.files import write_text
from locret.base.warned import warn_user
from locret.cli.command import parse_options, print_json, run, warnings_as_lines
from locret.infer.speed.bench_options import OPTION_CLASSES

DESCRIPTION = "Measure how fast a backbone reads and writes, in how much memory, against what the machine can do."


def command(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    (options, output), chosen = parse_options("locret-bench", DESCRIPTION, OPTION_CLASSES, arguments)
    if not chosen:
        raise ValueError(
            "a measurement takes minutes, so it is to be asked for; give --shape cpu-512, or --lengths 2K for less"
        )
    with warnings_as_lines("locret-bench", quiet=output.quiet):
        from locret.infer.speed import report  # torch, which help should not load
        from locret.infer.speed.measure import measure
        from locret.infer.speed.plan import make_plan

        paths, plan = output.paths(), make_plan(options, chosen)
        if output.dry_run:
            print_json({"config": plan.resolved(), "plan": plan.rows()})
            return 0
        if plan.device is None:
            warn_user("there is no CUDA device here: all that would be measured is unknown")
        found = None if plan.device is None else measure(plan, quiet=output.quiet)
        line = shlex.join(["locret-bench", *arguments])
        record = {"command": line, **report.make_record(plan, found)}
        page = report.page(record, line)
        if output.json:
            print_json(record)
        else:
            print(page, end="")
        for path, text in zip(paths, (json.dumps(record, indent=1) + "\n", page), strict=False):
            write_text(path, text)
    return 0


if __name__ == "__main__":
    run(command, prog="locret-bench")
