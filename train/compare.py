"""Which heads are best? One set of heads per variant of the training options, all evaluated alike, one table.

    python -m locret.train.compare --config recipes/train/compare_tiny.yaml --output runs/compare

OUTPUT/  rows/<name>.jsonl (training rows), recipes/<variant>.yaml (what `locret-train` is given), <variant>/ (heads),
         evaluation/<variant>/ and evaluation/references/ (what `locret-eval` writes), compare.md, compare.json

Training and evaluation are processes of their own, one after the other. A run that was interrupted goes on where it
stopped when it is started again; what has been trained or evaluated with the same options is not done twice.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from locret import method_spec
from locret.cli import interrupts
from locret.files import locked, write_text
from locret.tables import markdown

TRAIN, EVALUATE = "locret.train.command", "locret.infer.evaluation.command"
REFERENCES = "references"
_FOLDERS = ("rows", "recipes", "evaluation", REFERENCES)
_SET_HERE = {
    "common": ("model", "output", "resume", "overwrite", "dry_run", "devices"),
    "rows": ("output",),
    "evaluation": ("model", "heads", "methods", "output", "resume", "overwrite", "dry_run", "suite"),
}
"""Options that this command gives itself, by section."""


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Options of `python -m locret.train.compare`."""

    model: str
    """Backbone: a folder in the Hugging Face format, or a Hub id."""
    output: str
    """Folder for everything; the same one goes on with what is missing."""
    variants: dict[str, dict[str, Any]]
    """Options of `locret-train` by name of the variant; `dataset` may name one of the rows, `init_from` an earlier
    variant."""
    common: dict[str, Any] = field(default_factory=dict)
    """Options of `locret-train` that all variants share."""
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Options of `python -m locret.data.training.question_rows` by name of the rows."""
    evaluation: dict[str, Any] = field(default_factory=dict)
    """Options of `locret-eval`: tasks, lengths, budget, samples, ..."""
    methods: list[str] = field(default_factory=lambda: ["locret"])
    """Methods of `locret-eval` that each variant's heads are evaluated with, such as locret and locret+shares."""
    references: list[str] = field(default_factory=lambda: ["full", "oracle", "untrained"])
    """Methods of `locret-eval` that need no trained heads; the oracle is the ceiling."""
    only: str = ""
    """Work on these only, such as logit,ranking or references; the table still shows all that are finished, so several
    processes can share the work."""
    dry_run: bool = False
    """Check every variant's options and print them; train nothing and write nothing."""

    def __post_init__(self) -> None:
        if not self.variants:
            raise ValueError("variants is empty; name at least one, such as {paper: {label_kind: logit}}")
        for name in (*self.variants, *self.rows):
            if not name.replace("-", "").replace("_", "").replace(".", "").isalnum() or name in _FOLDERS:
                raise ValueError(
                    f'the name "{name}" cannot be a folder here; use letters, digits, - and _, and none of '
                    + ", ".join(_FOLDERS)
                )
        for name in self._only():
            if name not in (*self.variants, REFERENCES):
                raise ValueError(
                    f"--only {name}: no such variant; choose from {', '.join(self.variants)}, {REFERENCES}"
                )
        for method in self.methods:
            if method_spec.parse(method).name != "locret":
                raise ValueError(
                    f"methods has {method}, which reads no heads of a variant; name locret or locret with modifiers "
                    "there, such as locret+shares, and what needs no heads under references"
                )
        if len(set(self.methods)) != len(self.methods) or not self.methods:
            raise ValueError("methods is empty or names one twice; name each once, such as [locret, locret+shares]")
        sections = {"common": self.common, "evaluation": self.evaluation}
        sections |= {f"variants.{name}": given for name, given in self.variants.items()}
        sections |= {f"rows.{name}": given for name, given in self.rows.items()}
        for section, given in sections.items():
            own = _SET_HERE["common" if section.startswith("variants.") else section.split(".")[0]]
            if found := [key for key in given if key.replace("-", "_") in own]:
                raise ValueError(f"{section} has {found[0]}, which this command sets itself; leave it out there")

    def chosen(self) -> list[str]:
        """Return the variants to work on, in the order of the recipe."""
        asked = self._only()
        return [name for name in self.variants if not asked or name in asked]

    def with_references(self) -> bool:
        """Return whether the methods without trained heads are to be evaluated too."""
        return not self._only() or REFERENCES in self._only()

    def _only(self) -> list[str]:
        return [name.strip() for name in self.only.split(",") if name.strip()]

    def recipe(self, name: str) -> dict[str, Any]:
        """Return the options of `locret-train` for a variant, without its output folder.

        Raises:
            ValueError: If it goes on from a variant that is not trained before it.
        """
        root, names = Path(self.output), list(self.variants)
        options = {"model": self.model, **self.common, **self.variants[name]}
        if options.get("dataset") in self.rows:
            options["dataset"] = str(root / "rows" / f"{options['dataset']}.jsonl")
        start = options.get("init_from")
        if start in self.variants:
            if names.index(start) >= names.index(name):
                raise ValueError(f'variant "{name}" goes on from "{start}", which comes after it; swap them')
            options["init_from"] = str(root / start)
        return options


def table(
    results: Mapping[str, Mapping[str, Any]], variants: Sequence[str], methods: Sequence[str] = ("locret",)
) -> str:
    """Return two Markdown tables with a line per variant and reference: by prompt length and budget, and by task.

    A number is a mean score, 0 to 100, over the tasks in the first table and over lengths and budgets in the second;
    the best variant of a column is bold, and a number that misses one of its parts is left out.

    Args:
        results: `results.json` of `locret-eval` by name of the variant; references under `REFERENCES`.
        variants: Names in the order of the lines.
        methods: What each variant was evaluated with; a line per method, named after it where it is not locret.
    """
    lines = {
        name if method == "locret" else f"{name}, {method}": _scores(results[name]["cells"], method)
        for name in variants
        if name in results
        for method in methods
    }
    cells = results.get(REFERENCES, {}).get("cells", [])
    references = {method: _scores(cells, method) for method in dict.fromkeys(cell["method"] for cell in cells)}
    places = sorted({(tokens, budget) for scores in lines.values() for _, tokens, budget in scores})
    tasks = list(dict.fromkeys(task for scores in lines.values() for task, _, _ in scores))
    by_place = {f"{tokens:,} @ {budget}": [(task, tokens, budget) for task in tasks] for tokens, budget in places}
    by_task = {task: [(task, *place) for place in places] for task in tasks}
    everything = {"mean": [(task, *place) for task in tasks for place in places]}
    places_table = _grid({**by_place, **everything}, lines, references)
    tasks_table = _grid(by_task, lines, references)
    return (
        f"Mean score of the tasks by prompt tokens @ budget:\n\n{places_table}\n"
        f"Mean score of these cells by task:\n\n{tasks_table}"
    )


_Scores = dict[tuple[str, int, int], float]
"""Scores by task, length and budget; the budget is 0 for a method without one, such as the full cache."""


def _scores(cells: Sequence[Mapping[str, Any]], method: str) -> _Scores:
    return {
        (cell["task"], cell["tokens"], cell["budget"] or 0): cell["score"] for cell in cells if cell["method"] == method
    }


def _grid(
    columns: Mapping[str, Sequence[tuple[str, int, int]]],
    lines: Mapping[str, _Scores],
    references: Mapping[str, _Scores],
) -> str:
    def mean(scores: _Scores, parts: Sequence[tuple[str, int, int]]) -> float | None:
        values = [scores.get(part, scores.get((*part[:2], 0))) for part in parts]
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known and len(known) == len(values) else None

    numbers = {name: [mean(s, parts) for parts in columns.values()] for name, s in {**lines, **references}.items()}
    best = [max((numbers[name][i] or 0.0 for name in lines), default=None) for i in range(len(columns))]
    rows = []
    for name, values in numbers.items():
        shown = [_show(value, name in lines and value == top) for value, top in zip(values, best, strict=True)]
        rows.append([name, *shown])
    return "\n".join(markdown(["heads", *columns], rows)) + "\n"


def _show(value: float | None, bold: bool) -> str:
    return "" if value is None else f"**{value:.1f}**" if bold else f"{value:.1f}"


def command(argv: Sequence[str] | None = None) -> int:
    """Train, evaluate, and write the table; return 0.

    Raises:
        ValueError: For what the user must change.
        OSError: If something cannot be written, or a process fails.
    """
    from locret.cli.command import parse_options

    (options,), _ = parse_options(
        "locret compare", "Compare heads that were trained with different options.", [CompareOptions], argv
    )
    check(options)
    if options.dry_run:
        import yaml

        sys.stdout.write(yaml.safe_dump({name: options.recipe(name) for name in options.chosen()}, sort_keys=False))
        return 0
    # Processes that share the work with --only write folders of their own, which their trainings and evaluations lock.
    with nullcontext() if options.only else locked(options.output, f"--output {options.output}"):
        asked = Path(options.output) / "evaluation.yaml"
        if not (Path(options.output) / "evaluation").exists():
            asked.unlink(missing_ok=True)  # nothing was measured with what it says
        _remember(asked, options.evaluation, "the evaluation")
        if (
            options.with_references()
        ):  # first, so that an evaluation that cannot be is refused before anything is trained
            _evaluate(options, REFERENCES, options.references, heads=None)
        for name in options.chosen():
            _train(options, name)
            _evaluate(options, name, options.methods, heads=Path(options.output) / name)
        write_table(options)
    return 0


def check(options: CompareOptions) -> None:
    """Check the options of all variants before the first one is trained.

    Raises:
        ValueError: For what the user must change.
    """
    from locret.data.training.question_rows import QuestionRowsOptions
    from locret.train import training_options

    for name, given in options.rows.items():
        try:
            QuestionRowsOptions(**{"output": "rows.jsonl", **given})
        except (TypeError, ValueError) as error:
            raise ValueError(f"rows.{name}: {error}") from None
    _check_evaluation(options)
    chosen = options.chosen()
    for name in chosen:
        start = {**options.common, **options.variants[name]}.get("init_from")
        if start in options.variants and start not in chosen and not (Path(options.output) / str(start)).is_dir():
            raise ValueError(
                f"--only {options.only}: {name} goes on from {start}, which {options.output} lacks; add it to --only"
            )
        try:
            training_options.parse([*_flags(options.recipe(name)), f"--output={Path(options.output) / name}"])
        except ValueError as error:
            raise ValueError(f"variants.{name}: {error}") from None
        for method in options.methods:
            if options.recipe(name).get("layer_shares") is None and (
                method_spec.parse(method).changes.get("layer_budgets") == "shares"
            ):
                raise ValueError(f"variants.{name} has no layer_shares, which {method} in methods needs; set it")


def _check_evaluation(options: CompareOptions) -> None:
    """Refuse several scores of a cell; what else is wrong, `locret-eval` says of the references, which come first."""
    for name in ("protocol", "chunk_size", "stabilizers"):
        given = options.evaluation.get(name, options.evaluation.get(name.replace("_", "-")))
        if len(given if isinstance(given, list) else str(given).split(",")) > 1:
            raise ValueError(
                f"evaluation has several values of {name}, and the table has one score of a task, length and budget; "
                "give one, and the others in recipes with outputs of their own"
            )


def write_table(options: CompareOptions) -> None:
    """Write `compare.md` and `compare.json` from the evaluations that are finished."""
    root = Path(options.output)
    results = {}
    for name in (*options.variants, REFERENCES):
        file = root / "evaluation" / name / "results.json"
        if file.is_file():
            results[name] = json.loads(file.read_text(encoding="utf-8"))
    text = table(results, list(options.variants), options.methods)
    cells = {name: result["cells"] for name, result in results.items()}
    recipes = {name: options.recipe(name) for name in options.variants}
    write_text(root / "compare.json", json.dumps({"recipes": recipes, "cells": cells}, indent=1) + "\n")
    write_text(root / "compare.md", text)
    sys.stdout.write(text)


def _train(options: CompareOptions, name: str) -> None:
    root = Path(options.output)
    recipe = options.recipe(name)
    for rows, given in options.rows.items():
        if recipe.get("dataset") == str(root / "rows" / f"{rows}.jsonl"):
            _make_rows(options, rows, given)
    file = root / "recipes" / f"{name}.yaml"
    _remember(file, recipe, f'variant "{name}"')
    if (root / name / "model.safetensors").is_file():
        sys.stderr.write(f"{name}: already trained\n")
        return
    _call(name, TRAIN, [f"--config={file}", f"--output={root / name}", "--resume=auto"])


def _make_rows(options: CompareOptions, name: str, given: Mapping[str, Any]) -> None:
    from locret.data.training import question_rows

    file = Path(options.output) / "rows" / f"{name}.jsonl"
    _remember(file.with_suffix(".yaml"), given, f'the rows "{name}"')
    if not file.is_file():
        question_rows.command([*_flags({"tokenizer": options.model, **given}), f"--output={file}"])


def _evaluate(options: CompareOptions, name: str, methods: Sequence[str], heads: Path | None) -> None:
    if not methods:
        return
    root = Path(options.output)
    output = root / "evaluation" / name
    arguments = [f"--config={root / 'evaluation.yaml'}", f"--model={options.model}", f"--methods={','.join(methods)}"]
    arguments += [] if heads is None else [f"--heads={heads}"]
    _call(name, EVALUATE, [*arguments, f"--output={output}", *(["--resume"] if output.is_dir() else [])])


def _call(name: str, module: str, arguments: Sequence[str]) -> None:
    sys.stderr.write(f"{name}: {module}\n")
    # Standard output is for the table alone; 2 is standard error.
    code = interrupts.call([sys.executable, "-m", module, *arguments], stdout=2)
    if code in (130, 143, -2, -15):
        raise KeyboardInterrupt
    if code:
        raise ChildProcessError(f"{name}: {module} ended with exit code {code}, see above; mend it and start again")


def _remember(file: Path, options: Mapping[str, Any], what: str) -> None:
    """Write options to a file, or make sure that they are those it holds.

    Raises:
        ValueError: If they are others.
    """
    import yaml

    text = yaml.safe_dump(dict(options), sort_keys=False, allow_unicode=True)
    if file.is_file() and file.read_text(encoding="utf-8") != text:
        raise ValueError(f"{file} says that {what} had other options; choose another --output, or rename it")
    write_text(file, text, parents=True)


def _flags(given: Mapping[str, Any]) -> list[str]:
    """Return options as a command line has them; those that are none are left out."""
    return [
        f"--{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in given.items()
        if value is not None
    ]


if __name__ == "__main__":
    from locret.cli.command import run

    run(command, prog="locret compare")
