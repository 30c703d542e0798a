"""Which rows training left out, and why: how many for each reason, and where the first of them stand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PLACES = 20
"""Rows named for each reason; a filter may leave out most of a large data set."""


class DropReport:
    """Rows left out in the first epoch, which meets every row once; later epochs leave out the same ones."""

    def __init__(self) -> None:
        self.read = 0
        """Rows read, those left out included."""
        self.counts: dict[str, int] = {}
        """Rows left out, by reason."""
        self._places: dict[str, list[str]] = {}

    def add(self, reason: str, where: str) -> None:
        """Note a row that is left out."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        places = self._places.setdefault(reason, [])
        if len(places) < PLACES:
            places.append(where)

    def to_dict(self) -> dict[str, Any]:
        """Return the report in plain JSON types: rows read and used, and for each reason its count and first rows."""
        dropped = {
            reason: {"count": count, "first_rows": list(self._places[reason])} for reason, count in self.counts.items()
        }
        return {"read": self.read, "used": self.read - sum(self.counts.values()), "dropped": dropped}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DropReport:
        """Return the report that `to_dict` wrote."""
        report = cls()
        report.read = int(values["read"])
        report.counts = {reason: int(found["count"]) for reason, found in values["dropped"].items()}
        report._places = {reason: list(found["first_rows"]) for reason, found in values["dropped"].items()}
        return report

    def __str__(self) -> str:
        """List the reasons: "2 no answer, 1 invalid UTF-8"."""
        return ", ".join(f"{count} {reason}" for reason, count in self.counts.items())
