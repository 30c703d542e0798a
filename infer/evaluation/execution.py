"""What `locret-eval` does once all is planned: load, open the output folder, measure what is missing, report."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from locret import loading
from locret.backbone.passes import in_step
from locret.base import interrupts
from locret.cli.command import print_json
from locret.conversation.turns import vocabulary_fingerprint
from locret.heads.fingerprint import weight_fingerprint
from locret.infer.evaluation import answering, report
from locret.infer.evaluation.job import Job
from locret.infer.evaluation.methods import Setup
from locret.infer.evaluation.plan import Case, texts_of
from locret.infer.evaluation.records import SAMPLES, SampleLog, check_output, key, open_output, read


def execute(job: Job) -> None:
    """Load everything, open the output folder, measure, report."""
    processes = job.processes
    with processes.together(on_backbone=True):
        setup, settings = _load(job)
    with processes.together():
        processes.agree(settings, "give all processes the same files")
    log = SampleLog(job.report.output, processes.rank)
    with processes.together():
        if processes.is_main:
            log = open_output(job.report.output, settings, overwrite=job.report.overwrite)
            log.merge(report.order_of(job.cases, job.runs))
    if not processes.is_main:
        log.records, _ = read(log.folder / SAMPLES)
    try:
        with processes.together(on_backbone=True), interrupts.unwinding():
            _measure(job, setup, log)
    except (KeyboardInterrupt, SystemExit, ValueError, OSError):
        if processes.is_main:
            _keep(job, log, settings)
        raise
    if processes.is_main:
        log.merge(report.order_of(job.cases, job.runs))
        results = report.write_results(Path(job.report.output), log, settings, job)
        if job.report.json:
            print_json(results)
        else:
            sys.stdout.write(report.as_markdown(results))


def _keep(job: Job, log: SampleLog, settings: dict[str, Any]) -> None:
    """Leave results of what was answered before the end came; a full disk is not what the user has to hear of then."""
    with suppress(ValueError, OSError):
        log.collect()
        report.write_results(Path(job.report.output), log, settings, job)
    sys.stderr.write(f"{len(log.records)} answers are in {log.path}; the same command with --resume goes on\n")


def _load(job: Job) -> tuple[Setup, dict[str, Any]]:
    given = job.report
    tokenizer = loading.load_tokenizer(job.model)
    job.check(tokenizer)
    model = loading.load_model(job.model, job.base.config, job.own_device, job.base.dtype)
    trained: Any = job.base.scorer
    trained = trained.follow(model) if job.evaluation.heads else None
    settings = {
        **job.settings(),
        # Weights can change under the same name, and their answers must not be mixed with the earlier ones'.
        "weights": {"model": weight_fingerprint(model), "heads": trained and weight_fingerprint(trained)},
        "tokenizer": [vocabulary_fingerprint(tokenizer), tokenizer.chat_template],
    }
    check_output(given.output, settings, resume=given.resume, overwrite=given.overwrite)
    return Setup(model, tokenizer, trained, job.evaluation.seed), settings


def _measure(job: Job, setup: Setup, log: SampleLog) -> None:
    """Evaluate this process's share of what is missing, with a bar that knows the time left.

    Runs differ in cost, so the bar counts tokens.
    """
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
                for record in answering.evaluate(setup, cases, runs, done):
                    log.append(record)
                    bar.set_postfix_str(f"{record['task']} {record['tokens']} {record['method']}", refresh=False)
                    bar.update(record["tokens"])
        except torch.OutOfMemoryError as error:
            raise OSError(
                f"{job.own_device} is out of memory; use --resume with a smaller --dtype, or start anew with shorter "
                "--lengths or a smaller --chunk-size"
            ) from error
