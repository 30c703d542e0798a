"""What heads scored, as their config records it: taken from locret-eval's results.json, shown in the card."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from locret.base.fields import shown
from locret.base.files import read_json

_NUMBERS = ("tokens", "budget", "budget_share", "chunk_size", "stabilizers", "n", "score", "standard_error")
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
    values = values if isinstance(values, dict) else {}
    cells = values.get("cells")
    if not isinstance(cells, list) or not cells:
        raise ValueError(f"{file} has no cells; give the results.json that locret-eval wrote")
    if values.get("complete") is not True:
        raise ValueError(f"{file} is of an evaluation that has not ended; finish it with locret-eval --resume")
    found = [_row(cell, f"{file}, cell {number}") for number, cell in enumerate(cells)]
    if not any(map(_of_heads, found)):
        raise ValueError(f"{file} has no results of the method {_TRAINED}, which uses heads; add it to --methods")
    used = _within(values, "config", "weights", "heads")
    if weights is not None and isinstance(used, str) and used != weights:
        raise ValueError(
            f"{file} is of other heads (fingerprint {shown(used[:12])[1:-1]}, those to be published have "
            f"{weights[:12]}); run locret-eval with these"
        )
    facts = {"toolkit_version": _within(values, "versions", "locret"), "commit": values.get("commit")}
    known = {name: value for name, value in facts.items() if isinstance(value, str) and value.isprintable()}
    return {"source": "locret-eval", **known, "results": found}


def _within(values: Any, *names: str) -> Any:
    for name in names:
        values = values.get(name) if isinstance(values, dict) else None
    return values


def _row(cell: Any, where: str) -> dict[str, Any]:
    row = {name: _within(cell, name) for name in ("task", "method", *_NUMBERS)}
    good = all(
        row[name] is None or (type(row[name]) in (int, float) and isfinite(row[name])) for name in _NUMBERS
    ) and all(isinstance(row[name], str) and row[name].isprintable() for name in ("task", "method"))
    if not good or row["score"] is None:
        raise ValueError(f"{where} is {shown(cell)}, without task, method and score; run locret-eval again")
    return row


def rows(evaluation: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return the rows of notes that `from_results` made; empty for notes of another form."""
    results = (evaluation or {}).get("results")
    try:
        return [_row(row, "evaluation") for row in results] if isinstance(results, list) else []
    except ValueError:
        return []


def amount(row: Mapping[str, Any]) -> str:
    """Return the budget of a row for people: "1,024", "10%" of the prompt, or "all"."""
    if row.get("budget_share"):
        return f"{100 * row['budget_share']:.6g}%"
    return f"{row['budget']:,}" if row["budget"] else "all"


def _of_heads(row: Mapping[str, Any]) -> bool:
    return str(row["method"]).split("+")[0].split(":")[0] == _TRAINED
