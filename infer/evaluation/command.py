"""`locret-eval`: compare methods on tasks within the same budget; tables, pictures, and every answer on record.

    locret-eval --model checkpoints/tiny --heads checkpoints/tiny-heads --methods full,locret,random \\
        --tasks passkey,number --lengths 2048,8192 --budget 256 --samples 20 --output runs/eval

Local tasks need no network. An interrupted run goes on with --resume, sample by sample.
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from locret.cli import parse_options, print_json, run
from locret.infer.options import ModelOptions

DESCRIPTION = "Compare methods of keeping cache units, on the same prompts and within the same budget."


def command(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Raises:
        ValueError: For anything the user must change.
        OSError: If a Hub, a disk or a device's memory fails.
    """
    from locret.infer.evaluation.options import BudgetOptions, EvalOptions, ReportOptions

    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--list" in arguments:
        print(listing(), end="")
        return 0
    classes = (ModelOptions, EvalOptions, BudgetOptions, ReportOptions)
    (model, evaluation, budgets, report), chosen = parse_options("locret-eval", DESCRIPTION, classes, arguments)
    return _execute(model, evaluation, budgets, report, chosen)


def listing() -> str:
    """Return the tasks and methods there are, one per line."""
    from locret.data import tasks
    from locret.infer.evaluation import methods

    lines = ["tasks (name, version, metric, source)"]
    lines += [f"  {t.name:<20} {t.version}  {t.metric:<20} {t.source}" for t in map(tasks.get, tasks.names())]
    lines += ["methods"]
    lines += [f"  {m.name:<20} {m.description}" for m in map(methods.get, methods.names())]
    return "\n".join(lines) + "\n"


def _execute(model: ModelOptions, evaluation: Any, budgets: Any, report: Any, chosen: set[str]) -> int:
    import torch

    from locret.infer import loading
    from locret.infer.evaluation import runner
    from locret.infer.evaluation.methods import Setup
    from locret.infer.options import ScorerOptions

    if not report.output and not report.dry_run:
        raise ValueError("--output is missing; name a folder for the results")
    methods, tasks = evaluation.chosen_methods(), evaluation.chosen_tasks()
    if report.threads:
        torch.set_num_threads(report.threads)
    device = loading.resolve_device(model.device)
    scorer = ScorerOptions(
        heads=evaluation.heads,
        scorer=None if evaluation.heads else "streaming",
        allow_other_base=evaluation.allow_other_base,
    )
    heads, recommended = loading.load_scorer(scorer)
    config = loading.load_config(model)
    loading.check_matches(scorer, heads, config)
    policies = budgets.policies(chosen, recommended)
    runs = runner.plan_runs(methods, policies)
    places = runner.plan_places(tasks, evaluation.token_lengths(), evaluation.samples, evaluation.seed)
    dtype = loading.resolve_dtype(model.dtype, config, device)
    settings = _settings(model, evaluation, policies, tasks, device, dtype)
    _warn_about_positions(config, runs, evaluation.token_lengths())
    if report.dry_run:
        print_json(_plan(settings, runs, places, model, config, dtype, scorer, tasks))
        return 0
    log = _open(report, settings)
    tokenizer = loading.load_tokenizer(model)
    for task in tasks:
        task.check(tokenizer)
    if report.figures == "all":
        _check_figures()
    weights = loading.load_model(model, config, device, dtype)
    trained = heads.to(device) if evaluation.heads else None
    setup = Setup(weights, tokenizer, trained, evaluation.seed)  # type: ignore[arg-type]
    try:
        _measure(setup, places, runs, log, report)
    except KeyboardInterrupt:
        sys.stderr.write(f"{len(log.records)} answers are in {log.path}; the same command with --resume goes on\n")
        raise
    except torch.OutOfMemoryError as error:
        raise OSError(f"{device} is out of memory; lower --lengths, --budget or --chunk-size, then --resume") from error
    return _report(setup, places, runs, log, settings, report)


def _measure(setup: Any, places: Any, runs: Any, log: Any, report: Any) -> None:
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
        disable=True if report.quiet else None,
    ) as bar:
        for record in runner.evaluate(setup, places, runs, done):
            log.append(record)
            bar.set_postfix_str(f"{record['task']} {record['tokens']} {record['method']}", refresh=False)
            bar.update(record["tokens"])


def _report(setup: Any, places: Any, runs: Any, log: Any, settings: dict[str, Any], report: Any) -> int:
    from locret.environment import versions
    from locret.infer.evaluation import records, summary

    output = Path(report.output)
    order = {
        records.key(place.axes | run.axes): i for i, (place, run) in enumerate((p, r) for p in places for r in runs)
    }
    ordered = records.in_order(log.records, order)
    results: dict[str, Any] = {
        "config": settings,
        "configuration_sha256": fingerprint(settings),
        "versions": versions(),
        "commit": versions().get("commit"),
        "seed": settings["seed"],
        "complete": len(ordered) == len(order),
        "cells": summary.cells(ordered),
        "figures": [],
    }
    if report.figures == "all":
        results["figures"] = _figures(setup, output, ordered, results, places, runs)
    table = summary.table(results["cells"])
    records.write_atomically(output / records.RESULTS, json.dumps(results, indent=1) + "\n")
    records.write_atomically(output / records.TABLE, table)
    if report.json:
        print_json(results)
    else:
        print(table, end="")
        for name in results["figures"]:
            print(f"picture: {output / name}")
    return 0


def _figures(setup: Any, output: Path, ordered: Any, results: Any, places: Any, runs: Any) -> list[str]:
    """Draw all pictures; what is kept, and how consistent scores are, is shown on the first task's longest prompts."""
    from locret.infer.evaluation import figures, insight

    names: list[str] = figures.write_all(output, ordered, results)
    return names + insight.write(setup, output, places, runs)


def _check_figures() -> None:
    from locret.infer import pictures

    pictures.require_matplotlib("--figures all")


def _settings(
    model: ModelOptions, evaluation: Any, policies: Any, tasks: Any, device: Any, dtype: Any
) -> dict[str, Any]:
    """Return everything that results depend on, resolved."""
    return {
        "model": model.model,
        "revision": model.revision,
        "adapter": model.adapter,
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "attn": model.attn,
        "heads": evaluation.heads,
        "methods": [method.name for method in evaluation.chosen_methods()],
        "tasks": {task.name: {"version": task.version, **task.options()} for task in tasks},
        "lengths": evaluation.token_lengths(),
        "samples": evaluation.samples,
        "seed": evaluation.seed,
        "policies": [policy.to_dict() for policy in policies],
        "decoding": "greedy",
    }


def fingerprint(settings: dict[str, Any]) -> str:
    """Return the hash of the resolved configuration."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def _open(report: Any, settings: dict[str, Any]) -> Any:
    """Prepare the output folder.

    Raises:
        ValueError: If it holds a run of another configuration, one that is to be resumed, or something else.
        OSError: If it cannot be written.
    """
    from locret.infer.evaluation import records

    output = Path(report.output)
    state = output / "configuration.json"
    if output.is_file():
        raise ValueError(f"--output {output} is a file; name a folder")
    held = sorted(path.name for path in output.iterdir()) if output.is_dir() else []
    if held and not state.is_file():
        raise ValueError(f"--output {output} holds something else than an evaluation; choose another folder")
    log = records.SampleLog(output)
    if held and not report.overwrite:
        if json.loads(state.read_text(encoding="utf-8")) != settings:
            raise ValueError(
                f"--output {output} holds an evaluation of another configuration; choose another folder, or "
                "--overwrite it"
            )
        if not report.resume:
            raise ValueError(
                f"--output {output} holds this evaluation already; --resume goes on, --overwrite starts again"
            )
        log.load()
        return log
    try:
        output.mkdir(parents=True, exist_ok=True)
        for name in (records.SAMPLES, records.RESULTS, records.TABLE):
            (output / name).unlink(missing_ok=True)
        for picture in output.glob("*.png"):
            picture.unlink()
        records.write_atomically(state, json.dumps(settings, indent=1) + "\n")
    except OSError as error:
        raise OSError(f"--output {output} cannot be written ({error.strerror}); choose another folder") from error
    return log


def _warn_about_positions(config: Any, runs: Any, lengths: list[int]) -> None:
    """Say what happens where positions go beyond what the backbone was trained on."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if limit is None or max(lengths) <= limit:
        return
    late = [r.method.name for r in runs if r.policy is None or r.policy.positions == "original"]
    if late:
        warnings.warn(
            f"prompts of {max(lengths):,} tokens go beyond the {limit:,} positions of this backbone, where its answers "
            f"usually fall apart; {', '.join(dict.fromkeys(late))} count positions in the text and will show it",
            stacklevel=2,
        )


def _plan(
    settings: Any, runs: Any, places: Any, model: Any, config: Any, dtype: Any, scorer: Any, tasks: Any
) -> dict[str, Any]:
    """Return what would be done: runs, tokens, and the bytes of each policy's cache."""
    from locret.infer import loading

    new_tokens = max(task.max_new_tokens for task in tasks)
    planned = []
    for policy in dict.fromkeys(one.policy for one in runs if one.policy is not None):
        heads, _ = loading.load_scorer(scorer)
        size = loading.planned_bytes(model, config, dtype, heads, policy, new_tokens)
        planned.append({**policy.to_dict(), "planned_cache_bytes": size})
    return {
        "runs": len(runs) * len(places),
        "tokens": sum(place.tokens for place in places) * len(runs),
        "policies": planned,
        "config": settings,
    }


def main() -> None:
    """Entry point of `locret-eval`."""
    run(command)


if __name__ == "__main__":
    main()
