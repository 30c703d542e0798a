"""The Markdown tables of an evaluation: a row per method and policy, and a suite's with its average and papers'."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from locret.base.tables import markdown
from locret.data.tasks.published.suites import PublishedRow, Suite
from locret.infer.evaluation.allotment import amount
from locret.infer.evaluation.records import AWARE, shown
from locret.infer.evaluation.summary import CELL

ERRORS = "±: standard error, the samples' standard deviation / √n (by jackknife where a task's score is not a mean)"
_READING = ("method", "budget", "chunk_size", "stabilizers", "budget_share")
_TIERS = ("gpu_gigabytes", "cpu_gigabytes")
_CLOSE = 0.1
"""Points by which a printed average may differ from its cells: they are rounded to one or two places."""


def table(found: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table: a row per method and policy, a column per task and length, and what it took."""
    found = shown([{"protocol": AWARE, **cell} for cell in found])
    columns = list(dict.fromkeys((_set(cell), cell["tokens"]) for cell in found))
    rows: dict[tuple[Any, ...], dict[tuple[str, int], dict[str, Any]]] = {}
    for cell in found:
        rows.setdefault(tuple(cell.get(name) for name in CELL[2:]), {})[_set(cell), cell["tokens"]] = cell
    policies = [dict(zip(CELL[2:], row, strict=True)) for row in rows]
    varied = [n for n in CELL[4:6] if len({policy[n] for policy in policies if policy[n] is not None}) > 1]
    names = [_title(column, found) for column in columns]
    tiers = ["host"] if any("host_bytes" in cell for cell in found) else []
    titles = ["method", "budget", *(name.replace("_", " ") for name in varied), *names]
    lines = []
    for policy, own in zip(policies, rows.values(), strict=True):
        texts = [policy["method"], amount(policy), *("" if policy[n] is None else f"{policy[n]:,}" for n in varied)]
        for column, name in zip(columns, names, strict=True):
            texts.append(_score(own.get(column), _full(rows, policy).get(column), name))
        hosts = [cell["host_bytes"] for cell in own.values() if "host_bytes" in cell]
        texts += [f"{max(c['kept_units'] for c in own.values()):,}", size(max(c["peak_bytes"] for c in own.values()))]
        texts += [size(max(hosts)) if hosts else "" for _ in tiers]
        for phase in ("prefill", "decode"):
            rates = [rate for cell in own.values() if (rate := cell[f"{phase}_tokens_per_second"])]
            texts.append(f"{statistics.fmean(rates):,.0f}" if rates else "")
        lines.append(texts)
    titles += ["units / KV head", "peak cache", *tiers, "read tokens/s", "write tokens/s"]
    noted = ["", ERRORS] if any(cell.get("standard_error") is not None for cell in found) else []
    if sharing := {cell["kv_ranks"] for cell in found if "kv_ranks" in cell}:
        noted += ["", f"peak cache: of {max(sharing)} processes that share the KV heads: bytes are those of one"]
    return "\n".join([*markdown(titles, lines), *noted]) + "\n"


def _full(
    rows: Mapping[tuple[Any, ...], dict[tuple[str, int], dict[str, Any]]], policy: dict[str, Any]
) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the plain cache's cells, of the same protocol if it was read in it."""
    nothing, protocol = (None, None, None, None), policy["protocol"]
    usual = rows.get(("full", *nothing, AWARE), {})
    return usual | rows.get((f"full, {protocol}", *nothing, protocol), {})


def _set(cell: dict[str, Any]) -> str:
    """Return the task's name without the part of it that was asked."""
    return str(cell.get("set", cell["task"]))


def _title(column: tuple[str, int], found: Sequence[dict[str, Any]]) -> str:
    """Return a column's title: a task with the part of a published set that all methods read, and the length.

    Published sets have prompts as long as they are, so their length is shown only where there are several.
    """
    task, tokens = column
    own = [cell for cell in found if _set(cell) == task]
    labels = {cell["task"] for cell in own if cell["tokens"] == tokens}
    name = labels.pop() if len(labels) == 1 else task
    single = "of" in own[0] and len({cell["tokens"] for cell in own}) == 1
    return name if single or not tokens else f"{name} @ {tokens:,}"


def _score(cell: dict[str, Any] | None, full: dict[str, Any] | None, title: str) -> str:
    if cell is None:
        return ""
    # Methods of an unfinished run may have read different parts of a published set.
    part = f" [{cell['task'].removeprefix(_set(cell)).strip(' ()')}]" if cell["task"] not in title else ""
    share = "" if full is None or cell is full or not full["score"] else f" ({cell['score'] / full['score']:.0%})"
    return f"{with_error(cell['score'], cell.get('standard_error'))}{share}{part}"


def with_error(score: float, error: float | None, places: int = 1) -> str:
    """Return a score with its standard error, if that is known."""
    return f"{score:.{places}f}" + ("" if error is None else f" ± {error:.{places}f}")


def size(count: float) -> str:
    """Return bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def suite_results(
    suite: Suite, cells: Sequence[dict[str, Any]], missing: Mapping[str, str], settings: dict[str, Any], published: bool
) -> dict[str, Any]:
    """Return the suite's part of results.json.

    Args:
        suite: The suite.
        cells: The cells of results.json.
        missing: Tasks whose rows there are not, and why.
        settings: The resolved configuration.
        published: Whether to add the rows that papers print.

    Returns:
        `rows`, each with `scores` by task, an `average`, and `partial`: whether a task is missing, or was not asked
        in full; `labels` of the tasks with `n of N`; `missing`; `average_rule`.
    """
    own = [cell for cell in cells if _set(cell) in suite.tasks]
    labels = {task: {cell["task"] for cell in own if _set(cell) == task} for task in suite.tasks}
    found: dict[str, Any] = {
        "name": suite.name,
        "title": suite.title,
        "tasks": list(suite.tasks),
        "average_rule": suite.average_rule,
        "labels": {task: next(iter(known)) if len(known) == 1 else task for task, known in labels.items()},
        "missing": dict(missing),
        "remarks": remarks(suite, settings),
        "rows": [_row(suite, reading, members) for reading, members in _readings(own, settings).items()],
    }
    if published:
        found["remarks"] += [suite.remark] if suite.remark else []
        found["published"] = [_printed(suite, row, settings) for row in suite.published]
    return found


def _readings(cells: Sequence[dict[str, Any]], settings: dict[str, Any]) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Return the cells of each row: of a method and policy, and of a length where rows were asked at several."""
    lengths = {cell["tokens"] for cell in cells if _has_length(cell, settings)}
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for cell in cells:
        # What has no length of its own belongs to the rows of all lengths.
        several = [None] if len(lengths) < 2 else [cell["tokens"]] if _has_length(cell, settings) else sorted(lengths)
        for tokens in several:
            found.setdefault((*(cell.get(name) for name in _READING), tokens), []).append(cell)
    return found


def _has_length(cell: dict[str, Any], settings: dict[str, Any]) -> bool:
    facts = settings["tasks"][_set(cell)]
    return bool(facts.get("prompt", {"limit_from": "length"})["limit_from"] == "length")


def _row(suite: Suite, reading: tuple[Any, ...], cells: list[dict[str, Any]]) -> dict[str, Any]:
    scores = {_set(cell): cell["score"] for cell in cells}
    errors = {_set(cell): cell.get("standard_error") for cell in cells}
    average = suite.average(scores)
    whole = len(scores) == len(suite.tasks)
    return {
        **dict(zip((*_READING, "tokens"), reading, strict=True)),
        "scores": {task: scores.get(task) for task in suite.tasks},
        "standard_errors": {task: errors.get(task) for task in suite.tasks},
        "groups": suite.group_means(scores),
        "average": None if average is None else round(average, 4),
        "average_standard_error": _average_error(suite, scores, errors),
        "memory": {
            "fast_bytes": max(c["peak_bytes"] for c in cells),
            "host_bytes": max(c.get("host_bytes", 0) for c in cells),
        },
        "tasks_measured": len(scores),
        "partial": not whole or any("of" in cell and cell["set"] != cell["task"] for cell in cells),
        "size_unknown": any("of" in cell and cell["of"] is None for cell in cells),
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
    cells = suite.cells_average(row)
    agrees = cells is None or (row.average is not None and abs(cells - row.average) < _CLOSE)
    return {
        "published": True,
        "source": row.source,
        "method": row.method,
        "model": row.model,
        "precision": row.precision,
        "scores": dict(zip(suite.tasks, row.scores or (None,) * len(suite.tasks), strict=True)),
        "average": row.average,
        "average_of_cells": None if agrees or cells is None else round(cells, 2),
        "note": row.note,
        "memory": row.memory and dict(zip(_TIERS, row.memory, strict=True)),
        "differs": differs(row, settings),
    }


def differs(row: PublishedRow, settings: dict[str, Any]) -> str:
    """Return in words how a published row's setting differs from ours, as far as its paper says."""
    model = str(settings["model"]).rstrip("/").split("/")[-1].lower()
    same = row.model.lower() in model or model in row.model.lower()
    which = "perhaps the same model" if same else f"model {row.model}"
    precision = "precision not stated" if row.precision == "not stated" else row.precision
    ours = f"{settings['model']} in {settings['dtype']}"
    return f"{which}, {precision}, their software and hardware; ours is {ours}"


def suite_table(found: dict[str, Any]) -> str:
    """Return the suite as Markdown: a row per method and policy, then the published ones, marked as such."""
    tasks, count = found["tasks"], len(found["tasks"])
    short = [found["labels"][task].partition("/")[2] for task in tasks]
    printed = found.get("published", ())
    tiers = any(row["memory"]["host_bytes"] for row in found["rows"]) or any(row["memory"] for row in printed)
    titles = ["method", "budget", *short, "average", *(["fast", "second tier"] if tiers else [])]
    lines = [f"**{found['name']}**: {found['title']}; average = {found['average_rule']}", ""]
    rows = []
    for row in found["rows"]:
        texts = [
            _shown(row["scores"][task], "missing" if task in found["missing"] else "", row["standard_errors"][task])
            for task in tasks
        ]
        average = _shown(row["average"], "", row["average_standard_error"])
        if row["tasks_measured"] < count:
            average += f" (partial: {row['tasks_measured']} of {count} tasks)"
        elif row["partial"]:
            average += " (perhaps partial: size unknown)" if row["size_unknown"] else " (partial: not all rows)"
        held = [size(row["memory"][name]) for name in ("fast_bytes", "host_bytes")] if tiers else []
        rows.append([_reading(row, found["rows"]), amount(row), *texts, average, *held])
    notes = list(dict.fromkeys(_footnote(row) for row in printed))
    for row in printed:
        texts = [_shown(row["scores"][task], "") for task in tasks]
        average = "none" if row["average"] is None else f"{row['average']:.2f}"
        if row["average_of_cells"] is not None:
            average += f" (its cells give {row['average_of_cells']:.2f})"
        gigabytes = row["memory"] or {}
        held = [f"{gigabytes[n]:.2f} GB" if n in gigabytes else "" for n in _TIERS] if tiers else []
        name = f"published: {row['method']}, {row['model']} [{notes.index(_footnote(row)) + 1}]"
        rows.append([name, "", *texts, average, *held])
    lines += markdown(titles, rows)
    if any(row["memory"] for row in printed):
        lines += ["", "Memory: ours are the bytes of the cache, counted; published are whole processes, with weights."]
    if found["missing"]:
        reasons = dict.fromkeys(found["missing"].values())
        for reason in reasons:
            names = [name for name, why in found["missing"].items() if why == reason]
            lines += ["", f"Missing: {', '.join(names)} ({reason})."]
    if any(row["partial"] for row in found["rows"]):
        lines += ["", "A partial average is not comparable with a published one."]
    lines += [part for remark in found["remarks"] for part in ("", remark)]
    lines += [part for index, note in enumerate(notes, start=1) for part in ("", f"[{index}] {note}")]
    return "\n".join(lines) + "\n"


def _footnote(row: dict[str, Any]) -> str:
    note = f"; {row['note']}" if row["note"] else ""
    return f"As printed in {row['source']}, not measured here. Differs: {row['differs']}{note}."


def remarks(suite: Suite, settings: dict[str, Any]) -> list[str]:
    """Return what makes our rows differ from the protocol or from the published data, in sentences."""
    facts = {name: settings["tasks"][name] for name in suite.tasks if "prompt" in settings["tasks"].get(name, {})}
    found = []
    for where, what in (("--max-prompt", "was asked for"), ("backbone", "this backbone has positions for")):
        limits = sorted({f["prompt"]["limit"] for f in facts.values() if f["prompt"]["limit_from"] == where})
        if limits:
            most = " to ".join(f"{limit:,}" for limit in dict.fromkeys((limits[0], limits[-1])))
            found.append(f"Prompts are cut to what {what} ({most} tokens), not to the protocol's limit.")
    if any(fact["generation"]["shortened"] for fact in facts.values()):
        found.append("Answers are shorter than the protocol allows (--max-new-tokens).")
    data = [part for fact in facts.values() for part in fact["data"]]
    if any("file" in part and part["revision"] is None for part in data):
        found.append("Rows come from local files, which are taken at their word: results.json has their SHA-256.")
    if any("generated" in part for part in data):
        found.append("Rows are generated here, by our own writing of the benchmark's generator.")
    sources = sorted({str(part["source"]) for part in data if "generated" in part and part.get("source")})
    if sources:
        found.append(f"Their texts: {'; '.join(dict.fromkeys(text for one in sources for text in one.split('; ')))}.")
    return found


def _reading(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """Return the method, with the numbers that tell it from others of the same budget."""
    twins = [one for one in rows if (one["method"], amount(one)) == (row["method"], amount(row))]
    parts = [f"{row['tokens']:,} tokens"] if row["tokens"] is not None else []
    parts += [
        f"{name.replace('_', ' ')} {row[name]:,}"
        for name in _READING[2:4]
        if len({one[name] for one in twins}) > 1 and row[name] is not None
    ]
    return ", ".join([row["method"], *parts])


def _shown(score: float | None, otherwise: str, error: float | None = None) -> str:
    return otherwise if score is None else with_error(score, error, 2)
