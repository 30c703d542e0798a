"""The numbers behind the figures of an evaluation: lines over budget, stabilizers or chunk size, and heat maps.

Plain arithmetic on the cells of results.json and the lines of samples.jsonl; drawing is in `figures`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from locret.data import tasks
from locret.infer.evaluation.allotment import amount, percent

AXES = ("budget", "budget_share", "chunk_size", "stabilizers")
"""Settings that a figure can have on its x-axis; the others tell lines apart where they differ."""
_WORDS = {"budget": "budget", "budget_share": "share", "chunk_size": "chunk", "stabilizers": "stabilizers"}
_EVEN_ROWS = 10
_MOST_ROWS = 12


@dataclass(frozen=True)
class Point:
    """One mean on a line."""

    x: float
    score: float
    """Mean score, 0 to 100."""
    error: float
    """Standard error of the mean, on the same scale."""


@dataclass(frozen=True)
class Line:
    """One line of a panel; a method without the setting on the x-axis (`full`) is one point for all of it."""

    method: str
    label: str
    points: tuple[Point, ...]
    everywhere: bool
    """Whether the only point holds for every x."""


@dataclass(frozen=True)
class Panel:
    """All lines of one task at one length."""

    task: str
    tokens: int
    lines: tuple[Line, ...]


def panels(cells: Iterable[dict[str, Any]], axis: str) -> list[Panel]:
    """Return the panels of a figure with `axis` from left to right; only those in which some line has two points.

    A method that was run with several values of another setting gets a line for each; where that setting merely follows
    the one on the x-axis (stabilizers derived from the budget), it stays one line.

    Args:
        cells: The cells of results.json.
        axis: One of `AXES`.

    Returns:
        Panels in the order of their first cells.
    """
    grouped: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for cell in cells:
        grouped.setdefault((cell["task"], cell["tokens"]), []).append(cell)
    made = [Panel(task, tokens, _lines(group, axis)) for (task, tokens), group in grouped.items()]
    return [panel for panel in made if any(len(line.points) > 1 for line in panel.lines)]


def _lines(cells: list[dict[str, Any]], axis: str) -> tuple[Line, ...]:
    lines: list[Line] = []
    for method in dict.fromkeys(cell["method"] for cell in cells):
        own = [cell for cell in cells if cell["method"] == method]
        if all(cell.get("budget") is None and cell.get("budget_share") is None for cell in own):
            lines.append(Line(method, method, (_point(own[0], 0),), everywhere=True))
            continue
        own = [cell for cell in own if cell.get(axis) is not None]
        if not own:
            continue  # a share has no budget in units, nor stabilizers that nobody asked for
        apart = _telling_apart(own, axis)
        splits: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for cell in own:
            splits.setdefault(tuple(cell.get(name) for name in apart), []).append(cell)
        for values, group in splits.items():
            words = [f"{_WORDS[name]} {label(name, value)}" for name, value in zip(apart, values, strict=True)]
            points = sorted((_point(cell, cell[axis]) for cell in group), key=lambda point: point.x)
            lines.append(Line(method, ", ".join([method, *words]), tuple(points), everywhere=False))
    return tuple(lines)


def _telling_apart(cells: list[dict[str, Any]], axis: str) -> list[str]:
    """Return the other settings that differ among cells with the same x; without them a line would fold back.

    Budgets are never joined by a line over another setting, not even where that setting follows the budget.
    """
    apart = []
    for name in AXES:
        seen: dict[Any, set[Any]] = {}
        for cell in cells:
            seen.setdefault(cell[axis], set()).add(cell.get(name))
        several = name.startswith("budget") and len({cell.get(name) for cell in cells}) > 1
        if name != axis and (any(len(values) > 1 for values in seen.values()) or several):
            apart.append(name)
    return apart


def label(axis: str, value: float | None) -> str:
    """Return a value of an axis for people."""
    if value is None:
        return "unset"
    return percent(value) if axis == "budget_share" else f"{value:,}"


def _point(cell: dict[str, Any], x: float) -> Point:
    return Point(x, float(cell["score"]), float(cell.get("standard_error") or 0))


@dataclass(frozen=True)
class HeatMap:
    """Mean scores by depth and length: `scores[row][column]`, 0 to 100, None where nothing was read."""

    depths: tuple[float, ...]
    """Edges of the rows, one more than there are rows; the first row is the start of the text."""
    lengths: tuple[int, ...]
    """Tokens asked for, one per column."""
    scores: tuple[tuple[float | None, ...], ...]
    counts: tuple[tuple[int, ...], ...]
    """Samples behind every score."""


def heat_map(records: Sequence[dict[str, Any]]) -> HeatMap:
    """Return the mean scores of samples by the depth of their needle and the length of their prompt.

    Depths that were chosen (at most twelve different ones) get a row each; drawn ones fall into ten even rows.

    Args:
        records: Lines of samples.jsonl of one task and one way of reading, each with a depth.

    Raises:
        ValueError: If there are none.
    """
    if not records:
        raise ValueError("there are no samples with a depth to draw a heat map of; run a task with a single needle")
    distinct = sorted({float(record["depth"]) for record in records})
    lengths = tuple(sorted({int(record["tokens"]) for record in records}))
    edges = _edges(distinct) if len(distinct) <= _MOST_ROWS else [row / _EVEN_ROWS for row in range(_EVEN_ROWS + 1)]
    boxes: list[list[list[float]]] = [[[] for _ in lengths] for _ in edges[1:]]
    for record in records:
        row = sum(float(record["depth"]) >= edge for edge in edges[1:-1])
        boxes[row][lengths.index(int(record["tokens"]))].append(100 * float(record["score"]))
    scores = tuple(tuple(math.fsum(box) / len(box) if box else None for box in row) for row in boxes)
    return HeatMap(tuple(edges), lengths, scores, tuple(tuple(len(box) for box in row) for row in boxes))


def _edges(depths: list[float]) -> list[float]:
    """Return borders halfway between neighbouring depths, and 0 and 1."""
    return [0.0, *((left + right) / 2 for left, right in zip(depths, depths[1:], strict=False)), 1.0]


@dataclass(frozen=True)
class Reading:
    """One way of reading: what a heat map is of."""

    method: str
    amount: str
    """The budget for people, with other settings where a method and budget were run with several."""
    whole: bool = False
    """Whether all units are kept."""

    @property
    def title(self) -> str:
        """A heading."""
        return f"{self.method}, {self.amount}"


def readings(records: Iterable[dict[str, Any]]) -> dict[Reading, dict[str, list[dict[str, Any]]]]:
    """Group the samples of tasks with a single needle by the way they were read, then by task."""
    settings: dict[tuple[str, str], set[tuple[int | None, int | None]]] = {}
    known = {name: tasks.get(name) for name in tasks.names(None)}
    eligible = [
        record
        for record in records
        if record.get("depth") is not None and record["task"] in known and known[record["task"]].single_needle
    ]
    for record in eligible:
        combination = (record.get("chunk_size"), record.get("stabilizers"))
        settings.setdefault((record["method"], amount(record)), set()).add(combination)
    grouped: dict[Reading, dict[str, list[dict[str, Any]]]] = {}
    for record in eligible:
        whole = record["budget"] is None and record.get("budget_share") is None
        words = ["all units" if whole else f"budget {amount(record)}"]
        if not whole and len(settings[record["method"], amount(record)]) > 1:
            words += [f"chunk {record['chunk_size']}", f"stabilizers {record['stabilizers']}"]
        reading = Reading(record["method"], ", ".join(words), whole)
        grouped.setdefault(reading, {}).setdefault(record["task"], []).append(record)
    return grouped
