"""How many facts can be recalled of a text, for every unit that was kept of it?

    python -m locret.infer.evaluation.capacity --model checkpoints/tiny --heads checkpoints/tiny-heads --budget 64 \\
        --facts 4,8,16,32 --output runs/capacity

A text states K facts, and each is asked for on a fork of one read; `locret-eval` does it for every K, in a folder each,
and goes on where an earlier run of this command stopped.

Formula:  recalled(K) = K * mean score, possible(K) = min(K, u / t), where u are the units per KV head that the full
          policy keeps of the document, and t the tokens of a fact's own value.
          area = mean of recalled / possible over log2 K (trapezoids): 1 where all that fits is recalled.
Assumed:  a unit tells its own token and no other, and one and the same KV head copies all values; then a head of u
          units holds u / t values. A method whose heads share the facts among themselves, or a backbone that writes
          several tokens into one unit, can be above the line: then its ratio is above 1, and nothing is cut off.
Bits:     a value of d digits is at most d log2(10) bits, others at most t log2(vocabulary); a unit's key and value, in
          all layers and KV heads, are far more numbers than that. `bits_possible` is K, or the values whose bits fill
          all bits of the kept units: what no method can surpass, whatever it assumes. It hardly ever binds, which says
          that eviction, not storage, is what limits recall.
Errors:   over texts. That of the area follows from those of the points, whose texts are drawn apart.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from locret.cli.command import parse_options, print_json, warnings_as_lines
from locret.files import visible, write_text
from locret.infer.evaluation.allotment import amount
from locret.infer.evaluation.eval_options import BudgetOptions, Methods, Names, Numbers, numbers
from locret.infer.evaluation.protocols import AGNOSTIC, shown
from locret.infer.evaluation.records import read
from locret.infer.infer_options import ModelOptions
from locret.tables import markdown

_READING = ("method", "budget", "budget_share", "chunk_size", "stabilizers", "protocol")
"""What one curve is of."""


@dataclass(frozen=True, kw_only=True)
class CapacityOptions:
    """What is asked, and of whom."""

    output: str
    """Folder for capacity.json, capacity.md and capacity.png, with a folder of locret-eval for every number of facts;
    the same one goes on with what is missing."""
    heads: str | None = None
    """Trained retaining heads: a folder, or a Hub id; `locret` needs them."""
    methods: Methods = "full,locret,oracle_agnostic,snapkv,streaming,random"
    """Methods, as in locret-eval."""
    task: str = "world/near_keys"
    """A task that can ask for each of its facts, and how many it has is one of its options."""
    option: str = "keys"
    """That option."""
    facts: Numbers = "4,8,16,32,64,128,256,512"
    """How many facts a text states, such as 4,8,16."""
    tokens: int = 16384
    """Of the whole prompt."""
    questions: int | None = 32
    """Most facts asked of each text, the first ones, which lie anywhere in it; the share recalled of them stands for
    all. None: all."""
    samples: int = 20
    """Texts for every number of facts."""
    batch_size: int = 1
    """As in locret-eval."""
    seed: int = 0
    """Of the texts."""
    protocol: Names = AGNOSTIC
    """As in locret-eval; aware reads a text once for each question."""
    allow_other_base: bool = False
    """As in locret-eval."""
    max_new_tokens: int | None = None
    """As in locret-eval."""
    protect: list[str] = field(default_factory=list)
    """As in locret-eval."""
    figures: str = "all"
    """all or none. The picture needs locret[eval]."""
    json: bool = False
    """Print capacity.json on standard output instead of the table."""
    threads: int = 0
    """CPU threads; 0 leaves them to PyTorch."""
    quiet: bool = False
    """No progress bar and no warnings."""

    def __post_init__(self) -> None:
        if not self.output:
            raise ValueError("--output names no folder; give one")
        if "," in self.task:
            raise ValueError(f"--task {self.task} names several; give one")
        if Path(self.output).exists() and not Path(self.output).is_dir():
            raise ValueError(f"--output {self.output} is a file; name a folder")
        if min(self.steps()) < 1:
            raise ValueError(f"--facts {self.facts} asks for nothing; give 1 or more")
        for name, value in (("questions", self.questions), ("tokens", self.tokens), ("samples", self.samples)):
            if value is not None and value < 1:
                raise ValueError(f"--{name} {value} asks nothing; give 1 or more")
        if self.figures not in ("all", "none"):
            raise ValueError(f"--figures {self.figures} is unknown; choose all or none")

    def steps(self) -> list[int]:
        """Return the numbers of facts, ascending."""
        return sorted(numbers(self.facts, "--facts"))

    def folder(self, facts: int) -> Path:
        """Return the folder of a number of facts."""
        return Path(self.output) / f"facts-{facts}"


def recipe(options: CapacityOptions, given: Mapping[str, Any], facts: int) -> dict[str, Any]:
    """Return what `locret-eval` is given for a number of facts.

    Args:
        options: Of the whole.
        given: Options of the backbone and the policy that the user set.
        facts: K.
    """
    asked = facts if options.questions is None else min(facts, options.questions)
    same = ("heads", "methods", "samples", "batch_size", "seed", "protocol", "threads", "quiet")
    more = ("allow_other_base", "max_new_tokens", "protect")
    return {
        **given,
        **{name: getattr(options, name) for name in (*same, *more)},
        "tasks": options.task,
        "task_options": {options.task: {options.option: facts}},
        "lengths": options.tokens,
        "questions": asked if asked > 1 else None,
        "output": str(options.folder(facts)),
        "figures": "none",
        "resume": True,
    }


def evaluations(options: CapacityOptions, given: Mapping[str, Any]) -> Iterator[tuple[int, Path]]:
    """Run `locret-eval` for every number of facts, and yield each with its folder.

    Raises:
        ValueError: For what the user must change; what one number of facts is refused for is known before the first.
        OSError: If a Hub, a disk or a device's memory fails.
    """
    from locret.infer.evaluation import command as evaluation

    for facts, text in checked(options, given).items():
        path = Path(f"{options.folder(facts)}.json")
        write_text(path, text, parents=True)
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # its table is not this command's
            evaluation.command(["--config", str(path)])
        yield facts, options.folder(facts)


def checked(options: CapacityOptions, given: Mapping[str, Any]) -> dict[int, str]:
    """Return the recipe of every number of facts, none of which `locret-eval` refuses; nothing is written.

    Raises:
        ValueError: For what the user must change.
        OSError: If a Hub or a disk fails.
    """
    from locret.infer.evaluation import command as evaluation

    _check_folder(options)
    recipes = {facts: json.dumps(recipe(options, given, facts), indent=1) + "\n" for facts in options.steps()}
    for facts, text in recipes.items():
        with tempfile.TemporaryDirectory() as folder:  # nothing is left where one number of facts is refused
            path = Path(folder) / "recipe.json"
            path.write_text(text, encoding="utf-8")
            try:
                job, tokenizer = evaluation.checked(["--config", str(path)])
            except ValueError as error:
                raise ValueError(f"--facts {facts}: {_own_words(str(error))}") from error
        known = len(job.cases[0].sample(tokenizer).asked)
        if known < facts:
            raise ValueError(
                f"--facts {facts}: with {options.option}={facts} {options.task} asks {known} questions of a text; name "
                "the option that says how many facts it states, --option, or another task"
            )
    return recipes


def _check_folder(options: CapacityOptions) -> None:
    """Refuse a folder that holds something else, or numbers of facts that its record would lose.

    Raises:
        ValueError: Naming them.
    """
    here = visible(Path(options.output)) if Path(options.output).is_dir() else []
    if here and not any(name.startswith(("facts-", "capacity.json")) for name in here):
        raise ValueError(f"--output {options.output} holds something else than such a run; choose another folder")
    found = (re.fullmatch(r"facts-(\d+)", path.name) for path in Path(options.output).glob("facts-*"))
    others = sorted({int(match[1]) for match in found if match} - set(options.steps()))
    if others:
        named = ",".join(map(str, others))
        raise ValueError(
            f"--output {options.output} holds {named} facts too, which would be lost to its record; add them to "
            "--facts, or choose another folder"
        )


def _own_words(text: str) -> str:
    """Return what `locret-eval` says in the names of this command's options."""
    for theirs, ours in (
        ("--lengths", "--tokens"),
        ("; choose another folder, or --overwrite it", "; choose another folder"),
        ("; raise tokens; raise --tokens, or leave the task out", "; raise --tokens"),
    ):
        text = text.replace(theirs, ours)
    return text


@dataclass(frozen=True)
class Value:
    """What one fact takes, on average over the facts that are asked."""

    tokens: float
    """t."""
    bits: float
    """At most so many."""


def value_of(targets: Sequence[Sequence[str]], tokenizer: Any) -> Value:
    """Return what the values of facts take.

    Args:
        targets: The values of each fact.
        tokenizer: The backbone's.
    """
    from locret.conversation.templates import encode

    before = len(encode(tokenizer, "is:"))
    vocabulary = math.log2(len(tokenizer))
    tokens, bits = [], []
    for own in targets:
        counts = [max(1, len(encode(tokenizer, f"is: {value}")) - before) for value in own]
        tokens.append(sum(counts))
        digits = [len(value) * math.log2(10) if value.isdecimal() else math.inf for value in own]
        bits.append(sum(min(few, count * vocabulary) for few, count in zip(digits, counts, strict=True)))
    return Value(fmean(tokens), fmean(bits))


def points(facts: int, records: Sequence[dict[str, Any]], value: Value, unit_bits: float) -> Iterator[dict[str, Any]]:
    """Yield a point of every method's curve.

    Args:
        facts: K.
        records: The answers about texts of K facts.
        value: What one of them takes.
        unit_bits: Bits of a unit per KV head: of the keys and values of one token in all layers and KV heads.
    """
    from locret.infer.evaluation import summary

    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault(tuple(record.get(name) for name in _READING), []).append(record)
    for reading, own in groups.items():
        scores = summary.text_scores(summary.by_text(own))
        error = summary.standard_error(scores)
        units = max(record["kept_units"] for record in own)
        recalled = facts * fmean(scores) / 100
        possible = min(facts, units / value.tokens)
        yield {
            **dict(zip(_READING, reading, strict=True)),
            "facts": facts,
            "texts": len(scores),
            "recalled": round(recalled, 4),
            "standard_error": None if error is None else round(facts * error / 100, 4),
            "kept_units": units,
            "recalled_per_unit": round(recalled / units, 6),
            "possible": round(possible, 4),
            "bits_possible": round(min(facts, units * unit_bits / value.bits), 4),
            "ratio": round(recalled / possible, 6),
        }


def areas(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one number for every curve: the mean of recalled / possible over log2 K, with its standard error."""
    curves: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        curves.setdefault(tuple(row[name] for name in _READING), []).append(row)
    found = []
    for reading, own in curves.items():
        weights = _weights([row["facts"] for row in own])
        errors = [None if row["standard_error"] is None else row["standard_error"] / row["possible"] for row in own]
        known = [error for error in errors if error is not None]
        squares = [(weight * error) ** 2 for weight, error in zip(weights, known, strict=False)]
        found.append(
            {
                **dict(zip(_READING, reading, strict=True)),
                "area": round(sum(w * row["ratio"] for w, row in zip(weights, own, strict=True)), 4),
                "standard_error": round(math.sqrt(sum(squares)), 4) if len(known) == len(own) else None,
            }
        )
    return found


def _weights(facts: Sequence[int]) -> list[float]:
    """Return what each point of a curve weighs in its mean over log2 K; several points are ascending."""
    if len(facts) == 1:
        return [1.0]
    logs = [math.log2(count) for count in facts]
    weights = [0.0] * len(facts)
    for place, (left, right) in enumerate(pairwise(logs)):
        for end in (place, place + 1):
            weights[end] += (right - left) / 2 / (logs[-1] - logs[0])
    return weights


def measure(options: CapacityOptions, given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the record after every number of facts, with the points so far.

    Raises:
        ValueError: For what the user must change.
        OSError: If a Hub, a disk or a device's memory fails.
    """
    from locret import loading

    rows: list[dict[str, Any]] = []
    model = ModelOptions(**{name: value for name, value in given.items() if name in _names(ModelOptions)})
    tokenizer, config = loading.load_tokenizer(model), loading.load_config(model)
    for facts, folder in evaluations(options, given):
        results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        records = read(folder / "samples.jsonl")[0]
        value = value_of([record["targets"] for record in records], tokenizer)
        rows += points(facts, records, value, unit_bits(config, results["config"]["dtype"]))
        yield {
            "task": options.task,
            "option": options.option,
            "tokens": options.tokens,
            "questions": options.questions,
            "seed": options.seed,
            "value": {"tokens": round(value.tokens, 4), "bits": round(value.bits, 4)},
            "config": results["config"],
            "commit": results["commit"],
            "areas": areas(rows),
            "rows": rows,
        }


def unit_bits(config: Any, dtype: str) -> float:
    """Return the bits of one token's keys and values in all full-attention layers and KV heads."""
    import torch

    from locret.backbone.adapters import describe

    numbers = sum(shape.num_kv_heads * shape.unit_dim for shape in describe(config).full_shapes)
    return 8.0 * numbers * float(getattr(torch, dtype).itemsize)


def _names(options: type) -> set[str]:
    return {one.name for one in fields(options)}


def table(record: Mapping[str, Any]) -> str:
    """Return the record as Markdown: facts recalled by every method as their number grows, and the area."""
    rows, steps = shown(record["rows"]), list(dict.fromkeys(row["facts"] for row in record["rows"]))
    lines = [
        f"Facts recalled of those stated, and in brackets per kept unit ({record['task']}, {record['tokens']:,} "
        f"tokens, a value of {record['value']['tokens']:.3g} tokens):",
        "",
    ]
    found = []
    for area in shown(record["areas"]):
        own = {row["facts"]: row for row in rows if all(row[name] == area[name] for name in _READING)}
        cells = [
            "" if facts not in own else f"{_with_error(own[facts], 'recalled')} ({own[facts]['recalled_per_unit']:.3f})"
            for facts in steps
        ]
        found.append([area["method"], amount(area), *cells, _with_error(area, "area", 2)])
    lines += markdown(["method", "budget", *(f"{facts} facts" for facts in steps), "area"], found)
    lines += [
        "",
        "area: mean of recalled / possible over log2 of the facts; possible: the facts, or the kept units per",
    ]
    lines[-1] += " KV head over the tokens of a value if these are fewer. ±: standard error over texts"
    return "\n".join(lines) + "\n"


def _with_error(row: Mapping[str, Any], name: str, places: int = 1) -> str:
    error = row["standard_error"]
    return f"{row[name]:.{places}f}" + ("" if error is None else f" ± {error:.{places}f}")


def check(argv: Sequence[str]) -> None:
    """Refuse what the command would refuse of these arguments; nothing is written.

    Raises:
        ValueError: For what the user must change.
        OSError: If a Hub or a disk fails.
    """
    checked(*_parsed(argv))


def _parsed(argv: Sequence[str] | None) -> tuple[CapacityOptions, dict[str, Any]]:
    """Return the options of the whole, and those of the backbone and the policy that the user set."""
    title = "How many facts can be recalled of a text, for every unit that was kept of it."
    classes = (ModelOptions, CapacityOptions, BudgetOptions)
    (model, options, budgets), chosen = parse_options("locret.infer.evaluation.capacity", title, classes, argv)
    given = {name: getattr(group, name) for group in (model, budgets) for name in _names(type(group)) if name in chosen}
    return options, {"model": model.model, **given}


def command(argv: Sequence[str] | None = None) -> int:
    """Measure, draw, and print the table or the record; return 0.

    Raises:
        ValueError: For what the user must change.
        OSError: If a Hub, a disk or a device's memory fails.
    """
    options, given = _parsed(argv)
    with warnings_as_lines("locret.infer.evaluation.capacity", quiet=options.quiet):
        from locret.pictures import can_draw

        draws = options.figures == "all" and can_draw("--figures all")
        record: dict[str, Any] = {}
        for record in measure(options, given):
            for name, text in (("json", json.dumps(record, indent=1) + "\n"), ("md", table(record))):
                write_text(Path(options.output) / f"capacity.{name}", text)
        if draws:
            from locret.infer.evaluation.capacity_figure import draw

            draw(record, Path(options.output) / "capacity.png")
    if options.json:
        print_json(record)
    else:
        sys.stdout.write(table(record))
    return 0


if __name__ == "__main__":
    from locret.cli.command import run

    run(command, prog="locret.infer.evaluation.capacity")
