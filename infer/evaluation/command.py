"""`locret-eval`: compare methods on tasks within the same budget; tables, and every answer on record.

    locret-eval --model checkpoints/tiny --heads checkpoints/tiny-heads --methods full,locret,random \\
        --tasks passkey,ruler/vt --lengths 2048,8192 --budget 256 --samples 20 --output runs/eval

Local tasks need no network. An interrupted run goes on with --resume, sample by sample. Several processes share the
samples of a run: `torchrun --nproc-per-node 2 -m locret.infer.evaluation.command ...`, or `accelerate launch`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from locret import shipped
from locret.base.files import locked
from locret.base.method_spec import MODIFIERS
from locret.base.nearest import check_retired
from locret.cli import recipes
from locret.cli.command import parse_options, print_json, run, warnings_as_lines
from locret.data import tasks
from locret.data.tasks.published import suites
from locret.distributed.ranks import Ranks, joined
from locret.infer.evaluation.eval_options import OPTION_CLASSES

if TYPE_CHECKING:
    from locret.infer.evaluation.job import Job

_GO_ON = "all answers so far are on disk, --resume goes on"
DESCRIPTION = "Compare methods of keeping cache units, on the same prompts and within the same budget."


def command(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--list" in arguments:  # whatever else is named
        if "--json" in arguments:
            check_retired("--list", "--json")
        print(_listed(), end="")
        return 0
    given = [*pairwise(arguments), *(one.partition("=")[::2] for one in arguments if "=" in one)]
    flags: list[Any] = [value for flag, value in given if flag == "--suite"]
    files = [path for flag, path in given if flag == "--config" and os.path.isfile(shipped.find(path))]  # no pipe
    if (flags or [recipes.read(path).get("suite") for path in files])[-1:] == ["real"]:  # it has options of its own
        from locret.infer.evaluation import real

        return real.command(arguments)
    with joined(_GO_ON) as own:
        _command(own, arguments)
    return 0


def _command(processes: Ranks, arguments: list[str]) -> None:
    with processes.together():
        (model, evaluation, budgets, report), chosen = parse_options(
            "locret-eval", DESCRIPTION, OPTION_CLASSES, arguments
        )
    processes.agree_on_options((model, evaluation, budgets, report))
    processes = processes.under(model.shard)
    from locret.infer.evaluation import execution, job  # imports torch

    with warnings_as_lines("locret-eval", quiet=report.quiet or not processes.is_main):
        with processes.together():
            prepared = job.prepare(model, evaluation, budgets, report, chosen, processes)
        if report.dry_run:
            if processes.is_main:
                print_json(prepared.plan())
            return
        if processes.is_main and not report.quiet:
            _say(prepared, named=bool(report.output))
        output = prepared.report.output
        with ExitStack() as held:
            with processes.together():
                if processes.is_main:
                    held.enter_context(locked(output, f"--output {output}"))
            execution.execute(prepared)


def _say(job: Job, named: bool) -> None:
    """Write what may not have been expected, and where results go unless the user named that."""
    tokens = sum(case.tokens for case in job.cases) * len(job.runs)
    read = f", {tokens:,} prompt tokens" if tokens else ""
    going = f"{len(job.runs) * len(job.cases):,} answers{read}; results go to {job.report.output}"
    for line in (*job.notes, *([] if named else [going])):
        sys.stderr.write(f"locret-eval: {line}\n")


def _about(methods: Any, name: str) -> str:
    try:
        return methods.get(name).description
    except ValueError as error:  # gates of others need to be told where they are
        return str(error)


def _listed() -> str:
    """Return a line for each task, suite, method and modifier there is."""
    from locret.infer.evaluation import methods  # imports torch

    lines = ["tasks (name, version, metric, source)"]
    lines += [f"  {t.name:<36} {t.version}  {t.metric:<20} {t.source}" for t in map(tasks.get, tasks.names())]
    lines.append("suites of published tasks (--suite NAME)")
    lines += [f"  {name:<36} {suites.get(name).title}" for name in suites.names()]
    lines.append("methods")
    lines += [f"  {name:<20} {_about(methods, name)}" for name in methods.names()]
    lines.append("modifiers of a method, as in locret+pyramid (what they change)")
    for name, one in MODIFIERS.items():
        options = f"; options: {', '.join(one.options)}" if one.options else ""
        lines.append(f"  +{name:<19} {', '.join(f'{key}={value}' for key, value in one.fields.items())}{options}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    run(command, prog="locret-eval")
