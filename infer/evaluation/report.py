"""What an evaluation leaves behind besides its records: results.json, the Markdown table and the pictures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from locret.files import write_text
from locret.infer.evaluation import budget_table, output_folder, suite_table, summary, tiers
from locret.infer.evaluation.job import Job
from locret.infer.evaluation.methods import Setup
from locret.infer.evaluation.records import RESULTS, TABLE, SampleLog, in_order, key
from locret.infer.evaluation.runner import Case, Run


def write_results(
    output: Path, log: SampleLog, settings: dict[str, Any], job: Job, unasked: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """Write results.json and results.md from what has been measured so far, and return the results.

    Args:
        output: Folder of the evaluation.
        log: Its records.
        settings: The resolved configuration.
        job: What is evaluated.
        unasked: Samples that could not be made.

    Raises:
        OSError: If they cannot be written.
    """
    cases, runs = job.cases, job.runs
    records = ordered(log, cases, runs)
    *earlier, found = output_folder.versions_of(output)
    results: dict[str, Any] = {
        "config": settings,
        "configuration_sha256": output_folder.fingerprint(settings),
        "versions": found,
        "commit": found.get("commit"),
        **({"resumed_from": earlier} if earlier else {}),
        "seed": settings["seed"],
        "complete": len(records) == (len(cases) - len(unasked)) * len(runs),
        **({"unasked": list(unasked)} if unasked else {}),
        "cells": summary.cells(records, {(case.task.name, case.tokens): case.samples for case in cases}),
        "figures": [],
    }
    if job.report.tiers:
        results["frontier"] = tiers.results(results["cells"])
    if suite := job.evaluation.chosen_suite():
        shown = job.evaluation.published
        results["suite"] = suite_table.results(suite, results["cells"], job.missing, settings, shown)
    write_text(output / TABLE, tables(results))
    write_text(output / RESULTS, json.dumps(results, indent=1) + "\n")
    return results


def tables(results: dict[str, Any]) -> str:
    """Return the results as Markdown: a suite's table first, budgets side by side last."""
    suite = suite_table.table(results["suite"]) + "\n" if "suite" in results else ""
    beside = budget_table.table(results["cells"])
    held = tiers.table(results["cells"]) if "frontier" in results else ""
    parts = [suite + summary.table(results["cells"]), *filter(None, (beside, held)), *_passed_over(results)]
    return "\n".join(parts)


def _passed_over(results: dict[str, Any]) -> list[str]:
    """Return a line for each task and length some of whose samples could not be made."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for one in results.get("unasked", ()):
        groups.setdefault((one["task"], one["tokens"]), []).append(one)
    return [
        f"Left out: {len(group)} samples of {task} @ {tokens:,} ({group[0]['reason']}).\n"
        for (task, tokens), group in groups.items()
    ]


def write_figures(
    output: Path,
    log: SampleLog,
    results: dict[str, Any],
    setup: Setup,
    cases: Sequence[Case],
    runs: Sequence[Run],
    *,
    quiet: bool = False,
) -> None:
    """Draw all pictures and add their names to results.json; numbers are on disk before the first one is drawn.

    Raises:
        ValueError: If matplotlib is not installed.
        OSError: If one cannot be written.
    """
    from locret.infer.evaluation import figures, insight, tiers_figure

    names: list[str] = figures.write_all(output, ordered(log, cases, runs), results)
    names += tiers_figure.write(output, results["cells"]) if "frontier" in results else []
    results["figures"] = names + insight.write(setup, output, cases, runs, quiet=quiet)
    write_text(output / RESULTS, json.dumps(results, indent=1) + "\n")


def ordered(log: SampleLog, cases: Sequence[Case], runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the records in the order of an evaluation without interruption."""
    return in_order(log.records, order_of(cases, runs))


def order_of(cases: Sequence[Case], runs: Sequence[Run]) -> dict[tuple[Any, ...], int]:
    """Return the rank of every record in an evaluation without interruption, by its key."""
    keys = [key(case.axes | run.axes) for case in cases for run in runs]
    return {name: index for index, name in enumerate(keys)}
