"""What an evaluation leaves behind besides its records: the cells of results.json, and the table of results.md.

Of a suite, a row per method and policy with its average, beside the rows that papers print.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from locret.base.files import write_text
from locret.base.tables import markdown
from locret.data.tasks.published.suites import PublishedRow, Suite
from locret.data.tasks.task import SampleSet, Task
from locret.environment import versions
from locret.infer.evaluation.job import Job
from locret.infer.evaluation.plan import Case, Run
from locret.infer.evaluation.records import AWARE, RESULTS, TABLE, SampleLog, fingerprint, key

CELL = ("task", "tokens", "method", "budget", "chunk_size", "stabilizers", "budget_share", "protocol")
_OPTIONAL = ("host_bytes", "moved_bytes", "kv_ranks")
ERRORS = "±: standard error, the samples' standard deviation / √n"


def write_results(output: Path, log: SampleLog, settings: dict[str, Any], job: Job) -> dict[str, Any]:
    """Write results.json and results.md from what has been measured so far, and return the results."""
    cases, runs, here = job.cases, job.runs, versions()
    order = order_of(cases, runs)  # that of an evaluation without interruption
    records = sorted((one for one in log.records if key(one) in order), key=lambda one: order[key(one)])
    found = cells(records, {(case.task.name, case.tokens): case.samples for case in cases})
    results: dict[str, Any] = {
        "config": settings,
        "configuration_sha256": fingerprint(settings),
        "versions": here,
        "commit": here.get("commit"),
        "complete": len(records) == len(cases) * len(runs),
        **({"left_out": list(job.unmade.values())} if job.unmade else {}),
        "cells": found,
        "policies": [run.axes | {"policy": run.policy.to_dict()} for run in runs if run.policy is not None],
    }
    if suite := job.evaluation.chosen_suite():
        published = job.evaluation.published
        results["suite"] = suite_results(suite, shown(found), job.missing, settings, published)
    write_text(output / TABLE, as_markdown(results))
    write_text(output / RESULTS, json.dumps(results, indent=1) + "\n")
    return results


def as_markdown(results: dict[str, Any]) -> str:
    """Return the results as Markdown: a suite's table first."""
    suite = [suite_table(results["suite"])] if "suite" in results else []
    left = [f"Left out: {one}.\n" for one in results.get("left_out", ())]
    return "\n".join([*suite, table(results["cells"]), *left])


def order_of(cases: Sequence[Case], runs: Sequence[Run]) -> dict[tuple[Any, ...], int]:
    """Return the rank of every record in an evaluation without interruption, by its key."""
    keys = [key(case.axes | run.axes) for case in cases for run in runs]
    return {name: index for index, name in enumerate(keys)}


def cells(records: Sequence[dict[str, Any]], sets: Mapping[tuple[str, int], SampleSet]) -> list[dict[str, Any]]:
    """Return one cell per task, length, method, policy and protocol, in the order of the records.

    A cell holds `n` texts, where several questions were asked of each the number of `questions` in all, `score` (mean
    x 100 over texts, of each the mean over its questions), its `standard_error`, per KV head `kept_units` (mean of the
    layers) and `peak_units` (of the fullest layer), both the largest of the samples, `cache_bytes` after reading,
    `peak_bytes`, with a second tier `host_bytes` and `moved_bytes` (fetched from it per sample, the largest), where
    processes share the KV heads their number `kv_ranks` (bytes are those of one), and `prefill_tokens_per_second` and
    `decode_tokens_per_second` (all tokens / all seconds). The `task` of a published set says how much of it was asked;
    its plain name is `set`, its size `of` (None: unknown), and its score follows its protocol where that is not a mean.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault(tuple(record.get(name) for name in CELL), []).append(record)
    found = []
    for group, members in groups.items():
        cell = {name: value for name, value in zip(CELL, group, strict=True) if (name, value) != ("budget_share", None)}
        whole, texts = sets[cell["task"], cell["tokens"]], by_text(members)
        cell |= {"set": cell["task"], "task": whole.label(len(texts)), "n": len(texts)}
        cell |= {"questions": len(members)} if any("question" in record for record in members) else {}
        cell |= task_score(whole.task, texts) | ({} if whole.made else {"of": whole.of})
        for name in ("kept_units", "peak_units", "cache_bytes", "peak_bytes", *_OPTIONAL):
            if any(name in record for record in members):
                cell[name] = max(record.get(name, 0) for record in members)
        for name, tokens in (("prefill", "prompt_tokens"), ("decode", "generated_tokens")):
            seconds = sum(record[f"{name}_seconds"] for record in members)
            rate = round(sum(record[tokens] for record in members) / seconds, 1) if seconds else None
            cell[f"{name}_tokens_per_second"] = rate
        found.append(cell)
    return found


def task_score(task: Task, texts: Sequence[Sequence[dict[str, Any]]]) -> dict[str, float | None]:
    """Return the `score` of a task from 0 to 100 by its own rule, and its `standard_error` where that is a mean.

    Several questions of one text count as one sample: they stand or fall together.
    """
    error = None
    if type(task).summarise is Task.summarise:
        scores = [statistics.fmean(100 * record["score"] for record in text) for text in texts]
        score = statistics.fmean(scores)
        error = round(statistics.stdev(scores) / len(scores) ** 0.5, 4) if len(scores) > 1 else None
    else:
        own = [record for text in texts for record in text]
        answers = [(record["prediction"], tuple(record["targets"])) for record in own]
        score = 100 * task.summarise([record["score"] for record in own], answers)
    return {"score": round(score, 4), "standard_error": error}


def by_text(records: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the records of each text, of one task, length and way of reading."""
    texts: dict[int, list[dict[str, Any]]] = {}
    for record in records:
        texts.setdefault(record["index"] if "question" in record else len(texts), []).append(record)
    return list(texts.values())


def shown(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return records or cells for people: the method's name says its protocol where that is not the usual one."""
    return [
        one if one["protocol"] == AWARE else {**one, "method": f"{one['method']}, {one['protocol']}"} for one in found
    ]


def with_error(score: float | None, error: float | None, places: int = 1) -> str:
    """Return a score with its standard error, if they are known."""
    if score is None:
        return ""
    return f"{score:.{places}f}" + ("" if error is None else f" ± {error:.{places}f}")


def amount(found: Mapping[str, Any]) -> str:
    """Return the budget of a record or a cell for people: "256", "10%" of the prompt, or "all"."""
    if found.get("budget_share") is not None:
        return f"{100 * found['budget_share']:.6g}%"
    return "all" if found["budget"] is None else f"{found['budget']:,}"


def size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def table(found: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table: a row per method and policy, a column per task and length, and what it took."""
    found = shown(found)
    columns = list(dict.fromkeys((cell["set"], cell["tokens"]) for cell in found))
    rows: dict[tuple[Any, ...], dict[tuple[str, int], dict[str, Any]]] = {}
    for cell in found:
        rows.setdefault(tuple(cell.get(name) for name in CELL[2:]), {})[cell["set"], cell["tokens"]] = cell
    policies = [dict(zip(CELL[2:], row, strict=True)) for row in rows]
    names = [_title(column, found) for column in columns]
    tiers = ["host"] if any("host_bytes" in cell for cell in found) else []
    lines = []
    for policy, own in zip(policies, rows.values(), strict=True):
        texts = [policy["method"], amount(policy)]
        texts += [_score(own.get(column), name) for column, name in zip(columns, names, strict=True)]
        cells = list(own.values())
        texts += [f"{max(cell['kept_units'] for cell in cells):,}", size(max(cell["peak_bytes"] for cell in cells))]
        texts += [size(max(cell.get("host_bytes", 0) for cell in cells)) for _ in tiers]
        for phase in ("prefill", "decode"):
            rates = [rate for cell in cells if (rate := cell[f"{phase}_tokens_per_second"])]
            texts.append(f"{statistics.fmean(rates):,.0f}" if rates else "")
        lines.append(texts)
    titles = ["method", "budget", *names, "units / KV head"]
    titles += ["peak cache", *tiers, "read tokens/s", "write tokens/s"]
    noted = ["", ERRORS] if any(cell["standard_error"] is not None for cell in found) else []
    if sharing := {cell["kv_ranks"] for cell in found if "kv_ranks" in cell}:
        noted += ["", f"peak cache: of {max(sharing)} processes that share the KV heads: bytes are those of one"]
    return "\n".join([*markdown(titles, lines), *noted]) + "\n"


def _title(column: tuple[str, int], found: Sequence[dict[str, Any]]) -> str:
    """Return a column's title: a task with the part of a published set that all methods read, and the length.

    Published sets have prompts as long as they are, so their length is shown only where there are several.
    """
    task, tokens = column
    own = [cell for cell in found if cell["set"] == task]
    labels = {cell["task"] for cell in own if cell["tokens"] == tokens}
    name = labels.pop() if len(labels) == 1 else task
    single = "of" in own[0] and len({cell["tokens"] for cell in own}) == 1
    return name if single or not tokens else f"{name} @ {tokens:,}"


def _score(cell: dict[str, Any] | None, title: str) -> str:
    if cell is None:
        return ""
    # Methods of an unfinished run may have read different parts of a published set.
    part = f" [{cell['task'].removeprefix(cell['set']).strip(' ()')}]" if cell["task"] not in title else ""
    return f"{with_error(cell['score'], cell['standard_error'])}{part}"


_READING = ("method", "budget", "budget_share", "chunk_size", "stabilizers")


def suite_results(
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
    if (base := suite.average(scores)) is None or len(known) < len(scores):
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


def suite_table(found: dict[str, Any]) -> str:
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
