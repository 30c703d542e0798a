"""Values of fields, whoever gives them, read and checked as the types that dataclasses declare."""

from __future__ import annotations

import math
import operator
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from locret.base.nearest import check_retired, nearest

_LARGEST = 2**63 - 1
"""What PyTorch and the operating system can count to."""
_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_THOUSANDS = {"K": 1024, "M": 1024**2}
"""What people mean by a letter behind a number of units or tokens."""


class WrongType(ValueError):
    """A value that is not of its field's type; the text says what it must be."""


class Refusal(ValueError):
    """Says which setting a value cannot be given for, as Python spells it; a command spells it as its flag."""

    def __init__(self, setting: str, value: Any, rule: str, numbers: Mapping[str, Any] | None = None) -> None:
        super().__init__(f"{setting}={value} {rule if numbers is None else rule.format(**numbers)}")
        self.setting, self.value, self.rule, self.numbers = setting, value, rule, numbers

    def spelled(self, flag_of: Callable[[str], str]) -> str:
        """Return it as a command does; with `numbers`, settings by name, the rule is a template and may name others."""
        said, rule = flag_of(self.setting) + ("" if self.value is True else f" {self.value}"), self.rule
        if self.numbers is None:
            return f"{said} {rule}"
        said, names = said.replace('"', ""), "|".join(self.numbers)
        rule = re.sub(rf'\b({names})=("?)([^\s";,]+)\2', lambda one: f"{flag_of(one[1])} {one[3]}", rule)
        # Without a value, "recall" or "memory" may be a word of the sentence.
        rule = re.sub(rf"(?<![\w{{-])({names})(?!\w)", lambda one: flag_of(one[1]) if "_" in one[1] else one[1], rule)
        return f"{said} {rule.format(**self.numbers)}"


class OptionClass:
    """What classes of options are: `usual` are those of a class's own fields that the short help shows; None: all."""

    usual: ClassVar[tuple[str, ...] | None] = None

    def __init_subclass__(cls, *, usual: tuple[str, ...] | None = None) -> None:
        cls.usual = usual


@contextmanager
def as_arguments() -> Iterator[None]:
    """Name the settings of option classes as Python's arguments, not as flags."""
    try:
        yield
    except (ValueError, OSError) as error:
        text = re.sub(r"--([a-z][a-z-]*)", lambda found: found[1].replace("-", "_"), str(error))
        if text == str(error):
            raise
        raise (OSError if isinstance(error, OSError) else ValueError)(text) from error


def check_fields(instance: Any) -> None:
    """Check every field of a dataclass instance, and leave plain Python numbers in it."""
    for field in fields(instance):
        object.__setattr__(instance, field.name, checked(type(instance), field.name, getattr(instance, field.name)))


def checked(cls: type, name: str, value: Any) -> Any:
    """Return a value for the field `name`; scalars of numpy and torch come back as Python numbers."""
    kind = types_of(cls)[name]
    members = [one for one in union_members(kind) if one is not NoneType]
    if not members or any((get_origin(one) or one) not in _READERS for one in members):
        return value  # a type of somebody else's, who checks it
    try:
        return read(value, kind)
    except WrongType as error:
        default = next(field.default for field in fields(cls) if field.name == name)
        example = "" if default in (MISSING, None) else f" such as {default!r}"
        way_out = ", or leave it out" if takes_none(kind) else ""
        raise ValueError(f"{name}={shown(value)} is not {error}; give one{example}{way_out}") from None


def checked_values(cls: type, values: Any, where: str) -> dict[str, Any]:
    """Return values for some fields of `cls`, such as a file holds, each checked on its own."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{where}={shown(values)} is not a mapping; give the fields of {cls.__name__} by name")
    known = types_of(cls)
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
    """From where to where a number may lie, and what else a message says of it."""

    least: float
    most: float = math.inf
    note: str = ""


SHARE = Range(0, 1)


def check_ranges(instance: Any, ranges: Mapping[str, Range | tuple[Any, ...]], where: str = "") -> None:
    """Check fields by name, by a `Range` or all values there are; None is a field that nobody set.

    Without `where` a command spells the field as its flag.
    """
    for name, allowed in ranges.items():
        value, rule = getattr(instance, name), ""
        if value is None or (isinstance(value, str | list) and isinstance(allowed, Range)):
            continue
        if not isinstance(allowed, Range):
            if value not in allowed:
                check_retired(name, str(value))
                rule = f"is unknown; choose one of {', '.join(map(str, allowed))}"
        elif allowed == SHARE and not 0 <= value <= 1:
            rule = "is not a share; it must lie between 0 and 1"
        elif value < allowed.least:
            rule = f"is too small; it must be {allowed.least:,} or more{allowed.note}"
        elif value > allowed.most:
            rule = f"is too large; it must be {allowed.most:,} or less{allowed.note}"
        if rule:
            refusal = Refusal(name, f'"{value}"' if isinstance(value, str) else value, rule)
            raise ValueError(f"{where}{refusal}") if where else refusal


def shown(value: Any) -> str:
    """Return a value that somebody gave, for a message: on one line, and cut where it is long."""
    try:
        text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    except (ValueError, RecursionError):  # numbers of thousands of digits, lists in lists in lists
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def check_sampling(setting: str, value: float, least: float = 1e-3) -> None:
    """Check a divisor of logits, which must leave them finite, in float16 too."""
    if not least <= value <= 1 / least:
        raise ValueError(f"{setting} {value} makes no usable probabilities; give {least:g} to {1 / least:g}")


def read(value: Any, kind: Any, *, text: bool = False) -> Any:
    """Return a value as its type, as `get_type_hints` gives it; `text` is of a command line, where all is a text."""
    if kind is Any:
        return value
    members = union_members(kind)
    if len(members) > 1:
        return _read_union(value, members, text)
    origin = get_origin(kind) or kind
    if origin is Literal:
        for allowed in get_args(kind):
            if value == allowed and isinstance(value, type(allowed)):
                return allowed
        raise WrongType(rule(kind))
    if is_dataclass(kind):
        return _read_fields(value, kind)
    try:
        return _READERS[origin][0](value, kind, text)
    except WrongType:
        raise
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise WrongType(rule(kind)) from None


def rule(kind: Any) -> str:
    """Return what a value of a type is, such as "a whole number or one of auto"."""
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    members = [member for member in union_members(kind) if member is not NoneType]
    if len(members) > 1:
        return " or ".join(dict.fromkeys(rule(member) for member in members))
    kind = members[0]
    if get_origin(kind) is tuple and Ellipsis not in get_args(kind):
        return f"a list of {len(get_args(kind))}"
    if (get_origin(kind) or kind) is tuple:
        return f"a list of {rule((get_args(kind) or (int,))[0]).partition(' ')[2]}s"
    return _READERS.get(get_origin(kind) or kind, _READERS[dict])[1]


def union_members(kind: Any) -> tuple[Any, ...]:
    """Return the types of a union; a type that is none is its own only member."""
    return get_args(kind) if isinstance(kind, UnionType) or get_origin(kind) is Union else (kind,)


def takes_none(kind: Any) -> bool:
    """Return whether None is a value of the type."""
    return NoneType in union_members(kind)


def takes_list(kind: Any) -> bool:
    """Return whether several values may follow a flag."""
    return any(get_origin(member) is list for member in union_members(kind))


@cache
def types_of(cls: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields."""
    hints: dict[str, Any] = {}
    with suppress(NameError):  # a class of somebody else's, whose types only a checker of types knows
        hints = get_type_hints(cls)
    return {field.name: hints.get(field.name, Any) for field in fields(cls)}


def default_of(field: Any) -> Any:
    """Return the default of a field; `MISSING` if it has none."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def _read_union(value: Any, members: tuple[Any, ...], text: bool) -> Any:
    if NoneType in members and (value is None or (text and str not in members and value.lower() == "none")):
        return None
    failures = []
    # A text can be anything, so it comes last.
    for member in sorted((m for m in members if m is not NoneType), key=lambda m: m is str):
        if get_origin(member) is list and str in members and not isinstance(value, list | tuple):
            continue
        try:
            return read(value, member, text=text)
        except WrongType as error:
            failures.append(str(error))
    raise WrongType(" or ".join(dict.fromkeys(failures)))


def _read_fields(value: Any, kind: Any) -> Any:
    if not isinstance(value, Mapping):
        raise WrongType("a mapping")
    kinds, found = types_of(kind), {}
    for name, one in value.items():
        if name not in kinds:
            near = nearest(str(name), kinds)
            raise ValueError(f"{shown(name)} is unknown" + (f"; did you mean {' or '.join(near)}?" if near else ""))
        try:
            found[name] = read(one, kinds[name])
        except WrongType as error:
            raise ValueError(f"{name} {shown(one)} is not {error}") from None
    if lacking := [f.name for f in fields(kind) if default_of(f) is MISSING and f.name not in found]:
        raise ValueError(f"{' and '.join(lacking)} must be given")
    return kind(**found)


def _plain(value: Any) -> Any:
    """Return a scalar of numpy or torch as a Python number."""
    return value.item() if hasattr(value, "item") else value


def _bool(value: Any, kind: Any, text: bool) -> bool:
    found = _BOOLEANS.get(value.lower()) if text else value
    if not isinstance(found, bool):
        raise WrongType(rule(kind))
    return found


def _int(value: Any, kind: Any, text: bool) -> int:
    if text:
        if short := re.fullmatch(r"(\d{1,9})([KkMm])", value):
            raise WrongType(f"{rule(kind)} (write {int(short[1]) * _THOUSANDS[short[2].upper()]})")
        value = int(value) if re.fullmatch(r"[+-]?\d[\d_]{0,30}", value) else None
    value = _plain(value)
    if isinstance(value, bool):  # which Python counts as a whole number
        raise WrongType(rule(kind))
    number = operator.index(value)
    if abs(number) > _LARGEST:
        raise WrongType("a whole number of 64 bits")
    return number


def _float(value: Any, kind: Any, text: bool) -> float:
    number = float(value) if text else _plain(value)
    if isinstance(number, bool) or not isinstance(number, int | float) or not abs(number) <= sys.float_info.max:
        raise WrongType(rule(kind))
    return number if abs(number) <= _LARGEST else float(number)  # torch takes no longer whole numbers


def _str(value: Any, kind: Any, text: bool) -> str:
    if not isinstance(value, str):
        raise WrongType("a text (put it in quotes)" if isinstance(value, int | float) else "a text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise WrongType("a text in UTF-8") from None
    if "\0" in value:
        raise WrongType("a text without NUL characters")
    return value


def _list(value: Any, kind: Any, text: bool) -> list[Any]:
    (member,) = get_args(kind) or (Any,)
    # One item may stand for itself.
    return [read(item, member, text=text) for item in (value if isinstance(value, list | tuple) else [value])]


def _tuple(value: Any, kind: Any, text: bool) -> tuple[Any, ...]:
    value = value.split(",") if text else value
    members = get_args(kind) or (int, Ellipsis)
    if not isinstance(value, list | tuple) or (Ellipsis not in members and len(value) != len(members)):
        raise WrongType(rule(kind))
    members = (members[0],) * len(value) if Ellipsis in members else members
    return tuple(read(item, member, text=text) for item, member in zip(value, members, strict=True))


def _dict(value: Any, kind: Any, text: bool) -> dict[str, Any]:
    names, member = get_args(kind) or (object, Any)
    if not isinstance(value, Mapping) or not all(isinstance(name, union_members(names)) for name in value):
        raise WrongType(rule(kind))
    return {name: read(item, member) for name, item in value.items()}


_READERS: dict[Any, tuple[Callable[[Any, Any, bool], Any], str]] = {
    bool: (_bool, "true or false"),
    int: (_int, "a whole number"),
    float: (_float, "a finite number"),
    str: (_str, "a text"),
    list: (_list, "a list"),
    tuple: (_tuple, "a list"),
    dict: (_dict, "a mapping"),
}
"""How a value of a type is read, and what messages say that it is."""
