"""What an evaluation leaves behind besides its records: results.json, the Markdown table and the pictures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from locret.base.files import write_text
from locret.infer.evaluation import output_folder, summary, tables
from locret.infer.evaluation.job import Job
from locret.infer.evaluation.records import RESULTS, TABLE, SampleLog, in_order, key, shown
from locret.infer.evaluation.runner import Case, Run, Unmade


def write_results(output: Path, log: SampleLog, settings: dict[str, Any], job: Job) -> dict[str, Any]:
    """Write results.json and results.md from what has been measured so far, and return the results.

    Args:
        output: Folder of the evaluation.
        log: Its records.
        settings: The resolved configuration.
        job: What is evaluated.

    Raises:
        OSError: If they cannot be written.
    """
    cases, runs = job.cases, job.runs
    records = ordered(log, cases, runs)
    found_cells = summary.cells(records, {(case.task.name, case.tokens): case.samples for case in cases})
    named = shown(found_cells)
    *earlier, found = output_folder.versions_of(output)
    results: dict[str, Any] = {
        "config": settings,
        "configuration_sha256": output_folder.fingerprint(settings),
        "versions": found,
        "commit": found.get("commit"),
        **({"resumed_from": earlier} if earlier else {}),
        "seed": settings["seed"],
        "complete": len(records) == len(cases) * len(runs),
        **({"left_out": [asdict(one) for one in job.unmade]} if job.unmade else {}),
        "cells": found_cells,
        "figures": [],
    }
    if suite := job.evaluation.chosen_suite():
        published = job.evaluation.published
        results["suite"] = tables.suite_results(suite, named, job.missing, settings, published)
    write_text(output / TABLE, as_markdown(results))
    write_text(output / RESULTS, json.dumps(results, indent=1) + "\n")
    return results


def as_markdown(results: dict[str, Any]) -> str:
    """Return the results as Markdown: a suite's table first."""
    suite = tables.suite_table(results["suite"]) + "\n" if "suite" in results else ""
    left = [f"Left out: {Unmade(**one)}.\n" for one in results.get("left_out", ())]
    return "\n".join([suite + tables.table(results["cells"]), *left])


def write_figures(
    output: Path, log: SampleLog, results: dict[str, Any], cases: Sequence[Case], runs: Sequence[Run]
) -> None:
    """Draw all pictures and add their names to results.json; numbers are on disk before the first one is drawn.

    Raises:
        ValueError: If matplotlib is not installed.
        OSError: If one cannot be written.
    """
    from locret.infer.evaluation import figures

    results["figures"] = figures.write_all(output, shown(ordered(log, cases, runs)), shown(results["cells"]))
    write_text(output / RESULTS, json.dumps(results, indent=1) + "\n")


def ordered(log: SampleLog, cases: Sequence[Case], runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the records in the order of an evaluation without interruption."""
    return in_order(log.records, order_of(cases, runs))


def order_of(cases: Sequence[Case], runs: Sequence[Run]) -> dict[tuple[Any, ...], int]:
    """Return the rank of every record in an evaluation without interruption, by its key."""
    keys = [key(case.axes | run.axes) for case in cases for run in runs]
    return {name: index for index, name in enumerate(keys)}
