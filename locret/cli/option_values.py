"""Values of options, as texts of a command line and as data of a recipe, read as the types that fields declare."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from locret.base.nearest import nearest
from locret.cli import recipes

_LARGEST = 2**63 - 1
"""What PyTorch and the operating system can count to."""
_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_THOUSANDS = {"K": 1024, "M": 1024**2}
"""What people mean by a letter behind a number of units or tokens."""
_SHOWN = 80
"""Characters of a value that a message repeats."""


class WrongType(ValueError):
    """A value that is not of its option's type; the text says what it must be."""


def read(value: Any, kind: Any, *, text: bool) -> Any:
    """Return a value as its type.

    Args:
        value: What was given.
        kind: The type, as `get_type_hints` gives it: scalars, `Literal`, lists, tuples, mappings, dataclasses, unions.
        text: Whether it comes from the command line, where everything is a text.

    Raises:
        WrongType: If it is not of that type.
        ValueError: Where a dataclass refuses its values.
    """
    if kind is Any:
        return recipes.scalar(value) if text else value
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
        return _read_fields(value, kind, text)
    if origin in _READERS:
        return _READERS[origin](value, kind, text)
    raise TypeError(f"options of the type {kind} cannot be read")


def rule(kind: Any) -> str:
    """Return what a value of a type is, such as "a whole number or one of auto"."""
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    members = [member for member in union_members(kind) if member is not NoneType]
    if len(members) > 1:
        return " or ".join(dict.fromkeys(rule(member) for member in members))
    origin = get_origin(members[0]) or members[0]
    return "a mapping" if is_dataclass(origin) else _RULES.get(origin, "such a value")


def union_members(kind: Any) -> tuple[Any, ...]:
    """Return the types of a union; a type that is none is its own only member."""
    return get_args(kind) if isinstance(kind, UnionType) or get_origin(kind) is Union else (kind,)


def takes_none(kind: Any) -> bool:
    """Return whether None is a value of the type."""
    return NoneType in union_members(kind)


def takes_list(kind: Any) -> bool:
    """Return whether several values may follow a flag."""
    return any(get_origin(member) is list for member in union_members(kind))


def adds_up(kind: Any) -> bool:
    """Return whether a flag may be given several times: one that could also be a text such as a,b is replaced."""
    return takes_list(kind) and str not in union_members(kind)


def shown(value: Any) -> str:
    """Return a value for a message: on one line, and not longer than helps."""
    text = value if isinstance(value, str) else repr(value)
    line = re.sub(r"\s+", " ", text.encode(errors="backslashreplace").decode())
    return line if len(line) <= _SHOWN else line[:_SHOWN] + "..."


@cache
def types_of(cls: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


def default_of(field: Any) -> Any:
    """Return the default of a field; `MISSING` if it has none."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def _read_union(value: Any, members: tuple[Any, ...], text: bool) -> Any:
    if NoneType in members and (value is None or (text and str not in members and value.lower() == "none")):
        return None
    failures = []
    # A text can be anything, so it comes last.
    for member in sorted((m for m in members if m is not NoneType), key=lambda m: m is str):
        single = not value.startswith("[") if text else not isinstance(value, list | tuple)
        if get_origin(member) is list and single and str in members:
            continue
        try:
            return read(value, member, text=text)
        except WrongType as error:
            failures.append(str(error))
    raise WrongType(" or ".join(dict.fromkeys(failures)))


def _read_fields(value: Any, kind: Any, text: bool) -> Any:
    value = recipes.scalar(value) if text else value
    if not isinstance(value, Mapping):
        raise WrongType("a mapping")
    kinds, found = types_of(kind), {}
    for name, one in value.items():
        if name not in kinds:
            raise ValueError(unknown_key(str(name), kinds))
        try:
            found[name] = read(one, kinds[name], text=False)
        except WrongType as error:
            raise ValueError(f"{name} {shown(one)} is not {error}") from None
    lacking = [f.name for f in fields(kind) if default_of(f) is MISSING and f.name not in found]
    if lacking:
        raise ValueError(f"{' and '.join(lacking)} must be given")
    return kind(**found)


def unknown_key(name: str, known: Any) -> str:
    """Return the refusal of a key, with those that it may stand for."""
    near = nearest(name, known)
    return f"{shown(name)} is unknown" + (f"; did you mean {' or '.join(near)}?" if near else "")


def _bool(value: Any, kind: Any, text: bool) -> bool:
    found = _BOOLEANS.get(value.lower()) if text else value
    if not isinstance(found, bool):
        raise WrongType(rule(kind))
    return found


def _int(value: Any, kind: Any, text: bool) -> int:
    if text and re.fullmatch(r"[+-]?\d[\d_]{0,30}", value):
        value = int(value)
    if text and isinstance(value, str) and (short := re.fullmatch(r"(\d{1,9})([KkMm])", value)):
        raise WrongType(f"{rule(kind)} (write {int(short[1]) * _THOUSANDS[short[2].upper()]})")
    if not isinstance(value, int) or isinstance(value, bool):
        raise WrongType(rule(kind))
    if abs(value) > _LARGEST:
        raise WrongType("a whole number of 64 bits")
    return value


def _float(value: Any, kind: Any, text: bool) -> float:
    try:
        number = math.nan if isinstance(value, bool | str) and not text else float(value)
    except (TypeError, ValueError, OverflowError):
        raise WrongType(rule(kind)) from None
    if not math.isfinite(number):
        raise WrongType(rule(kind))
    return number


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
    if text and value.startswith("["):
        value, text = recipes.scalar(value), False
    (member,) = get_args(kind) or (Any,)
    # One item may stand for itself.
    return [read(item, member, text=text) for item in (value if isinstance(value, list | tuple) else [value])]


def _tuple(value: Any, kind: Any, text: bool) -> tuple[Any, ...]:
    if text:
        value = recipes.scalar(value) if value.startswith("[") else value.split(",")
        text = bool(value) and isinstance(value, list) and all(isinstance(item, str) for item in value)
    members = get_args(kind)
    if not isinstance(value, list | tuple) or (Ellipsis not in members and len(value) != len(members)):
        raise WrongType(f"a list of {len(members)}")
    members = (members[0],) * len(value) if Ellipsis in members else members
    return tuple(read(item, member, text=text) for item, member in zip(value, members, strict=True))


def _dict(value: Any, kind: Any, text: bool) -> dict[str, Any]:
    value = recipes.scalar(value) if text else value
    names, member = get_args(kind) or (str, Any)
    if not isinstance(value, Mapping) or not all(isinstance(name, union_members(names)) for name in value):
        raise WrongType(rule(kind))
    return {name: read(item, member, text=False) for name, item in value.items()}


_READERS: dict[Any, Any] = {
    bool: _bool,
    int: _int,
    float: _float,
    str: _str,
    list: _list,
    tuple: _tuple,
    dict: _dict,
}
_RULES: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "a text",
    list: "a list",
    tuple: "a list",
    dict: "a mapping",
}
