"""How much of a prompt stays: a budget in units, the same for all prompts, or a share of each prompt's length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from locret.policy.budget import units_of_share
from locret.policy.policy import RetentionPolicy
from locret.policy.resolve import resolve


@dataclass(frozen=True)
class Allotment:
    """A policy as far as it is known without the prompt."""

    values: Mapping[str, Any]
    """Numbers that do not depend on the prompt."""
    stabilizers: int
    """Taken unless `values` has them; at most a quarter of the budget."""
    share: float | None = None
    """Of a prompt's tokens; None where `values` has the budget."""
    asked: int | None = None
    """Stabilizers that the user asked for with a share; short prompts protect fewer."""

    def policy(self, tokens: int) -> RetentionPolicy:
        """Return the policy of a prompt of so many tokens.

        Raises:
            ValueError: If numbers are out of range or contradict each other.
        """
        own = self.values if self.share is None else {**self.values, "budget": units_of_share(self.share, tokens)}
        return resolve(own, {"stabilizers": self.stabilizers}, follow_budget=True)

    def record(self) -> dict[str, Any]:
        """Return what was asked, as it stands in results.json."""
        if self.share is None:
            return self.policy(1).to_dict()
        known = {**self.policy(1).to_dict(), "budget": None, "stabilizers": self.asked}
        return {"budget_share": self.share, **known}


def amount(found: Mapping[str, Any]) -> str:
    """Return the budget of a record or a cell for people: "256", "10%" of the prompt, or "all"."""
    if found.get("budget_share") is not None:
        return percent(found["budget_share"])
    return "all" if found["budget"] is None else f"{found['budget']:,}"


def percent(share: float) -> str:
    """Return a share for people."""
    return f"{100 * share:.6g}%"
