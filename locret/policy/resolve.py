"""What a user gave, turned into a policy: the one rule for every command, the harness and the benchmarks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from locret.field_values import checked
from locret.policy.policy import RetentionPolicy


def resolve(own: Mapping[str, Any], recommended: Mapping[str, Any], *, follow_budget: bool) -> RetentionPolicy:
    """Return the policy: what the user chose, else what is recommended, else the defaults.

    Args:
        own: Numbers that the user chose, or that follow from what the user chose.
        recommended: Numbers of the heads, the scorer or a preset; may be empty.
        follow_budget: Let stabilizers that are not among `own` be at most a quarter of the budget. Recommended ones
            belong to a budget of their own; a smaller one must keep room for scored units.

    Raises:
        ValueError: If numbers are out of range or contradict each other.
    """
    settings = {**recommended, **own}
    if follow_budget and "stabilizers" not in own:
        wanted, budget = (
            checked(RetentionPolicy, name, settings.get(name, getattr(RetentionPolicy, name)))
            for name in ("stabilizers", "budget")
        )
        settings["stabilizers"] = min(wanted, budget // 4)
    return RetentionPolicy(**settings)


def resolve_options(
    options: RetentionPolicy, chosen: Collection[str], recommended: Mapping[str, Any], budget: int | None = None
) -> RetentionPolicy:
    """Return the policy of a command's options.

    Args:
        options: The options.
        chosen: Names that the user set.
        recommended: Numbers of the heads or the scorer; may be empty.
        budget: Budget that follows from something else, such as bytes or a share; stabilizers then follow it.

    Raises:
        ValueError: If numbers are out of range or contradict each other.
    """
    own = {field.name: getattr(options, field.name) for field in fields(RetentionPolicy) if field.name in chosen}
    if budget is not None:
        own["budget"] = budget
    return resolve(own, recommended, follow_budget=budget is not None)
