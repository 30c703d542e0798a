"""A suite's part of the results: a row per method and policy with its average, beside the rows that papers print."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from locret.base.tables import markdown
from locret.data.tasks.published.suites import PublishedRow, Suite
from locret.infer.evaluation.records import amount, with_error

_READING = ("method", "budget", "budget_share", "chunk_size", "stabilizers")


def results(
    suite: Suite, cells: Sequence[dict[str, Any]], missing: Mapping[str, str], settings: dict[str, Any], published: bool
) -> dict[str, Any]:
    """Return the suite's part of results.json: `rows`, each with `scores` by task, an `average`, and `partial` (a task
    is missing, or was not asked in full), `labels` of the tasks with `n of N`, and what is `missing` and why.
    """
    labels = {task: {cell["task"] for cell in cells if cell["set"] == task} for task in suite.tasks}
    found: dict[str, Any] = {
        "name": suite.name,
        "title": suite.title,
        "tasks": list(suite.tasks),
        "average_rule": suite.average_rule,
        "labels": {task: next(iter(known)) if len(known) == 1 else task for task, known in labels.items()},
        "missing": dict(missing),
        "remarks": remarks(settings),
        "rows": [_row(suite, reading, members) for reading, members in _readings(cells).items()],
    }
    if published:
        found["remarks"] += [suite.remark] if suite.remark else []
        found["published"] = [_printed(suite, row, settings) for row in suite.published]
    return found


def _readings(cells: Sequence[dict[str, Any]]) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Return the cells of each row: of a method and policy, and of a length where prompts were made at several."""
    lengths = {cell["tokens"] for cell in cells if "of" not in cell}
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for cell in cells:
        tokens = cell["tokens"] if len(lengths) > 1 else None
        found.setdefault((*(cell.get(name) for name in _READING), tokens), []).append(cell)
    return found


def _row(suite: Suite, reading: tuple[Any, ...], cells: list[dict[str, Any]]) -> dict[str, Any]:
    scores = {cell["set"]: cell["score"] for cell in cells}
    errors = {cell["set"]: cell["standard_error"] for cell in cells}
    average = suite.average(scores)
    return {
        **dict(zip((*_READING, "tokens"), reading, strict=True)),
        "scores": {task: scores.get(task) for task in suite.tasks},
        "standard_errors": {task: errors.get(task) for task in suite.tasks},
        "average": None if average is None else round(average, 4),
        "average_standard_error": _average_error(suite, scores, errors),
        "partial": len(scores) < len(suite.tasks) or any("of" in c and c["set"] != c["task"] for c in cells),
    }


def _average_error(suite: Suite, scores: Mapping[str, float], errors: Mapping[str, float | None]) -> float | None:
    """Return the standard error of an average of tasks, whose samples are drawn apart; None if one is not known."""
    known = {task: error for task, error in errors.items() if error is not None}
    base = suite.average(scores)
    if base is None or len(known) < len(scores):
        return None
    # An average is linear: what a task weighs is what one point more of it adds.
    raised = {task: (suite.average({**scores, task: scores[task] + 1}) or 0.0) - base for task in scores}
    return round(math.fsum((raised[task] * known[task]) ** 2 for task in scores) ** 0.5, 4)


def _printed(suite: Suite, row: PublishedRow, settings: dict[str, Any]) -> dict[str, Any]:
    precision = "precision not stated" if row.precision == "not stated" else row.precision
    return {
        "source": row.source,
        "method": row.method,
        "model": row.model,
        "scores": dict(zip(suite.tasks, row.scores or (None,) * len(suite.tasks), strict=True)),
        "average": row.average,
        "note": f"As printed in {row.source}, not measured here. Differs: model {row.model}, {precision}, their "
        f"software and hardware; ours is {settings['model']} in {settings['dtype']}{'; ' * bool(row.note)}{row.note}.",
    }


def table(found: dict[str, Any]) -> str:
    """Return the suite as Markdown: a row per method and policy, then the published ones, marked as such."""
    tasks, printed = found["tasks"], found.get("published", ())
    short = [found["labels"][task].partition("/")[2] for task in tasks]
    rows = []
    for row in found["rows"]:
        scores = [
            with_error(row["scores"][task], row["standard_errors"][task], 2) or "missing" * (task in found["missing"])
            for task in tasks
        ]
        average = with_error(row["average"], row["average_standard_error"], 2) + " (partial)" * row["partial"]
        length = "" if row["tokens"] is None else f", {row['tokens']:,} tokens"
        rows.append([f"{row['method']}{length}", amount(row), *scores, average])
    notes = list(dict.fromkeys(row["note"] for row in printed))
    for row in printed:
        average = with_error(row["average"], None, 2) or "none"
        name = f"published: {row['method']}, {row['model']} [{notes.index(row['note']) + 1}]"
        scores = [with_error(row["scores"][task], None, 2) for task in tasks]
        rows.append([name, "", *scores, average])
    below = [f"Missing: {name} ({reason})." for name, reason in found["missing"].items()]
    if any(row["partial"] for row in found["rows"]):
        below.append("A partial average, of some tasks or rows, is not comparable with a published one.")
    below += found["remarks"] + [f"[{index}] {note}" for index, note in enumerate(notes, start=1)]
    head = f"**{found['name']}**: {found['title']}; average = {found['average_rule']}"
    lines = [head, "", *markdown(["method", "budget", *short, "average"], rows)]
    return "\n".join([*lines, *(part for line in below for part in ("", line))]) + "\n"


def remarks(settings: dict[str, Any]) -> list[str]:
    """Return what makes our rows differ from the protocol or from the published data, in sentences."""
    facts = [one for one in settings["tasks"].values() if "limit_from" in one]
    data = [part for one in facts for part in one["data"]]
    found = []
    for where, what in (("--max-prompt", "was asked for"), ("backbone", "this backbone has positions for")):
        if limits := sorted({one["limit"] for one in facts if one["limit_from"] == where}):
            most = " to ".join(f"{limit:,}" for limit in dict.fromkeys((limits[0], limits[-1])))
            found.append(f"Prompts are cut to what {what} ({most} tokens), not to the protocol's limit.")
    if any(one["shortened"] for one in facts):
        found.append("Answers are shorter than the protocol allows (--max-new-tokens).")
    if any("generated" in part for part in data):
        texts = sorted({str(part["texts"]) for part in data if part.get("texts")})
        found.append(
            "Rows are generated here, by our own writing of the benchmark's generator"
            + (f", from texts of {', '.join(texts)}." if texts else ".")
        )
    return found
