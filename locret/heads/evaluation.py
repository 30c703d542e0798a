"""What heads scored, as their config records it: taken from locret-eval's results.json, shown in the card."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult

from locret.base.fields import shown
from locret.base.files import read_json

_FIELDS = (
    "task",
    "tokens",
    "method",
    "budget",
    "budget_share",
    "chunk_size",
    "stabilizers",
    "n",
    "score",
    "standard_error",
)
_TRAINED = "locret"
"""What the methods of locret-eval that use heads are called, before options such as `+pyramid`."""


def from_results(path: str | Path, weights: str | None = None) -> dict[str, Any]:
    """Read the results of locret-eval, for `RetainingHeads.annotate(evaluation=...)`.

    Args:
        path: Its results.json, or the folder that holds it.
        weights: Fingerprint of the heads that the results are to be of, where it is known.

    Returns:
        `source`, `toolkit_version`, `commit` where known, and `results`: a row per cell of the table, with `task`,
        `tokens` (prompt length), `method`, `budget` or `budget_share`, `chunk_size`, `stabilizers`, `n` (samples),
        `score` (out of 100) and `standard_error`.

    Raises:
        ValueError: If there is no such file, it is not whole, no method in it uses heads, or it used other heads.
        OSError: If it cannot be read.
    """
    file = Path(path)
    file = file / "results.json" if file.is_dir() else file
    if not file.is_file():
        raise ValueError(f"{file} does not exist; give the results.json that locret-eval wrote")
    values = read_json(file, "the results.json that locret-eval wrote")
    cells = values.get("cells") if isinstance(values, dict) else None
    if not isinstance(cells, list) or not cells:
        raise ValueError(f"{file} has no cells; give the results.json that locret-eval wrote")
    if values.get("complete") is not True:
        raise ValueError(f"{file} is of an evaluation that has not ended; finish it with locret-eval --resume")
    found = [_row(cell, f"{file}, cell {number}") for number, cell in enumerate(cells)]
    if not any(trained(row) for row in found):
        raise ValueError(f"{file} has no results of the method {_TRAINED}, which uses heads; add it to --methods")
    _check_heads(values, weights, file)
    versions = values.get("versions")
    version = versions.get("locret") if isinstance(versions, dict) else None
    facts = {"toolkit_version": version, "commit": values.get("commit")}
    known = {name: value for name, value in facts.items() if isinstance(value, str) and value.isprintable()}
    return {"source": "locret-eval", **known, "results": found}


def _check_heads(values: dict[str, Any], weights: str | None, file: Path) -> None:
    config = values.get("config")
    recorded = config.get("weights") if isinstance(config, dict) else None
    used = recorded.get("heads") if isinstance(recorded, dict) else None
    if weights is not None and isinstance(used, str) and used != weights:
        raise ValueError(
            f"{file} is of other heads (fingerprint {shown(used[:12])}, those to be published have {weights[:12]}); "
            "run locret-eval with these"
        )


def _row(cell: Any, where: str) -> dict[str, Any]:
    if not isinstance(cell, dict):
        raise ValueError(f"{where} is {shown(cell)} instead of a mapping; run locret-eval again")
    score = cell.get("score")
    numbers = [cell.get(name) for name in _FIELDS if name not in ("task", "method")]
    good = all(
        value is None or (isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value))
        for value in numbers
    )
    names = [cell.get(name) for name in ("task", "method")]
    if not good or score is None or not all(isinstance(name, str) and name.isprintable() for name in names):
        raise ValueError(f"{where} is {shown(cell)}, without task, method and score; run locret-eval again")
    return {name: cell.get(name) for name in _FIELDS}


def rows(evaluation: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return the rows of notes that `from_results` made; empty for notes of another form."""
    results = (evaluation or {}).get("results")
    if not isinstance(results, list):
        return []
    try:
        return [_row(row, "evaluation") for row in results]
    except ValueError:
        return []


def amount(row: Mapping[str, Any]) -> str:
    """Return the budget of a row for people: "1,024", "10%" of the prompt, or "all"."""
    if row.get("budget_share"):
        return f"{100 * row['budget_share']:.6g}%"
    return f"{row['budget']:,}" if row["budget"] else "all"


def varied(found: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return which of chunk size and stabilizers tell rows apart that are alike otherwise."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in found:
        groups.setdefault((row["task"], row["tokens"], row["method"], amount(row)), []).append(row)
    names = ("chunk_size", "stabilizers")
    return [name for name in names if any(len({row[name] for row in group}) > 1 for group in groups.values())]


def trained(row: Mapping[str, Any]) -> bool:
    """Return whether a row is a result of the heads, rather than of what they are compared with."""
    return str(row["method"]).split("+")[0].split(":")[0] == _TRAINED


def model_index(evaluation: Mapping[str, Any] | None) -> list[EvalResult]:
    """Return the results of the heads as the Hub's `model-index` holds them."""
    apart = varied(rows(evaluation))
    found = [
        EvalResult(
            task_type="text-generation",
            dataset_type=str(row["task"]).split(" ")[0],
            dataset_name=f"{row['task']}, {row['tokens']:,} tokens" if row["tokens"] else str(row["task"]),
            dataset_config=str(row["tokens"]) if row["tokens"] else None,
            metric_type="score",
            metric_name=_metric_name(row, apart),
            metric_config=None if amount(row) == "all" else str(row["budget_share"] or row["budget"]),
            metric_value=round(row["score"], 2),
        )
        for row in rows(evaluation)
        if trained(row)
    ]
    if found or not evaluation:
        return found
    return [
        EvalResult("text-generation", "custom", "not recorded", name, value)
        for name, value in evaluation.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]


def _metric_name(row: Mapping[str, Any], apart: Iterable[str]) -> str:
    size = amount(row)
    units = "" if size == "all" else f", {size} {'of the prompt' if row['budget_share'] else 'units per KV head'}"
    others = [f", {name.replace('_', ' ')} {row[name]:,}" for name in apart if row[name] is not None]
    return "".join([str(row["method"]), units, *others])
