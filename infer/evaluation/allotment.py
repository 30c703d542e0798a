"""How much of a prompt stays: a budget in units, the same for all prompts, or a share of each prompt's length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from locret.policy.budget import units_of_share
from locret.policy.policy import RetentionPolicy
from locret.policy.resolve import resolve

_ANY_BUDGET = 2**62


@dataclass(frozen=True)
class Allotment:
    """A policy as far as it is known without the prompt."""

    own: Mapping[str, Any]
    """Numbers that the user gave."""
    recommended: Mapping[str, Any] = field(default_factory=dict)
    """Numbers of the heads."""
    share: float | None = None
    """Of a prompt's tokens that the budget is; None where `own` or `recommended` have the budget."""

    def policy(self, tokens: int) -> RetentionPolicy:
        """Return the policy of a prompt of so many tokens.

        Raises:
            ValueError: If numbers are out of range or contradict each other.
        """
        own, wanted = dict(self.own), dict[str, tuple[int, int]]()
        if self.share is not None:
            own["budget"] = units_of_share(self.share, tokens)
            if (given := own.pop("stabilizers", None)) is not None:
                # Nobody knows the shortest prompt: its budget may be smaller than what is to be protected.
                wanted["stabilizers"] = given, _ANY_BUDGET
        return resolve(own, self.recommended, wanted)

    def record(self) -> dict[str, Any]:
        """Return what was asked, as it stands in results.json."""
        if self.share is None:
            return self.policy(1).to_dict()
        following = {"budget": None, "stabilizers": self.own.get("stabilizers"), "local_len": self.own.get("local_len")}
        following |= {"chunk_size": self.own.get("chunk_size")}
        return {"budget_share": self.share, **self.policy(1).to_dict(), **following}


def amount(found: Mapping[str, Any]) -> str:
    """Return the budget of a record or a cell for people: "256", "10%" of the prompt, or "all"."""
    if found.get("budget_share") is not None:
        return percent(found["budget_share"])
    return "all" if found["budget"] is None else f"{found['budget']:,}"


def percent(share: float) -> str:
    """Return a share for people."""
    return f"{100 * share:.6g}%"
