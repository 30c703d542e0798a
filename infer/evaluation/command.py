"""`locret-eval`: compare methods on tasks within the same budget; tables, pictures, and every answer on record.

    locret-eval --model checkpoints/tiny --heads checkpoints/tiny-heads --methods full,locret,random \\
        --tasks passkey,ruler/vt --lengths 2048,8192 --budget 256 --samples 20 --output runs/eval

Local tasks need no network. An interrupted run goes on with --resume, sample by sample. Several processes share the
samples of a run: `torchrun --nproc-per-node 2 -m locret.infer.evaluation.command ...`, or `accelerate launch`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locret.base import interrupts
from locret.base.files import locked
from locret.cli.command import parse_options, print_json, run, warnings_as_lines

if TYPE_CHECKING:
    from locret.distributed.ranks import Ranks
    from locret.infer.evaluation.job import Job
    from locret.infer.evaluation.methods import Setup
    from locret.infer.evaluation.records import SampleLog

_GO_ON = "all answers so far are on disk, --resume goes on"
DESCRIPTION = "Compare methods of keeping cache units, on the same prompts and within the same budget."


def command(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Raises:
        ValueError: For anything the user must change.
        OSError: If a Hub, a disk or a device's memory fails.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--list" in arguments:  # whatever else is named
        from locret.infer.evaluation import listing

        if "--json" in arguments:
            print_json(listing.as_record())
        else:
            print(listing.as_text(), end="")
        return 0
    if "--suite=real" in arguments or ("--suite", "real") in pairwise(arguments):  # it has options of its own
        from locret.infer.evaluation import real

        return real.command(arguments)
    from locret.distributed import ranks

    with ranks.joined("locret-eval", way_out=_GO_ON) as own:
        _command(own, arguments)
    return 0


def _command(processes: Ranks, arguments: list[str]) -> None:
    from locret.infer.evaluation.eval_options import OPTION_CLASSES

    with processes.together():
        (model, evaluation, budgets, report), chosen = parse_options(
            "locret-eval", DESCRIPTION, OPTION_CLASSES, arguments
        )
    given = {
        f"--{name.replace('_', '-')}": value
        for group in (model, evaluation, budgets, report)
        for name, value in asdict(group).items()
    }
    with processes.together():  # apart from what may fail in one of them: the processes of a run share its samples
        processes.agree(given)
    processes = processes.under(model.shard)
    from locret.infer.evaluation import job  # imports torch

    with warnings_as_lines("locret-eval", quiet=report.quiet or not processes.is_main):
        with processes.together():
            prepared = job.prepare(model, evaluation, budgets, report, chosen, processes)
        if report.dry_run:
            if processes.is_main:
                print_json(prepared.plan())
            return
        if processes.is_main and not report.quiet:
            _say(prepared, named=bool(report.output))
        with ExitStack() as held:
            with processes.together():
                if processes.is_main:
                    output = prepared.report.output
                    held.enter_context(locked(output, f"--output {output}"))
            _execute(prepared)


def _say(job: Job, named: bool) -> None:
    """Write what may not have been expected, and where results go unless the user named that."""
    tokens = sum(case.tokens for case in job.cases) * len(job.runs)
    read = f", {tokens:,} prompt tokens" if tokens else ""
    going = f"{len(job.runs) * len(job.cases):,} answers{read}; results go to {job.report.output}"
    for line in (*job.notes, *([] if named else [going])):
        sys.stderr.write(f"locret-eval: {line}\n")


def _execute(job: Job) -> None:
    """Load everything, open the output folder, measure, report."""
    from locret.infer.evaluation.report import order_of

    processes = job.processes
    with processes.together(on_backbone=True):
        setup, settings, draw = _load(job)
    with processes.together():
        processes.agree(settings, "give all processes the same files")
    with processes.together():
        log = _open(job, settings) if processes.is_main else None
    log = _open(job, settings) if log is None else log
    try:
        with processes.together(on_backbone=True), interrupts.unwinding():
            _measure(job, setup, log)
    except (KeyboardInterrupt, SystemExit, ValueError, OSError):
        if processes.is_main:
            _keep(job, log, settings)
        raise
    if processes.is_main:
        log.merge(order_of(job.cases, job.runs))
        _report(job, log, settings, draw)


def _keep(job: Job, log: SampleLog, settings: dict[str, Any]) -> None:
    """Leave results of what was answered before the end came; a full disk is not what the user has to hear of then."""
    from locret.infer.evaluation.report import write_results

    with suppress(ValueError, OSError):
        log.collect()
        write_results(Path(job.report.output), log, settings, job)
    sys.stderr.write(f"{len(log.records)} answers are in {log.path}; the same command with --resume goes on\n")


def _load(job: Job) -> tuple[Setup, dict[str, Any], bool]:
    """Return the loaded backbone with what belongs to it, all settings, and whether pictures can be drawn."""
    from locret import loading
    from locret.heads.fingerprint import weight_fingerprint
    from locret.infer.evaluation import output_folder
    from locret.infer.evaluation.methods import Setup, gate_identities
    from locret.pictures import can_draw

    report = job.report
    tokenizer = loading.load_tokenizer(job.model)
    job.check(tokenizer)
    draw = report.figures == "all" and job.processes.is_main and can_draw("--figures all")
    model = loading.load_model(job.model, job.config, job.own_device, job.dtype)
    trained = job.heads.follow(model) if job.evaluation.heads else None
    gates = gate_identities((run.method for run in job.runs), model)
    settings = {
        **job.settings(),
        # Weights can change under the same name, and their answers must not be mixed with the earlier ones'.
        "weights": {"model": weight_fingerprint(model), "heads": trained and weight_fingerprint(trained)},
        **({output_folder.GATES: gates} if gates else {}),
        "tokenizer": output_folder.tokenizer_facts(tokenizer),
    }
    output_folder.check_output(report.output, settings, resume=report.resume, overwrite=report.overwrite)
    return Setup(model, tokenizer, trained, job.evaluation.seed), settings, draw


def _open(job: Job, settings: dict[str, Any]) -> SampleLog:
    """Return the records of the output folder: in the first process with what an interrupted run has left."""
    from locret.infer.evaluation import output_folder
    from locret.infer.evaluation.records import SAMPLES, SampleLog, read
    from locret.infer.evaluation.report import order_of

    output = job.report.output
    if job.processes.is_main:
        log = output_folder.open_output(output, settings, overwrite=job.report.overwrite)
        log.merge(order_of(job.cases, job.runs))
        return log
    log = SampleLog(output, job.processes.rank)
    log.records, _ = read(Path(output) / SAMPLES)
    return log


def _measure(job: Job, setup: Setup, log: SampleLog) -> None:
    """Evaluate this process's share of what is missing, with a bar that knows the time left.

    Runs differ in cost, so the bar counts tokens.

    Raises:
        OSError: If the device's memory or the disk is full.
    """
    import torch
    from tqdm.auto import tqdm

    from locret.backbone.passes import in_step
    from locret.infer.evaluation import runner
    from locret.infer.evaluation.plan import Case, texts_of
    from locret.infer.evaluation.records import key

    done, runs = log.done(), job.runs

    def left(case: Case) -> int:
        return sum(key(case.axes | run.axes) not in done for run in runs)

    missing = [text for text in texts_of(job.cases) if any(map(left, text))]
    cases = [case for text in job.processes.share(missing) for case in text]
    waiting = sum(case.tokens * left(case) for case in cases)
    finished = sum(case.tokens for case in job.cases) * len(runs) - waiting if job.processes.size == 1 else 0
    with tqdm(
        total=finished + waiting,
        initial=finished,
        unit="tok",
        unit_scale=True,
        file=sys.stderr,
        disable=True if job.report.quiet or not job.processes.is_main else None,
    ) as bar:
        try:
            with in_step(setup.model):  # processes may have samples of other lengths, and more or fewer of them
                for record in runner.evaluate(setup, cases, runs, done):
                    log.append(record)
                    bar.set_postfix_str(f"{record['task']} {record['tokens']} {record['method']}", refresh=False)
                    bar.update(record["tokens"])
        except torch.OutOfMemoryError as error:
            raise OSError(
                f"{job.own_device} is out of memory; use --resume with a smaller --dtype, or start anew with shorter "
                "--lengths or a smaller --chunk-size"
            ) from error


def _report(job: Job, log: SampleLog, settings: dict[str, Any], draw: bool) -> None:
    """Write results and pictures, and print them; numbers are on disk before the first picture is drawn."""
    from locret.base.files import write_text
    from locret.infer.evaluation import report
    from locret.infer.evaluation.records import RESULTS, shown

    output = Path(job.report.output)
    results = report.write_results(output, log, settings, job)
    if draw:
        from locret.infer.evaluation import figures

        records = shown(report.ordered(log, job.cases, job.runs))
        results["figures"] = figures.write_all(output, records, shown(results["cells"]))
        write_text(output / RESULTS, json.dumps(results, indent=1) + "\n")
    if job.report.json:
        print_json(results)
        return
    print(report.as_markdown(results), end="")
    for name in results["figures"]:
        print(f"picture: {output / name}")


def main() -> None:
    """Entry point of `locret-eval`."""
    run(command, prog="locret-eval")


if __name__ == "__main__":
    main()
