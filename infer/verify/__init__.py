"""Verification of a backbone: does what is read in bounded memory equal what the backbone itself computes?

Nothing is imported before it is used, so that the command's help comes at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from locret.on_demand import on_demand
from locret.tables import markdown

if TYPE_CHECKING:
    from locret.infer.verify.suite import verify

__all__ = ["Report", "Row", "verify"]

__getattr__ = on_demand(__name__, {"verify": "locret.infer.verify.suite"})

OK, FAILED, SKIPPED, REFUSED = "ok", "FAILED", "skipped", "refused"


class NotHere(Exception):
    """A check has nothing to look at; says why."""


class Refused(Exception):
    """What a check looks at is refused by the engine, with good reason; says which."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What came out of one comparison."""

    compared: str
    """What with what."""
    ok: bool
    measured: float | str | None = None
    tolerance: float | str | None = None
    why: str = ""
    """Why the tolerance is that."""
    means: str = ""
    """What a failure means, where that is not what the check says."""
    refused: bool = False
    """Whether the engine refuses it with good reason, which `why` gives."""


def exact(compared: str, ok: bool, measured: str, expected: str, why: str, means: str = "") -> Finding:
    """Return the finding of a comparison in which nothing may differ."""
    return Finding(compared=compared, ok=ok, measured=measured, tolerance=expected, why=why, means=means)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One thing that was compared."""

    check: str
    """Name of the check, as `--only` takes it."""
    status: str
    """ok, FAILED, skipped or refused."""
    compared: str
    """What with what."""
    measured: float | str | None = None
    """The number that came out."""
    tolerance: float | str | None = None
    """The most, or what exactly, it may be."""
    why: str = ""
    """Why the tolerance is that; of what did not run, the reason."""
    means: str = ""
    """Of a failure: what it means for the user, and the way out."""

    @property
    def failed(self) -> bool:
        """Whether the check did not pass."""
        return self.status == FAILED


@dataclass(frozen=True)
class Report:
    """What the checks of a backbone found."""

    rows: Sequence[Row]
    facts: dict[str, Any] = field(default_factory=dict)
    """Backbone, policy, text, machine and versions."""

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return not self.failures

    @property
    def failures(self) -> list[Row]:
        """The rows that failed."""
        return [row for row in self.rows if row.failed]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {"ok": self.ok, "rows": [asdict(row) for row in self.rows], **self.facts}

    def table(self) -> str:
        """Return the rows as a table, and below it what each failure means."""
        heads = ("check", "compared", "measured", "tolerance", "", "why")
        cells = (
            (row.check, row.compared, _shown(row.measured), _shown(row.tolerance), row.status, row.why)
            for row in self.rows
        )
        lines = markdown(heads, cells, numbers=False)
        lines += ["", self.verdict(), *(f"* {row.check}: {row.means}" for row in self.failures)]
        return "\n".join(lines) + "\n"

    def verdict(self) -> str:
        """Return one sentence about all rows."""
        counts = {status: sum(row.status == status for row in self.rows) for status in (OK, FAILED, REFUSED, SKIPPED)}
        said = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        return f"{len(self.rows)} rows: {said or 'nothing was compared'}"

    def __str__(self) -> str:
        return self.table()


def _shown(value: float | str | None) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else f"{value:.3g}" if isinstance(value, float) else f"{value:,}"
