"""`locret-eval`: compare methods on tasks within the same budget; tables, pictures, and every answer on record.

    locret-eval --model checkpoints/tiny --heads checkpoints/tiny-heads --methods full,locret,random \\
        --tasks passkey,number --lengths 2048,8192 --budget 256 --samples 20 --output runs/eval

Local tasks need no network. An interrupted run goes on with --resume, sample by sample.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locret.cli import parse_options, print_json, run
from locret.infer.options import ModelOptions, ScorerOptions
from locret.infer.warning_lines import warnings_as_lines

if TYPE_CHECKING:
    from locret.data.tasks import Task
    from locret.infer.evaluation.methods import Setup
    from locret.infer.evaluation.options import BudgetOptions, EvalOptions, ReportOptions
    from locret.infer.evaluation.records import SampleLog
    from locret.infer.evaluation.runner import Place, Run
    from locret.policy import RetentionPolicy

DESCRIPTION = "Compare methods of keeping cache units, on the same prompts and within the same budget."


@dataclass
class _Job:
    """What the options come to, before any weights are loaded."""

    model: ModelOptions
    scorer: ScorerOptions
    evaluation: EvalOptions
    report: ReportOptions
    tasks: list[Task]
    places: list[Place]
    runs: list[Run]
    policies: list[RetentionPolicy]
    heads: Any
    config: Any
    device: Any
    dtype: Any

    def settings(self) -> dict[str, Any]:
        """Return everything that results depend on, resolved."""
        model, evaluation = self.model, self.evaluation
        return {
            "model": model.model,
            "revision": model.revision,
            "adapter": model.adapter,
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "attn": model.attn,
            "heads": evaluation.heads,
            "methods": [method.name for method in evaluation.chosen_methods()],
            "tasks": {task.name: {"version": task.version, **task.options()} for task in self.tasks},
            "lengths": evaluation.token_lengths(),
            "samples": evaluation.samples,
            "seed": evaluation.seed,
            "policies": [policy.to_dict() for policy in self.policies],
            "decoding": "greedy",
        }


def command(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Raises:
        ValueError: For anything the user must change.
        OSError: If a Hub, a disk or a device's memory fails.
    """
    from locret.infer.evaluation.options import OPTION_CLASSES

    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--list" in arguments:
        _list(as_json="--json" in arguments)
        return 0
    (model, evaluation, budgets, report), chosen = parse_options("locret-eval", DESCRIPTION, OPTION_CLASSES, arguments)
    if report.list:
        _list(as_json=report.json)
        return 0
    if not report.output and not report.dry_run:
        raise ValueError("--output is missing; name a folder for the results")
    with warnings_as_lines("locret-eval", quiet=report.quiet):
        job = _prepare(model, evaluation, budgets, report, chosen)
        if report.dry_run:
            print_json(_plan(job))
        else:
            _execute(job)
    return 0


def _list(as_json: bool) -> None:
    """Print the tasks and methods there are; a name given beside --list is not looked at."""
    from locret.data import tasks
    from locret.infer.evaluation import methods

    known = {name: tasks.get(name) for name in tasks.names()}
    ways = {name: methods.get(name) for name in methods.names()}
    if as_json:
        facts = {
            name: {"version": t.version, "metric": t.metric, "source": t.source, "options": t.options()}
            for name, t in known.items()
        }
        described = {name: method.description for name, method in ways.items()}
        print_json({"tasks": facts, "methods": described, "modifiers": methods.MODIFIERS})
        return
    print("tasks (name, version, metric, source)")
    for name, task in known.items():
        print(f"  {name:<20} {task.version}  {task.metric:<20} {task.source}")
    print("methods")
    for name, method in ways.items():
        print(f"  {name:<20} {method.description}")
    print("modifiers of a method, as in locret+pyramid (what they change)")
    for name, changes in methods.MODIFIERS.items():
        print(f"  +{name:<19} {', '.join(f'{key}={value}' for key, value in changes.items())}")


def _prepare(
    model: ModelOptions, evaluation: EvalOptions, budgets: BudgetOptions, report: ReportOptions, chosen: set[str]
) -> _Job:
    """Resolve the options, and refuse what needs neither tokenizer nor weights to be refused."""
    import torch

    from locret.infer import loading
    from locret.infer.evaluation import output_folder, runner

    methods, tasks = evaluation.chosen_methods(), evaluation.chosen_tasks()
    if report.threads:
        torch.set_num_threads(report.threads)
    device = loading.resolve_device(model.device)
    # Something has to be chosen; without heads it is not used.
    scorer = ScorerOptions(
        heads=evaluation.heads,
        scorer=None if evaluation.heads else "streaming",
        allow_other_base=evaluation.allow_other_base,
    )
    heads, recommended = loading.load_scorer(scorer)
    policies = budgets.policies(chosen, recommended)
    config = loading.load_config(model)
    loading.check_matches(scorer, heads, config)
    dtype = loading.resolve_dtype(model.dtype, config, device)
    runs = runner.plan_runs(methods, policies, chosen)
    places = runner.plan_places(tasks, evaluation.token_lengths(), evaluation.samples, evaluation.seed)
    job = _Job(model, scorer, evaluation, report, tasks, places, runs, policies, heads, config, device, dtype)
    if not report.dry_run:
        output_folder.check_output(report.output, job.settings(), resume=report.resume, overwrite=report.overwrite)
    _warn_about_positions(config, runs, evaluation.token_lengths())
    return job


def _execute(job: _Job) -> None:
    """Load everything, open the output folder, measure, report."""
    import torch

    from locret.fingerprint import weight_fingerprint
    from locret.infer import loading
    from locret.infer.evaluation import output_folder
    from locret.infer.evaluation.methods import Setup
    from locret.infer.evaluation.report import write_results

    report, output = job.report, Path(job.report.output)
    tokenizer = loading.load_tokenizer(job.model)
    for task in job.tasks:
        task.check(tokenizer)
        # The shortest text may have no room for what the task hides.
        min((place for place in job.places if place.task is task), key=lambda place: place.tokens).sample(tokenizer)
    draw = report.figures == "all" and _can_draw()
    model = loading.load_model(job.model, job.config, job.device, job.dtype)
    trained = job.heads.to(job.device) if job.evaluation.heads else None
    # Weights can change under the same name, and their answers must not be mixed with the earlier ones'.
    weights = {"model": weight_fingerprint(model), "heads": trained and weight_fingerprint(trained)}
    settings = {**job.settings(), "weights": weights}
    output_folder.check_output(report.output, settings, resume=report.resume, overwrite=report.overwrite)
    log = output_folder.open_output(report.output, settings, overwrite=report.overwrite)
    setup = Setup(model, tokenizer, trained, job.evaluation.seed)
    try:
        _measure(setup, job.places, job.runs, log, report.quiet)
    except KeyboardInterrupt:
        write_results(output, log, settings, job.places, job.runs)
        sys.stderr.write(f"{len(log.records)} answers are in {log.path}; the same command with --resume goes on\n")
        raise
    except torch.OutOfMemoryError as error:
        raise OSError(
            f"{job.device} is out of memory; use --resume with a smaller --dtype, or start anew with shorter --lengths "
            "or a smaller --chunk-size"
        ) from error
    _report(job, setup, log, settings, draw)


def _measure(setup: Setup, places: list[Place], runs: list[Run], log: SampleLog, quiet: bool) -> None:
    """Evaluate what is missing, with a bar that knows the time left: runs differ in cost, so it counts tokens."""
    from tqdm import tqdm

    from locret.infer.evaluation import runner
    from locret.infer.evaluation.records import key

    done = log.done()
    waiting = sum(place.tokens for place in places for run in runs if key(place.axes | run.axes) not in done)
    total = sum(place.tokens for place in places) * len(runs)
    with tqdm(
        total=total,
        initial=total - waiting,
        unit="tok",
        unit_scale=True,
        file=sys.stderr,
        disable=True if quiet else None,
    ) as bar:
        for record in runner.evaluate(setup, places, runs, done):
            log.append(record)
            bar.set_postfix_str(f"{record['task']} {record['tokens']} {record['method']}", refresh=False)
            bar.update(record["tokens"])


def _report(job: _Job, setup: Setup, log: SampleLog, settings: dict[str, Any], draw: bool) -> None:
    """Write results and pictures, and print them."""
    from locret.infer.evaluation import report, summary

    output = Path(job.report.output)
    results = report.write_results(output, log, settings, job.places, job.runs)
    if draw:
        report.write_figures(output, log, results, setup, job.places, job.runs)
    if job.report.json:
        print_json(results)
        return
    print(summary.table(results["cells"]), end="")
    for name in results["figures"]:
        print(f"picture: {output / name}")


def _can_draw() -> bool:
    """Return whether pictures can be drawn, and say what to install if not."""
    from locret.infer import pictures

    try:
        pictures.require_matplotlib("--figures all")
    except ValueError as error:
        warnings.warn(f"{error}; everything but the pictures is written", stacklevel=2)
        return False
    return True


def _warn_about_positions(config: Any, runs: Sequence[Run], lengths: Sequence[int]) -> None:
    """Say what happens where positions go beyond what the backbone was trained on."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if limit is None or max(lengths) <= limit:
        return
    late = [r.method.name for r in runs if r.policy is None or r.policy.positions == "original"]
    if late:
        warnings.warn(
            f"prompts of {max(lengths):,} tokens go beyond the {limit:,} positions of this backbone, where its answers "
            f"usually fall apart; {', '.join(dict.fromkeys(late))} count positions in the text and will show it, "
            "--positions compact numbers the kept units only",
            stacklevel=2,
        )


def _plan(job: _Job) -> dict[str, Any]:
    """Return what would be done: runs, tokens, and the bytes of each policy's cache."""
    from locret.infer import loading

    new_tokens = max(task.max_new_tokens for task in job.tasks)
    planned = []
    for policy in dict.fromkeys(one.policy for one in job.runs if one.policy is not None):
        scorer, _ = loading.load_scorer(job.scorer)
        grows = policy.needs_length or policy.when == "prompt_end"
        tokens = max(job.evaluation.token_lengths()) if grows else None
        size = loading.planned_bytes(job.model, job.config, job.dtype, scorer, policy, new_tokens, prompt_tokens=tokens)
        planned.append({**policy.to_dict(), "planned_cache_bytes": size})
    return {
        "runs": len(job.runs) * len(job.places),
        "tokens": sum(place.tokens for place in job.places) * len(job.runs),
        "policies": planned,
        "config": job.settings(),
    }


def main() -> None:
    """Entry point of `locret-eval`."""
    run(command)


if __name__ == "__main__":
    main()
