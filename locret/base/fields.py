"""Values given for the fields of a dataclass, whoever gives them, checked by the types that the fields declare."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints


class Refusal(ValueError):
    """Says which setting a value cannot be given for, as Python spells it; a command spells it as its flag."""

    def __init__(self, setting: str, value: Any, rule: str) -> None:
        super().__init__(f"{setting}={value} {rule}")
        self.setting, self.value, self.rule = setting, value, rule


def check_fields(instance: Any) -> None:
    """Check every field of a dataclass instance, and leave plain Python numbers in it.

    Raises:
        ValueError: For the first value that is not of its field's type; a number must be finite.
    """
    for field in fields(instance):
        object.__setattr__(instance, field.name, checked(type(instance), field.name, getattr(instance, field.name)))


def checked(cls: type, name: str, value: Any) -> Any:
    """Return a value for the field `name`; scalars of numpy and torch come back as Python numbers.

    Raises:
        ValueError: If it is not of the field's type; a number must be finite.
    """
    kind = _types(cls)[name]
    kinds = get_args(kind) if isinstance(kind, UnionType) or get_origin(kind) is Union else (kind,)
    if value is None and NoneType in kinds:
        return None
    ours = [_RULES.get(one) or _RULES.get(get_origin(one) or one) for one in kinds if one is not NoneType]
    if not ours or None in ours:  # a type of somebody else's, who checks it
        return value
    rules = [rule for rule in ours if rule is not None]
    for convert, _ in rules:
        try:
            return convert(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            continue
    default = next(field.default for field in fields(cls) if field.name == name)
    example = "" if default in (MISSING, None) else f" such as {default!r}"
    way_out = ", or leave it out" if NoneType in kinds else ""
    rule = " or ".join(rule for _, rule in rules)
    raise ValueError(f"{name}={shown(value)} is not {rule}; give one{example}{way_out}")


def checked_values(cls: type, values: Any, where: str) -> dict[str, Any]:
    """Return values for some fields of `cls`, such as a file holds, each checked on its own.

    Raises:
        ValueError: If they are not given by name, a name is unknown, or a value is not of its field's type; the
            message begins with `where`.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{where}={shown(values)} is not a mapping; give the fields of {cls.__name__} by name")
    known = _types(cls)
    for name in values:
        if name not in known:
            raise ValueError(
                f"{where} has an unknown key {shown(name)}; the keys are those of {cls.__name__}: {', '.join(known)}"
            )
    try:
        return {name: checked(cls, name, value) for name, value in values.items()}
    except ValueError as error:
        raise ValueError(f"{where}.{error}") from None


class Range(NamedTuple):
    """From where to where a number may lie."""

    least: float
    most: float = math.inf


SHARE = Range(0, 1)


def check_ranges(instance: Any, ranges: Mapping[str, Range | tuple[Any, ...]], where: str = "") -> None:
    """Check fields that a type alone does not bound; None is a field that nobody set.

    Args:
        instance: What has the fields.
        ranges: By name, a `Range`, or a tuple of all values there are.
        where: What a message begins with.

    Raises:
        ValueError: Naming the field, its value and what it may be.
    """
    for name, allowed in ranges.items():
        value = getattr(instance, name)
        text = f'{where}{name}="{value}"' if isinstance(value, str) else f"{where}{name}={value}"
        if value is None or (isinstance(value, str) and isinstance(allowed, Range)):
            continue
        if not isinstance(allowed, Range):
            if value not in allowed:
                raise ValueError(f"{text} is unknown; choose one of {', '.join(map(str, allowed))}")
        elif allowed == SHARE and not 0 <= value <= 1:
            raise ValueError(f"{text} is not a share; it must lie between 0 and 1")
        elif value < allowed.least:
            raise ValueError(f"{text} is too small; it must be {allowed.least:,} or more")
        elif value > allowed.most:
            raise ValueError(f"{text} is too large; it must be {allowed.most:,} or less")


def check_finite(options: Any) -> None:
    """Check every number of a command's options, which a recipe may set to `.inf` or `.nan`.

    Raises:
        ValueError: Naming the flag.
    """
    for field in fields(options):
        value = getattr(options, field.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"--{field.name.replace('_', '-')} {value} is not a finite number; give one")


def check_license(value: str | None) -> None:
    """Check the option `--license` of the commands that make or publish heads; None is no licence given.

    Raises:
        ValueError: If the Hub would refuse the card.
    """
    if value is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]{0,60}", value):
        raise ValueError(f"--license {value} is not how the Hub spells a licence; use one such as apache-2.0 or other")


def shown(value: Any) -> str:
    """Return a value that somebody gave, for a message: on one line, and cut where it is long."""
    try:
        text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    except (ValueError, RecursionError):  # numbers of thousands of digits, lists in lists in lists
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def check_sampling(setting: str, value: float, least: float = 1e-3) -> None:
    """Check a divisor of logits, which must leave them finite.

    Args:
        setting: How the user named it.
        value: A temperature or a repetition penalty.
        least: Smallest value that float16 logits bear.

    Raises:
        ValueError: Naming the setting.
    """
    if not least <= value <= 1 / least:
        raise ValueError(f"{setting} {value} makes no usable probabilities; give {least:g} to {1 / least:g}")


MOST_THREADS = 4096
"""CPU threads that may be asked for: OpenMP takes the process down where it cannot make as many."""


def check_threads(threads: int) -> None:
    """Check a number of CPU threads against what no machine has cores for.

    Raises:
        ValueError: Naming the option.
    """
    if threads > MOST_THREADS:
        raise ValueError(f"--threads {shown(threads)} is too large; give at most {MOST_THREADS}")


@cache
def _types(cls: type) -> dict[str, Any]:
    try:
        hints = get_type_hints(cls)
    except NameError:  # a class of somebody else's, whose types only a checker of types knows
        hints = {}
    return {field.name: hints.get(field.name, Any) for field in fields(cls)}


def _plain(value: Any) -> Any:
    """Return a scalar of numpy or torch as a Python number."""
    return value.item() if hasattr(value, "item") else value


def _whole(value: Any) -> int:
    value = _plain(value)
    if isinstance(value, bool):  # which Python counts as a whole number
        raise TypeError
    return operator.index(value)


def _finite(value: Any) -> float:
    value = _plain(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError
    return value


def _of(kind: type) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if not isinstance(value, kind):
            raise TypeError
        return value

    return convert


def _whole_numbers(values: Any) -> tuple[int, ...]:
    return tuple(map(_whole, _of(list | tuple)(values)))  # type: ignore[arg-type]


def _numbers(values: Any) -> tuple[float, ...]:
    return tuple(map(_finite, _of(list | tuple)(values)))  # type: ignore[arg-type]


_RULES: dict[Any, tuple[Callable[[Any], Any], str]] = {
    int: (_whole, "a whole number"),
    float: (_finite, "a finite number"),
    bool: (_of(bool), "one of True and False"),
    str: (_of(str), "a string"),
    dict: (_of(dict), "a mapping"),
    tuple: (_whole_numbers, "a list of whole numbers"),
    tuple[float, ...]: (_numbers, "a list of finite numbers"),
}
