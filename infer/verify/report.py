"""What is found when a backbone is verified: a row for everything that was compared, and the report of all rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from locret.base.tables import markdown

OK, FAILED, SKIPPED, REFUSED = "ok", "FAILED", "skipped", "refused"
TOKENS, LEAST_TOKENS = 1024, 64
"""Tokens of a text: usually, and at least, so that there are chunks to cut."""


class NotHere(Exception):
    """A check has nothing to look at; says why."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One thing that was compared: the number that came out, the most or what exactly it may be, and why that."""

    check: str = ""
    """Name of the check, as `--only` takes it."""
    status: str
    """ok, FAILED, skipped or refused."""
    compared: str
    measured: float | str | None = None
    tolerance: float | str | None = None
    why: str = ""
    means: str = ""
    """Of a failure: what it means for the user, and the way out."""


@dataclass(frozen=True)
class Report:
    """What the checks of a backbone found."""

    rows: Sequence[Row]
    facts: dict[str, Any] = field(default_factory=dict)
    """Backbone, policy, text, machine and versions."""

    @property
    def ok(self) -> bool:
        return not self.failures

    @property
    def failures(self) -> list[Row]:
        return [row for row in self.rows if row.status == FAILED]

    def to_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, "rows": [asdict(row) for row in self.rows], **self.facts}

    def table(self) -> str:
        """Return the rows as a table, and below it what each failure means."""
        titles = ("check", "compared", "measured", "tolerance", "", "why")
        cells = [(r.check, r.compared, _shown(r.measured), _shown(r.tolerance), r.status, r.why) for r in self.rows]
        statuses = [row.status for row in self.rows]
        counts = [f"{statuses.count(one)} {one}" for one in (OK, FAILED, REFUSED, SKIPPED) if one in statuses]
        verdict = f"{len(self.rows)} rows: {', '.join(counts) or 'nothing was compared'}"
        meanings = [f"* {row.check}: {row.means}; report it with this table" for row in self.failures]
        return "\n".join([*markdown(titles, cells, numbers=False), "", verdict, *meanings]) + "\n"

    def __str__(self) -> str:
        return self.table()


def _shown(value: float | str | None) -> str:
    return f"{value:.3g}" if isinstance(value, float) else value or ""
