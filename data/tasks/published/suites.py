"""Suites: the tasks of a published table, in its order, with its average and the rows that papers print for it.

To add one, or a row of a paper: `suites.yaml`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from locret.base.nearest import refuse_unknown


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """One row of a published table."""

    source: str
    model: str
    method: str
    precision: str
    """Of weights or cache; "not stated" where the paper gives none."""
    scores: tuple[float | None, ...]
    """In the order of the suite's tasks, 0 to 100; None where the paper has no cell. Empty where it prints the average
    alone."""
    average: float | None
    """As printed; None where the paper prints none."""
    note: str


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A table to reproduce."""

    name: str
    title: str
    tasks: tuple[str, ...]
    """In the order of the table's columns."""
    groups: tuple[tuple[str, ...], ...] = ()
    """Groups of tasks whose means are averaged; without them the average is that of the tasks."""
    tokens: int | None = None
    """Length of the prompts, where it belongs to the suite; 0 for rows of the published sizes."""
    published: tuple[PublishedRow, ...] = ()
    """What papers print."""
    remark: str = ""
    """What else published rows do otherwise."""

    @property
    def average_rule(self) -> str:
        """How the average is taken, in words."""
        if len(self.tasks) == 1:
            return "the task's score"
        return f"mean of {len(self.groups)} groups' means" if self.groups else f"mean of {len(self.tasks)} tasks"

    def average(self, scores: Mapping[str, float]) -> float | None:
        """Return the average of the scores that are there, by task; None if none is."""
        parts = self.groups or tuple((name,) for name in self.tasks)
        means = [_mean([scores[name] for name in names if name in scores]) for names in parts]
        return _mean([mean for mean in means if mean is not None])


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


@lru_cache(maxsize=1)
def _suites() -> dict[str, Suite]:
    text = Path(__file__).with_name("suites.yaml").read_text(encoding="utf-8")
    return {name: _suite(name, facts) for name, facts in yaml.safe_load(text).items()}


def _suite(name: str, facts: Mapping[str, Any]) -> Suite:
    def named(text: str) -> tuple[str, ...]:
        return tuple(f"{facts['family']}/{task}" for task in text.split())

    groups = tuple(map(named, facts.get("groups", {}).values()))
    own = named(facts["tasks"]) if "tasks" in facts else tuple(task for names in groups for task in names)
    return Suite(
        name=name,
        title=facts["title"],
        tasks=own,
        groups=groups,
        tokens=facts.get("tokens"),
        published=tuple(row for table in facts.get("published", ()) for row in _rows(**table)),
        remark=facts.get("remark", ""),
    )


def _rows(table: str, model: str, rows: str) -> Iterator[PublishedRow]:
    """Read lines of `method: cell ... | average | precision | note`; a cell that is not there is a dash."""
    for line in rows.strip().splitlines():
        method, _, rest = line.partition(":")
        cells, average, precision, note, *_ = [*(part.strip() for part in rest.split("|")), "", "", ""]
        yield PublishedRow(
            source=table,
            model=model,
            method=method.strip(),
            precision=precision or "not stated",
            scores=tuple(None if cell == "-" else float(cell) for cell in cells.split()),
            average=None if average == "-" else float(average),
            note=note,
        )


def names() -> list[str]:
    """Return the names of the suites."""
    return list(_suites())


def get(name: str) -> Suite:
    """Return the suite called `name`."""
    if name not in _suites():
        refuse_unknown("--suite", name, names())
    return _suites()[name]
