"""What a user gave, turned into a policy: the one rule for every command, the harness and the benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from locret.base.fields import check_ranges
from locret.base.method_spec import MODIFIERS
from locret.base.warned import warn_user
from locret.policy.policy import FOLLOWING, RANGES, USUAL, RetentionPolicy, Wanted

SHARES: Mapping[str, Any] = {"head_budgets": "uniform", "head_shares": None, "spacing": 1}
"""What is recommended of the sizes of KV heads, and what is so without them."""
_SIZES = {"budget", "decode_budget", *FOLLOWING}
ALONE = "units stay by their scores alone: diversity, which the heads recommend, does not go with what else was chosen"
EQUAL = "all KV heads get as many units: shares, which hold more of a text, do not go with what else was chosen"


@dataclass(frozen=True, kw_only=True)
class PolicyFlags(RetentionPolicy, usual=("budget",)):
    """The numbers of a policy as options: those that may follow from others are None unless they are given."""

    budget: int = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        """Check what is given by itself: what is recommended is still missing, and `resolve` checks the whole."""
        check_ranges(self, RANGES)


def resolve(
    own: Mapping[str, Any],
    recommended: Mapping[str, Any],
    wanted: Wanted = MappingProxyType({}),
    named: Collection[str] = (),
) -> RetentionPolicy:
    """Return the policy: what the user chose, else what is recommended, else the defaults.

    Recommended numbers belong to the recommended budget. Below it, those that follow from a budget (see
    `RetentionPolicy`) are at most what the smaller one allows. Recommended diversity and shares of KV heads yield to a
    choice that they cannot stand beside, such as fewer bits.

    Args:
        own: Numbers that the user chose, or that follow from what the user chose; None where one is left open
            (but a decode_budget of None is a choice: no bound).
        recommended: Numbers of the heads or a preset; may be empty.
        wanted: Numbers that follow from the budget otherwise than by what is recommended.
        named: Which of the recommended numbers the user chose by modifiers of a method, and which so yield to nothing.
    """
    given = {name for name, value in own.items() if value is not None}
    beside = {*named, *given}
    policy, said = yielding(lambda less: _resolved(own, {**recommended, **less}, wanted), recommended, beside)
    for one in said:
        warn_user(one)
    check_effect(named, policy, given)
    return policy


def check_effect(named: Collection[str], policy: RetentionPolicy, chosen: Collection[str]) -> None:
    """Refuse a modifier that changes nothing, unless the user chose otherwise what would let it."""
    for name, missing in policy.idle().items():
        field, _, value = missing.replace("-", "_").partition(" ")
        if name in named and field not in chosen:
            own = next(modifier for modifier, change in MODIFIERS.items() if name in (*change.fields, *change.options))
            ways = [f"+{modifier}" for modifier, change in MODIFIERS.items() if change.fields.get(field) == value]
            raise ValueError(f"+{own} changes nothing without {(ways or [missing])[0]}; add that, or drop +{own}")


def yielding(
    make: Callable[[Mapping[str, Any]], RetentionPolicy], recommended: Mapping[str, Any], given: Collection[str]
) -> tuple[RetentionPolicy, list[str]]:
    """Return the policy that `make` makes with the fewest numbers in place of recommended ones, and what that means.

    Diversity yields before shares, and each only where the other does not help.

    Raises:
        ValueError: Of the policy as it was meant, where none stands.
    """
    diverse = bool(recommended.get("diversity")) and "diversity" not in given
    shared = recommended.get("head_budgets") == "shares" and "head_budgets" not in given
    refused = None
    for alone, equal in ((False, False), (diverse, False), (False, shared), (diverse, shared)):
        less = {**({"diversity": 0.0} if alone else {}), **(SHARES if equal else {})}
        try:
            return make(less), [EQUAL] * equal + [ALONE] * alone
        except ValueError as error:
            refused = refused or error
    assert refused is not None
    raise refused


def _resolved(own: Mapping[str, Any], recommended: Mapping[str, Any], wanted: Wanted) -> RetentionPolicy:
    given = {name: value for name, value in own.items() if value is not None or name == "decode_budget"}
    # What the user chose may be what lets a method's numbers stand beside those of the heads.
    beside = {name: value for name, value in given.items() if name not in _SIZES}
    reference = RetentionPolicy(**{**recommended, **beside})
    following = {name: (getattr(reference, name), reference.budget) for name in FOLLOWING if name not in given}
    following |= {name: pair for name, pair in reference.wanted.items() if name in following}
    following |= wanted
    settings = {field.name: getattr(reference, field.name) for field in fields(RetentionPolicy)} | given
    policy = RetentionPolicy.following_from({n: v for n, v in settings.items() if n not in following}, following)
    if policy.prefill_attention != RetentionPolicy.prefill_attention:
        from locret import prefill_attention  # needs torch, which help and completion should not load

        if (strategy := prefill_attention.get(policy.prefill_attention)) is not None:
            strategy.check_file()
    return policy


def check_used(own: Mapping[str, Any], policies: Collection[RetentionPolicy]) -> None:
    """Refuse a number that the user chose and that changes nothing in any of the policies it is for."""
    for field in fields(RetentionPolicy):
        value = own.get(field.name)
        missing = [policy.idle().get(field.name) for policy in policies]
        if value is not None and value != USUAL.get(field.name, field.default) and missing and all(missing):
            flag = f"--{field.name.replace('_', '-')}"
            raise ValueError(f"{flag} {value} changes nothing without --{missing[0]}; add that, or drop {flag}")


def check_no_turns(own: Mapping[str, Any]) -> None:
    """Refuse to say how a turn is read where every prompt is read as a whole, its question included."""
    if (value := own.get("turns")) not in (None, RetentionPolicy.turns):
        raise ValueError(f"--turns {value} changes nothing here, where a question is read with its text; drop --turns")


def resolve_options(
    options: Any,
    chosen: Collection[str],
    recommended: Mapping[str, Any],
    budget: int | None = None,
    named: Collection[str] = (),
) -> RetentionPolicy:
    """Return the policy of a command's options; `budget` is in place of one in bytes or shares."""
    own = {field.name: getattr(options, field.name) for field in fields(RetentionPolicy) if field.name in chosen}
    if budget is not None:
        own["budget"] = budget
    policy = resolve(own, recommended, named=named)
    check_used(own, [policy])
    return policy
