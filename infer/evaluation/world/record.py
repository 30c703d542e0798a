"""world.json: what the units of `--suite world` found, in one record from which the page is drawn."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from locret.environment import versions
from locret.files import read_json, write_text
from locret.infer.evaluation import methods, presses
from locret.infer.evaluation.protocols import AGNOSTIC, AWARE, protocol_of
from locret.infer.evaluation.records import SAMPLES, read
from locret.infer.evaluation.world import ordering, plan
from locret.infer.evaluation.world.plan import Unit
from locret.infer.methods import FULL, LOCRET
from locret.scorers.published_gate import PublishedGateScorer

RECORD = "world.json"
FRONTIER = "frontier"
"""The rows from which accuracy against bytes is drawn."""
_OF_FRONTIER = ("budgets", "presses", "press_budgets")
"""The parts that they come from, which read the same texts; those of the field are others."""
COMPARED = {AGNOSTIC: ("field", "best_presses"), AWARE: ("field_aware", "best_presses_aware")}
"""By protocol, the parts whose methods are compared text by text."""
ANSWERABLE = 95.0
"""Score of the full cache from which on a task is in the headline: below it the backbone fails, not the method."""
_MASKED = 1.5
"""Bytes per unit, of the fewest that a method has, from which on it holds what it says has gone."""
COLUMNS = (
    *("part", "task", "tokens", "method", "budget", "texts", "questions", "score", "error"),
    *("units", "bytes", "host_bytes", "peak_bytes", "seconds"),
)
"""Of a row: a method on a task. `score` is the mean over texts (0 to 100), `error` its standard error, `units` per KV
head, `bytes` held after reading, `seconds` of a median answer, reading included."""


def answers_of(output: Path, unit: Unit) -> list[dict[str, Any]]:
    """Return the records of a unit; those of an unfinished one are all that it has.

    Raises:
        ValueError: If its file is damaged.
    """
    return [{**found, "seed": unit.seed} for found in read(output / unit.name / SAMPLES)[0]]


def save(record: Mapping[str, Any], path: Path) -> None:
    """Write a record, a row of numbers per line.

    Raises:
        OSError: If it cannot be written.
    """
    head = json.dumps({name: value for name, value in record.items() if name != "rows"}, indent=1)
    rows = ",\n".join(f"  {json.dumps(row)}" for row in record["rows"])
    write_text(path, f'{head[:-2]},\n "rows": [\n{rows}\n ]\n}}\n')


def compiled(
    output: Path,
    units: Sequence[Unit],
    missing: Mapping[str, str],
    facts: Mapping[str, Any],
    chance: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the record.

    Args:
        output: Folder of the units.
        units: What was asked.
        missing: Parts that were not, and why.
        facts: What else the record says: seconds of the units, tasks that cannot be made.
        chance: What `random` scores against other texts' questions, by protocol.

    Raises:
        ValueError: If a unit's record is damaged.
    """
    parts = list(dict.fromkeys(unit.part for unit in units))
    by_part = {
        part.name: [one for unit in units if unit.part == part for one in answers_of(output, unit)] for part in parts
    }
    return {
        "suite": "world",
        "versions": versions(),
        "config": _configuration(output, units),
        "parts": [_part(part.name, units, by_part[part.name]) for part in parts if not part.capacity],
        "capacity": _capacity(output, units),
        "missing": dict(missing),
        **facts,
        "columns": list(COLUMNS),
        "rows": [
            row for name, found in {**by_part, FRONTIER: of_frontier(by_part)}.items() for row in rows(name, found)
        ],
        "order": {
            protocol: {
                **ordering.stability(scores, list(filter(methods.knows_answers, scores))),
                "top": top(scores, protocol),
                "chance": (chance or {}).get(protocol),
            }
            for protocol, scores in _fields(by_part).items()
        },
        "ahead": [
            {"protocol": protocol, **one}
            for protocol, names in COMPARED.items()
            for method in (LOCRET, plan.SHARES, f"{plan.SHARES}{plan.PLACED}")
            for one in ahead([answer for name in names for answer in by_part.get(name, ())], method)
        ],
    }


def _configuration(output: Path, units: Sequence[Unit]) -> dict[str, Any]:
    """Return what all units have in common of their configurations."""
    from locret.infer.evaluation.output_folder import CONFIGURATION

    found: list[dict[str, Any]] = []
    for unit in units:
        path = output / unit.name / CONFIGURATION
        if path.is_file():
            found.append(json.loads(path.read_text(encoding="utf-8")))
    if not found:
        return {}
    kvpress = next((one["kvpress"] for one in found if one.get("kvpress")), None)
    shared = {name: value for name, value in found[0].items() if all(one.get(name) == value for one in found)}
    return {**shared, "kvpress": kvpress}


def _capacity(output: Path, units: Sequence[Unit]) -> dict[str, Any] | None:
    """Return what the capacity curve is drawn from, without the configuration that all units share."""
    path = next((output / unit.name / "capacity.json" for unit in units if unit.part.capacity), None)
    if path is None or not path.is_file():
        return None
    return {name: value for name, value in read_json(path, "capacity").items() if name not in ("config", "commit")}


def _part(name: str, units: Sequence[Unit], answers: Sequence[Any]) -> dict[str, Any]:
    own = [unit for unit in units if unit.part.name == name]
    options = own[0].options
    return {
        **{name: value for name, value in asdict(own[0].part).items() if name != "asks"},
        "seeds": len({unit.seed for unit in own}),
        "seed_numbers": sorted({unit.seed for unit in own}),
        "units": [unit.name for unit in own],
        "methods": len({name for unit in own for name in unit.options["methods"]}),
        "budgets": options["budget"],
        "lengths": options["lengths"],
        "texts": options["samples"],
        "questions": options.get("questions"),
        "answers": len(answers),
    }


def _text(record: Mapping[str, Any]) -> ordering.Text:
    return record["seed"], record["task"], record["tokens"], record["index"]


def text_scores(records: Iterable[Mapping[str, Any]]) -> dict[ordering.Text, float]:
    """Return the score of each text, 0 to 100: the mean over its questions, which stand or fall together."""
    groups: dict[ordering.Text, list[float]] = {}
    for record in records:
        groups.setdefault(_text(record), []).append(100 * record["score"])
    return {text: statistics.fmean(scores) for text, scores in groups.items()}


def rows(part: str, records: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """Return a row of `COLUMNS` per task, length, method and budget of a part, over all its seeds."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in records:
        axes = tuple(record[name] for name in ("task", "tokens", "method", "budget"))
        groups.setdefault(axes, []).append(record)
    found = []
    for axes, own in groups.items():
        scores = list(text_scores(own).values())
        error = statistics.stdev(scores) / len(scores) ** 0.5 if len(scores) > 1 else None
        seconds = statistics.median(one["prefill_seconds"] + one["decode_seconds"] for one in own)
        most = {
            name: max(one.get(name, 0) for one in own)
            for name in ("kept_units", "cache_bytes", "host_bytes", "peak_bytes")
        }
        numbers = [round(statistics.fmean(scores), 3), None if error is None else round(error, 3)]
        found.append([part, *axes, len(scores), len(own), *numbers, *most.values(), round(seconds, 4)])
    return found


def of_frontier(by_part: Mapping[str, Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the answers from which score against bytes is drawn: to the questions that all methods were asked.

    The part of one budget asks more of each text than those of several. Empty without methods at several budgets.
    """
    if not by_part.get("budgets"):
        return []
    parts = [own for name in _OF_FRONTIER if (own := by_part.get(name))]
    common = set.intersection(*({_question(one) for one in own} for own in parts)) if parts else set()
    return [one for own in parts for one in own if _question(one) in common]


def _question(record: Mapping[str, Any]) -> tuple[Any, ...]:
    return *_text(record), record.get("question"), record.get("prompt_sha256")


def _fields(by_part: Mapping[str, Sequence[dict[str, Any]]]) -> dict[str, dict[str, dict[ordering.Text, float]]]:
    """Return the texts' scores of every method of the field, by protocol."""
    found = {}
    for part, protocol in (("field", AGNOSTIC), ("field_aware", AWARE)):
        own = by_part.get(part, ())
        by_method: dict[str, list[dict[str, Any]]] = {}
        for record in own:
            by_method.setdefault(record["method"], []).append(record)
        if by_method:
            found[protocol] = {name: text_scores(records) for name, records in by_method.items()}
    return found


def bounded(names: Iterable[str]) -> list[str]:
    """Return the methods that keep no more than the budget: those that an oracle bounds."""
    found = []
    for name in names:
        if name.startswith(presses.PREFIX):
            found.append(name)
            continue
        method = methods.get(name)
        if not (method.plain or method.keeps_all or method.adapt is not None or "host_budget" in method.changes):
            found.append(name)
    return found


def untrained(names: Iterable[str]) -> list[str]:
    """Return the bounded methods that neither have trained heads, ours or gates of others, nor know the answers."""
    found = []
    for name in bounded(names):
        if not name.startswith(presses.PREFIX):
            method = methods.get(name)
            trained = method.needs_heads or isinstance(method.scorer, PublishedGateScorer)
            if trained or methods.knows_answers(name):
                continue
        found.append(name)
    return found


def top(scores: ordering.Scores, protocol: str) -> dict[str, Any]:
    """Return the oracle of a protocol, with the positions or layers that serve it best, and what is ahead of it."""
    oracle = methods.ORACLE_AGNOSTIC if protocol == AGNOSTIC else methods.ORACLE
    changes = ("", plan.PLACED, plan.SHARED, f"{plan.SHARED}{plan.PLACED}")
    known = [name for change in changes if (name := f"{oracle}{change}") in scores]
    if not known:
        return {"oracle": oracle, "above": None}
    oracle = max(known, key=lambda name: statistics.fmean(scores[name].values()))
    others = [name for name in bounded(scores) if not methods.knows_answers(name)]
    return {"oracle": oracle, "above": ordering.above(scores, oracle, others)}


def best(records: Sequence[dict[str, Any]], count: int) -> list[str]:
    """Return the best methods that hold no more than the budget, without trained heads or answers.

    Left out are presses that mask what goes, which hold more bytes per unit than the others. Ties go to the method that
    the records name first.
    """
    by_method: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        by_method.setdefault(record["method"], []).append(record)
    means = {name: statistics.fmean(text_scores(own).values()) for name, own in by_method.items()}
    unit = {name: max(one["cache_bytes"] / max(1, one["kept_units"]) for one in own) for name, own in by_method.items()}
    others = [name for name in untrained(means) if unit[name] < _MASKED * min(unit.values())]
    return sorted(others, key=lambda name: -means[name])[:count]


def ahead(records: Sequence[dict[str, Any]], method: str = LOCRET) -> list[dict[str, Any]]:
    """Return, for every task, how far trained heads are ahead of the best that is not trained.

    An entry has the `method`, `task`, `tokens`, `texts`, the `rival`, the mean `difference` on the same texts, and its
    `error`.
    """
    found = []
    for task, tokens in dict.fromkeys((one["task"], one["tokens"]) for one in records):
        own = [one for one in records if (one["task"], one["tokens"]) == (task, tokens)]
        names = dict.fromkeys(one["method"] for one in own)
        scores = {name: text_scores(one for one in own if one["method"] == name) for name in names}
        others = untrained(scores)
        if method not in scores or not others:
            continue
        rival = max(others, key=lambda name: (statistics.fmean(scores[name].values()), name != "random"))
        mean, error = ordering.difference(scores, method, rival)
        found.append(
            {
                "method": method,
                "task": task,
                "tokens": tokens,
                "texts": len(scores[method]),
                "rival": rival,
                "difference": round(mean, 3),
                "error": round(error, 3) if error < float("inf") else None,
            }
        )
    return found


def chance_of(units: Sequence[tuple[Unit, Any]], output: Path, tokenizer: Any) -> dict[str, Any]:
    """Return, by protocol, what `random` scores on its own questions and on the next text's of the same task.

    `kept` is the share of a prompt's units that it keeps, in percent: what it has over chance.

    Args:
        units: The field's units with their jobs, which know the samples.
        output: Folder of the units.
        tokenizer: The backbone's.
    """
    found: dict[str, Any] = {}
    for protocol in (AGNOSTIC, AWARE):
        groups: dict[tuple[Any, ...], list[tuple[dict[str, Any], Any]]] = {}
        for unit, job in units:
            if unit.part.protocol != protocol:
                continue
            cases: dict[tuple[Any, ...], Any] = {
                (case.task.name, case.tokens, case.index, case.question): case for case in job.cases
            }
            for record in read(output / unit.name / SAMPLES)[0]:
                if record["method"] == "random" and protocol_of(record) == protocol:
                    at = tuple(record.get(name) for name in ("task", "tokens", "index", "question"))
                    own = {**record, "seed": unit.seed}
                    groups.setdefault((at[0], at[1], at[3]), []).append((own, cases[at]))
        pairs = []
        for members in groups.values():
            for nth, (record, case) in enumerate(members):
                if len(members) > 1:
                    sample = members[(nth + 1) % len(members)][1].sample(tokenizer)
                    pairs.append((record, {**record, "score": case.task.score(record["prediction"], sample)}))
        scores = [text_scores(records) for records in zip(*pairs, strict=True)]
        if scores and len(scores[0]) > 1:
            gaps = [scores[0][text] - scores[1][text] for text in scores[0]]
            found[protocol] = {
                "random": round(statistics.fmean(scores[0].values()), 3),
                "chance": round(statistics.fmean(scores[1].values()), 3),
                "error": round(statistics.stdev(gaps) / len(gaps) ** 0.5, 3),
                "kept": round(100 * statistics.fmean(one["kept_units"] / one["prompt_tokens"] for one, _ in pairs), 3),
                "answers": len(pairs),
            }
    return found


def table(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a record by the names of their columns."""
    return [dict(zip(record["columns"], row, strict=True)) for row in record["rows"]]


def last_rows(record: Mapping[str, Any], parts: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of some parts; of a method that is in several of them, those of the last."""
    found = [row for part in parts for row in table(record) if row["part"] == part]
    last = {row["method"]: row["part"] for row in found}
    return [row for row in found if row["part"] == last[row["method"]]]


def unanswerable(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the tasks that are left out of the headline, with the full cache's score: what it does not answer itself.

    Scores are those of the field's texts, agnostic where they were asked so. Empty where all tasks would be left out.
    """
    for part in ("field", "field_aware"):
        own: dict[str, list[float]] = {}
        for row in table(record):
            if (row["part"], row["method"]) == (part, FULL):
                own.setdefault(row["task"], []).append(row["score"])
        low = {task: score for task, scores in own.items() if (score := statistics.fmean(scores)) < ANSWERABLE}
        if own:
            return low if len(low) < len(own) else {}
    return {}


def means(
    record: Mapping[str, Any], parts: Sequence[str], *, every_task: bool = False
) -> dict[tuple[str, int | None], dict[str, Any]]:
    """Return, by method and budget, the mean over tasks of some parts: score, error, and what was held.

    A method that lacks a task of the part is left out: means of other tasks cannot be compared.

    Args:
        record: The record.
        parts: Names of the parts.
        every_task: Whether the tasks count that the full cache does not answer.
    """
    found: dict[tuple[str, int | None], list[dict[str, Any]]] = {}
    every: dict[str, set[tuple[str, int]]] = {}
    out = set() if every_task else unanswerable(record).keys()
    for row in table(record):
        if row["part"] in parts and row["task"] not in out:
            found.setdefault((row["method"], row["budget"]), []).append(row)
            every.setdefault(row["part"], set()).add((row["task"], row["tokens"]))
    wanted = set().union(*every.values()) if every else set()
    sizes = unit_bytes(record)
    whole = {key: own for key, own in found.items() if {(row["task"], row["tokens"]) for row in own} == wanted}
    return {key: {**_mean(own), "kept": max(kept_bytes(row, sizes) for row in own)} for key, own in whole.items()}


def unit_bytes(record: Mapping[str, Any]) -> float | None:
    """Return the bytes of one token's keys and values in all layers and KV heads, as the plain cache holds them."""
    found = (row["bytes"] / row["units"] for row in table(record) if row["method"] == FULL and row["units"])
    return next(found, None)


def kept_bytes(row: Mapping[str, Any], size: float | None) -> int:
    """Return the bytes of the units that stay when the document has been read, in all tiers.

    Ours hold room for a chunk besides, which the next text needs; a press that masks what goes holds all.
    """
    allocated = int(row["bytes"])
    if size is not None and not row["method"].startswith(presses.PREFIX):
        allocated = min(allocated, round(row["units"] * size))
    return allocated + int(row["host_bytes"])


def _mean(own: Sequence[dict[str, Any]]) -> dict[str, Any]:
    errors, scores = [row["error"] for row in own], [row["score"] for row in own]
    known = [error for error in errors if error is not None]
    if len(known) == len(own):  # tasks have texts of their own, so their errors are apart
        error: float | None = sum(error**2 for error in known) ** 0.5 / len(own)
    else:  # with one text per task, tasks stand for texts, which makes the error larger
        error = statistics.stdev(scores) / len(scores) ** 0.5 if len(scores) > 1 else None
    return {
        "score": statistics.fmean(scores),
        "error": error,
        **{name: max(row[name] for row in own) for name in ("units", "bytes", "host_bytes", "peak_bytes")},
        "seconds": statistics.fmean(row["seconds"] for row in own),
        "texts": sum(row["texts"] for row in own),
        "method": own[0]["method"],
        "budget": own[0]["budget"],
    }
