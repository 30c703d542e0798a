"""Scores of answers that another program has written: `locret-eval --score-predictions FILE`, without any model.

A line is an answer with its references, as the benchmarks' own programs write it: LongBench (pred, answers,
all_classes), InfiniteBench (prediction, ground_truth), L-Eval (..._pred, gt), RULER (pred, outputs), and samples.jsonl.
What a line of samples.jsonl does not say, the options of its task, is in the configuration.json beside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locret.data import tasks
from locret.data.tasks import Sample, Task
from locret.data.training.json_rows import BadRow, stream_entries
from locret.infer.evaluation.allotment import amount
from locret.infer.evaluation.eval_options import Names, words
from locret.infer.evaluation.summary import ERRORS, task_score, with_error
from locret.tables import markdown

PREDICTIONS = ("prediction", "pred")
REFERENCES = ("targets", "answers", "ground_truth", "gt", "outputs", "answer")
_SETTINGS = ("method", "budget", "budget_share", "chunk_size", "stabilizers", "tokens", "protocol")
"""Fields of samples.jsonl that tell answers of one task apart."""
_COMPARED = {"choices": "the list all_classes", "question": "the question", "system": "the system message"}
"""What tasks may compare an answer with besides the references, in words."""
_SAME = 1e-6
"""How far the score of an answer may be from the one that its run gave it."""


@dataclass(frozen=True, kw_only=True)
class PredictionOptions:
    """Which answers are scored."""

    score_predictions: Names
    """Files of answers, a JSON object a line."""
    tasks: Names | None = None
    """The task of each file, such as longbench/qasper; or one for all. None: what the lines or the file names say."""
    json: bool = False
    """Print JSON on standard output instead of the table."""


def score_files(options: PredictionOptions) -> list[dict[str, Any]]:
    """Return a cell for every file, task and way of reading: file, task, n, score from 0 to 100, standard_error.

    Raises:
        ValueError: If a file has no task, or a line no answer or no references.
        OSError: If a file cannot be read.
    """
    files = words(options.score_predictions, "--score-predictions", repeats=True)
    named = [None] * len(files) if options.tasks is None else [*words(options.tasks, "--tasks", repeats=True)]
    named = named * len(files) if len(named) == 1 else named
    if len(named) != len(files):
        raise ValueError(
            f"--tasks {options.tasks} names {len(named)} tasks for {len(files)} files of --score-predictions; give one "
            "for each, or one for all"
        )
    return [cell for file, name in zip(files, named, strict=True) for cell in _cells(file, name)]


def table(cells: Sequence[Mapping[str, Any]]) -> str:
    """Return the cells as a Markdown table."""
    rows = []
    for cell in cells:
        reading = f"{cell['method']}, {amount(cell)}" if "method" in cell else ""
        length = f" @ {cell['tokens']:,}" if cell.get("tokens") else ""
        score = with_error(cell["score"], cell["standard_error"], 2)
        rows.append([cell["file"], f"{cell['task']}{length}", reading, f"{cell['n']:,}", score])
    return "\n".join([*markdown(["file", "task", "method, budget", "answers", "score"], rows), "", ERRORS]) + "\n"


def _cells(file: str, name: str | None) -> Iterable[dict[str, Any]]:
    if not Path(file).is_file():
        raise ValueError(f"--score-predictions {file} is not a file; name one with an answer in JSON on each line")
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    known: dict[tuple[str, bool], Task] = {}
    for entry in stream_entries([file]):
        try:
            row = entry.load()
        except BadRow as bad:
            raise ValueError(f"{bad.where} {bad.detail}; mend or drop the line") from None
        task = _task(file, name or row.get("task"))
        ours = "method" in row and row.get("task") == task.name
        if (task.name, ours) not in known:
            known[task.name, ours] = _as_in_its_run(file, task) if ours else task
        task = known[task.name, ours]
        own = tuple((key, row[key]) for key in _SETTINGS if "method" in row and key in row)
        groups.setdefault((task.name, ours, own), []).extend(_records(entry.where, row, task, ours))
    for (task_name, ours, own), records in groups.items():
        found = {"file": Path(file).name, "task": task_name, **dict(own), "n": len(records)}
        yield {**found, **task_score(known[task_name, ours], records)}


def _as_in_its_run(file: str, task: Task) -> Task:
    """Return a task with the options of the run that wrote a samples.jsonl; as it is where none are told."""
    from locret.infer.evaluation.output_folder import CONFIGURATION  # imports torch

    path = Path(file).with_name(CONFIGURATION)
    if not path.is_file():
        return task
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))["tasks"].get(task.name, {})
        told = {name: facts[name] for name in task.settable if name in facts}
    except (ValueError, RecursionError, KeyError, AttributeError, TypeError):
        raise ValueError(f"{path} is broken; get it anew, or move {file} away from it") from None
    return tasks.get(task.name, **{name: value for name, value in told.items() if value != getattr(task, name)})


_NO_PROGRAM = ("multistep", "scbench", "world")
"""Families whose programs write no files named like their tasks: such files come from other benchmarks."""


def _task(file: str, name: Any) -> Task:
    if isinstance(name, str):
        return tasks.get(name)
    stem = Path(file).name.split(".")[0].removeprefix("preds_")
    families = ((one, *one.partition("/")[::2]) for one in tasks.names(None) if "/" in one)
    known = [one for one, family, own in families if own == stem and family not in _NO_PROGRAM]
    if len(known) != 1:
        what = f"may be {' or '.join(known)}" if known else "is named after no task"
        raise ValueError(f"--score-predictions {file} {what}; give --tasks, such as --tasks longbench/qasper")
    return tasks.get(known[0])


def _records(where: str, row: Mapping[str, Any], task: Task, ours: bool) -> list[dict[str, Any]]:
    """Return the answers of a line with their references and scores: one, or as many as the task finds in it."""
    said = [row[name] for name in PREDICTIONS if name in row]
    said = said or [value for name, value in row.items() if name.endswith("_pred")]
    if not said or not isinstance(said[0], str):
        raise ValueError(f"{where} has no answer; it must be a text in a field {' or '.join(PREDICTIONS)}, or ..._pred")
    given = next((row[name] for name in REFERENCES if row.get(name) not in (None, [], "")), None)
    targets = tuple(str(entry) for entry in (given if isinstance(given, list) else [given]))
    if given is None:
        raise ValueError(f"{where} has no references; they must be in one of the fields {', '.join(REFERENCES)}")
    compared = _compared(where, row, task)
    try:
        answers = task.answers_in(said[0], targets)
    except ValueError as error:
        raise ValueError(f"{where} {error}; mend or drop the line") from None
    several = all(type(row.get(name)) is int for name in ("index", "question"))  # of one text, by locret-eval
    place = {name: row[name] for name in ("index", "question") if several}
    found = []
    for prediction, right in answers:
        sample = Sample(content="", targets=right, reply=right[0], **compared)
        try:
            score = task.score(prediction, sample)
        except (IndexError, KeyError, AttributeError) as error:
            lacking = f"{type(error).__name__}: {error}"
            raise ValueError(f"{where} does not have what {task.name} compares ({lacking})") from None
        found.append({"prediction": prediction, "targets": right, "score": score, **place})
    if ours and row.get("version") == task.version and isinstance(row.get("score"), int | float):
        _check_same(where, float(row["score"]), found[0]["score"], task)
    return found


def _compared(where: str, row: Mapping[str, Any], task: Task) -> dict[str, Any]:
    """Return what else a task compares with.

    Raises:
        ValueError: If the line does not say it.
    """
    told = row.get("compared")
    known = {**told} if isinstance(told, dict) else {}
    if isinstance(row.get("all_classes"), list):
        known["choices"] = row["all_classes"]
    for name in task.compares:
        if not known.get(name):
            raise ValueError(
                f"{where} does not say {_COMPARED.get(name, name)}, which {task.name} compares an answer with; add it, "
                "or take the scores of results.json where locret-eval of an earlier version wrote the line"
            )
    return {name: tuple(map(str, known[name])) if name == "choices" else str(known[name]) for name in task.compares}


def _check_same(where: str, recorded: float, score: float, task: Task) -> None:
    """Refuse another score than the run gave: it knew something that is not known here."""
    from locret.infer.evaluation.output_folder import CONFIGURATION

    if abs(recorded - score) > _SAME:
        raise ValueError(
            f"{where} says score {recorded:g}, and {task.name} gives {score:g} here; put the {CONFIGURATION} of its "
            "run, which has the options of tasks, beside the file, or drop the field score if the answer was changed"
        )
