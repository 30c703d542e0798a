"""One way to write a method, in every command: a name, options of its own, and what it changes in the policy.

    snapkv                              a scorer with its defaults
    snapkv:kernel=7,pooling=max         with options
    snapkv:window=8+prompt_end          with options, and a modifier of the policy
    locret+pyramid+linear               several modifiers
    package.module:Class:power=2        a class that Python finds; its options follow a second colon
    methods/mine.py:Class               a class of a file

In YAML a method with options may also be a mapping, `{snapkv+prompt_end: {kernel: 7, pooling: max}}`. Several methods
are separated by commas: a part that has an equals sign before any colon belongs to the method before it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from locret.field_values import shown
from locret.nearest import nearest

MODIFIERS: Mapping[str, Mapping[str, Any]] = {
    "prompt_end": {"when": "prompt_end"},
    "pyramid": {"layer_budgets": "pyramid"},
    "adaptive_heads": {"head_budgets": "adaptive"},
    "linear": {"memory": "linear"},
    "sqrt": {"memory": "sqrt"},
    "square": {"memory": "square"},
    "square_sqrt": {"memory": "square_sqrt"},
    "adaptive": {"memory": "adaptive"},
    "decremental": {"decremental": True},
    "compact": {"positions": "compact"},
    "original": {"positions": "original"},
}
"""What may follow a method after a plus sign, and what it changes in the policy."""

_FILE = re.compile(r".*?\.py(?=:|$)")
_PLUS = re.compile(r"\+(?!\d)")
_WORDS = {"true": True, "false": False, "none": None, "null": None}


@dataclass(frozen=True)
class MethodSpec:
    """A method as somebody wrote it; `str` gives the one spelling that records and tables use."""

    name: str
    """Of a method or scorer, `module:Class` or `file.py:Class`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Its own options."""
    modifiers: tuple[str, ...] = ()
    """Names in `MODIFIERS`."""

    @property
    def changes(self) -> dict[str, Any]:
        """What the modifiers change in a policy."""
        return {name: value for modifier in self.modifiers for name, value in MODIFIERS[modifier].items()}

    def __str__(self) -> str:
        options = ",".join(f"{name}={_text(value)}" for name, value in self.options.items())
        return "+".join([f"{self.name}:{options}" if options else self.name, *self.modifiers])


def parse(method: str | Mapping[str, Any] | MethodSpec, where: str = "method") -> MethodSpec:
    """Return what a text or a mapping of YAML says.

    Args:
        method: As the module's docstring shows.
        where: What messages call it, such as "method" or "scorer".

    Raises:
        ValueError: If it is not written like that, a modifier is unknown, or two of them contradict each other.

    Examples:
        >>> parse("snapkv:kernel=7,pooling=max+prompt_end").options
        {'kernel': 7, 'pooling': 'max'}
    """
    if isinstance(method, MethodSpec):
        return method
    if isinstance(method, Mapping):
        spec = _from_mapping(method, where)
    elif isinstance(method, str):
        spec = _from_text(method.strip(), where)
    else:
        raise ValueError(f"{where} {shown(method)} is neither a name nor a mapping; write it like snapkv:kernel=7")
    _check_modifiers(spec, where)
    return spec


def split(methods: str | Sequence[Any]) -> list[Any]:
    """Return the methods of `a,b:c=1,d=2` or of a list, without repeats; empty parts are left out.

    A part with an equals sign before any colon is an option of the method before it.
    """
    parts = methods.split(",") if isinstance(methods, str) else methods
    found: list[Any] = []
    for part in parts:
        text = part.strip() if isinstance(part, str) else part
        if isinstance(text, str) and "=" in text.partition(":")[0] and found and isinstance(found[-1], str):
            # In a list, or after a modifier, an option cannot be meant for anything else either.
            found[-1] = f"{found[-1]},{text}"
        elif text:
            found.append(text)
    return [one for nth, one in enumerate(found) if one not in found[:nth]]


def file_name(method: str) -> str:
    """Return a method's spelling as part of a file's name."""
    return re.sub(r"[^\w.+=-]+", "-", method)


def _from_text(text: str, where: str) -> MethodSpec:
    if not text.isprintable():
        raise ValueError(f"{where} {shown(text)} has characters that are not printed; write it like snapkv:kernel=7")
    path = _FILE.match(text)
    start = path.end() if path else 0
    head, *modifiers = _PLUS.split(text[start:])
    pieces = [text[:start], *head.split(":")[1:]] if path else head.split(":")
    pieces = [piece.strip() for piece in pieces]
    names = list(takewhile(lambda piece: "=" not in piece, pieces))
    name, given = ":".join(names), ":".join(pieces[len(names) :])
    if not all(names) or not names or len(names) > 2:
        raise ValueError(
            f'{where} "{text}" is not NAME, NAME:OPTION=VALUE or MODULE:CLASS; write it like snapkv:kernel=7'
        )
    options: dict[str, Any] = {}
    for part in given.split(",") if given else []:
        option, equals, value = (side.strip() for side in part.partition("="))
        if not option or not equals or not value:
            raise ValueError(f'{where} "{text}": "{part}" is not an option; write OPTION=VALUE, such as kernel=7')
        if option in options:
            raise ValueError(f'{where} "{text}" has the option {option} twice; drop one of them')
        options[option] = _value(value)
    return MethodSpec(name, options, tuple(modifiers))


def _from_mapping(method: Mapping[str, Any], where: str) -> MethodSpec:
    if len(method) != 1 or not isinstance(next(iter(method)), str):
        raise ValueError(
            f"{where} {shown(dict(method))} is not one method with its options; write {{snapkv: {{kernel: 7}}}}"
        )
    ((text, options),) = method.items()
    spec = _from_text(text.strip(), where)
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise ValueError(f'{where} "{text}" has {shown(options)} for options; write {{snapkv: {{kernel: 7}}}}')
    for name, value in options.items():
        if name in spec.options:
            raise ValueError(f'{where} "{text}" has the option {name} twice; drop one of them')
        if not isinstance(value, str | int | float | None) or (isinstance(value, str) and not _writable(value)):
            raise ValueError(
                f'{where} "{text}": {name}={shown(value)} cannot be written after a colon; give a number, a word, '
                "true or false"
            )
    return MethodSpec(spec.name, {**spec.options, **options}, spec.modifiers)


def _check_modifiers(spec: MethodSpec, where: str) -> None:
    by: dict[str, str] = {}
    for modifier in spec.modifiers:
        if modifier not in MODIFIERS:
            if modifier.partition(":")[0] in MODIFIERS:
                raise ValueError(f'{where} "{spec}": options come before +; write NAME:OPTION=VALUE+MODIFIER')
            near = nearest(modifier, MODIFIERS) or list(MODIFIERS)
            raise ValueError(f'{where} "{spec}": +{modifier} is unknown; did you mean +{" or +".join(near)}?')
        for changed in MODIFIERS[modifier]:
            if changed in by:
                raise ValueError(
                    f'{where} "{spec}": +{by[changed]} and +{modifier} both set {changed}; drop one of them'
                )
            by[changed] = modifier


def _value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _text(value: Any) -> str:
    return (
        {True: "true", False: "false", None: "none"}[value] if value is None or isinstance(value, bool) else str(value)
    )


def _writable(text: str) -> bool:
    """Return whether a string is read back as itself."""
    return bool(text) and text == text.strip() and "," not in text and not _PLUS.search(text) and _value(text) == text
