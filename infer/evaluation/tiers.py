"""Score against bytes: what methods hold in the fast tier, in the second one and in all, and which are not beaten.

A method is on the frontier of a task if no other one is as good with fewer bytes, or better with as many. Bytes are
those held when the prompt has been read, counted from tensors: units, their scores and positions, codes and scales
where units are quantised, and in the fast tier the buffers of the chunk and of the tokens to come.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from locret.infer.evaluation.allotment import amount
from locret.infer.evaluation.summary import size, with_error
from locret.tables import markdown

_SETTINGS = ("method", "budget", "chunk_size", "stabilizers", "budget_share")
MEAN = "mean"
"""The column and the panel that stand for all tasks."""


@dataclass(frozen=True)
class Held:
    """A method with its settings: what it holds, and how well it answers."""

    method: str
    amount: str
    """Its budget, for people."""
    fast: int
    """Bytes in the fast tier."""
    slow: int
    """Bytes in the second tier, in memory and on disk."""
    moved: float
    """Bytes that came from the second tier for an answer, the largest of the samples."""
    score: float
    """0 to 100."""
    error: float | None
    """Standard error of the score; None where one sample was asked."""

    @property
    def total(self) -> int:
        """Bytes in all tiers."""
        return self.fast + self.slow


def by_task(cells: Sequence[dict[str, Any]], tokens: int) -> dict[str, list[Held]]:
    """Return what each method holds at one length, by task, and last under `MEAN` for all tasks if there are several.

    Args:
        cells: The cells of results.json.
        tokens: The length.
    """
    own = _told_apart([cell for cell in cells if cell["tokens"] == tokens])
    found = {task: [_held([cell]) for cell in own if cell["task"] == task] for task in _unique(own, "task")}
    if len(found) > 1:
        groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for cell in own:
            groups.setdefault(tuple(cell.get(name) for name in _SETTINGS), []).append(cell)
        found[MEAN] = [_held(group) for group in groups.values() if len(group) == len(found)]
    return found


def _told_apart(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return cells whose methods say their chunk size and stabilizers, where the budget does not tell them apart."""
    found = list(cells)
    for name in ("chunk_size", "stabilizers"):
        values: dict[tuple[Any, ...], set[Any]] = {}
        for cell in cells:
            values.setdefault((cell["task"], cell["method"], amount(cell)), set()).add(cell.get(name))
        several = {method for (_, method, _), own in values.items() if len(own) > 1}
        found = [
            {**named, "method": f"{named['method']}, {name.replace('_', ' ')} {cell[name]}"}
            if cell["method"] in several
            else named
            for named, cell in zip(found, cells, strict=True)
        ]
    return found


def _unique(cells: Sequence[dict[str, Any]], name: str) -> list[Any]:
    return list(dict.fromkeys(cell[name] for cell in cells))


def _held(cells: Sequence[dict[str, Any]]) -> Held:
    """Return one method over one task or several, which were asked apart."""
    errors = [cell.get("standard_error") for cell in cells]
    known = [error for error in errors if error is not None]
    return Held(
        method=cells[0]["method"],
        amount=amount(cells[0]),
        fast=max(cell["cache_bytes"] for cell in cells),
        slow=max(cell.get("host_bytes", 0) + cell.get("disk_bytes", 0) for cell in cells),
        moved=fmean(cell.get("moved_bytes", 0) for cell in cells),
        score=fmean(cell["score"] for cell in cells),
        error=math.hypot(*known) / len(cells) if len(known) == len(cells) else None,
    )


def frontier(found: Sequence[Held], tier: str) -> list[Held]:
    """Return the methods that no other one beats, from few bytes to many.

    Args:
        found: The methods.
        tier: Which bytes count, "fast" or "total".
    """

    def beats(one: Held, other: Held) -> bool:
        less, more = getattr(one, tier) - getattr(other, tier), one.score - other.score
        return less <= 0 <= more and (less < 0 or more > 0)

    kept = [one for one in found if not any(beats(other, one) for other in found)]
    return sorted(kept, key=lambda one: getattr(one, tier))


def results(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the frontiers for results.json: an entry per length, task and tier, its methods from few bytes to many."""
    return [
        {
            "tokens": tokens,
            "task": task,
            "tier": tier,
            "methods": [
                {"method": one.method, "budget": one.amount, "bytes": getattr(one, tier), "score": round(one.score, 4)}
                for one in frontier(held, tier)
            ],
        }
        for tokens in _unique(cells, "tokens")
        for task, held in by_task(cells, tokens).items()
        for tier in ("fast", "total")
    ]


def table(cells: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table per length: a row per method and budget with the bytes of its tiers, a column per task.

    `f` behind a score says that the method is on the frontier of score and fast bytes, `t` of score and all bytes.
    """
    parts = []
    for tokens in _unique(cells, "tokens"):
        found = by_task(cells, tokens)
        columns = list(found)
        marks = {task: {tier: frontier(found[task], tier) for tier in ("fast", "total")} for task in columns}
        scores = {task: {(one.method, one.amount): one for one in found[task]} for task in columns}
        wide = found.get(MEAN) or found[columns[0]]
        rows = [
            [
                *(one.method, one.amount, size(one.fast), size(one.slow), size(one.total), size(one.moved)),
                *(_shown(scores[task].get((one.method, one.amount)), marks[task]) for task in columns),
            ]
            for one in wide
        ]
        titles = ["method", "budget", "fast", "second tier", "total", "moved / answer"]
        parts += [f"Bytes held and scores at {tokens:,} tokens:", "", *markdown([*titles, *columns], rows), ""]
    note = (
        "f: no method answers as well with fewer fast bytes, or better with as many; t: the same for the bytes in all"
    )
    return "\n".join([*parts, note]) + "\n"


def _shown(one: Held | None, marks: dict[str, list[Held]]) -> str:
    if one is None:
        return ""
    flags = "".join(tier[0] for tier in ("fast", "total") if one in marks[tier])
    return with_error(one.score, one.error) + (f" {flags}" if flags else "")
