"""A second table for runs with several budgets: a row per method, its scores at all budgets side by side."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from locret.infer.evaluation.allotment import amount
from locret.infer.evaluation.summary import size
from locret.tables import markdown


def table(cells: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table of cells of results.json, such as `100 / 95 / 90` for three budgets.

    Returns:
        The table; empty where there is one budget only, or where a method was run several times with the same one.
    """
    bounded = {_budget(cell): amount(cell) for cell in cells if _budget(cell) is not None}
    budgets = sorted(bounded)  # type: ignore[type-var] # no None is left
    if len(budgets) < 2:
        return ""
    columns = list(dict.fromkeys((cell["task"], cell["tokens"]) for cell in cells))
    by_place: dict[tuple[Any, ...], dict[str, Any]] = {}
    for cell in cells:
        place = (cell["task"], cell["tokens"], cell["method"], _budget(cell))
        if place in by_place:
            return ""
        by_place[place] = cell
    titles = [f"{task} @ {tokens:,}" if tokens else task for task, tokens in columns]
    titles = ["method", *titles, "mean", "peak cache", "read tokens/s", "write tokens/s"]
    lines = [f"Budgets {' / '.join(bounded[budget] for budget in budgets)}:", ""]
    rows = []
    for method in dict.fromkeys(cell["method"] for cell in cells):
        own = [cell for cell in cells if cell["method"] == method]
        known: list[Any] = sorted({_budget(cell) for cell in own} - {None}) or [None]  # type: ignore[type-var]
        at = [[cell for cell in own if _budget(cell) == budget] for budget in known]
        texts = [method]
        for column in columns:
            found = [by_place.get((*column, method, budget)) for budget in known]
            texts.append(" / ".join("" if cell is None else f"{cell['score']:.0f}" for cell in found))
        texts.append(" / ".join(f"{fmean(cell['score'] for cell in group):.0f}" for group in at))
        texts.append(" / ".join(size(max(cell["peak_bytes"] for cell in group)) for group in at))
        for phase in ("prefill", "decode"):
            rates = [cell[f"{phase}_tokens_per_second"] for cell in own if cell[f"{phase}_tokens_per_second"]]
            texts.append(f"{fmean(rates):,.0f}" if rates else "")
        rows.append(texts)
    return "\n".join([*lines, *markdown(titles, rows)]) + "\n"


def _budget(cell: dict[str, Any]) -> float | None:
    """Return the units or the share that a cell was given; None for the plain cache."""
    share: float | None = cell.get("budget_share")
    units: float | None = cell["budget"]
    return units if share is None else share
