"""One way to write a method, in every command: a name, options of its own, and what it changes in the policy.

    snapkv                              a scorer with its defaults
    snapkv:kernel=7,pooling=max         with options
    snapkv:window=8+prompt_end          with options, and a modifier of the policy
    locret+pyramid+linear               several modifiers
    h2o+2bit:rounding=token
    locret+recall:host_budget=512       a modifier with options: numbers of the policy that it is about
    quest+xattention:threshold=0.95     or options of what it names
    package.module:Class:power=2        a class that Python finds; its options follow a second colon
    methods/mine.py:Class               a class of a file

Several methods are separated by commas: a part that has an equals sign before any colon belongs to the method before
it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from locret.base.fields import shown
from locret.base.nearest import check_retired, nearest


@dataclass(frozen=True)
class Change:
    """What a modifier does to a policy."""

    fields: Mapping[str, Any]
    """Fields that it sets."""
    options: tuple[str, ...] = ()
    """Fields that may be given as its options."""
    of: str | None = None
    """The field that names something with options of its own (`NAME:OPTION=VALUE`); they too are written as the
    modifier's."""


MODIFIERS: Mapping[str, Change] = {
    "prompt_end": Change({"when": "prompt_end"}),
    "pyramid": Change({"layer_budgets": "pyramid"}, ("pyramid_beta",)),
    "head_shares": Change({"head_budgets": "shares"}),
    "adaptive_heads": Change({"head_budgets": "adaptive"}, ("head_floor",)),
    "linear": Change({"memory": "linear"}),
    "sqrt": Change({"memory": "sqrt"}),
    "square": Change({"memory": "square"}),
    "square_sqrt": Change({"memory": "square_sqrt"}),
    "adaptive": Change({"memory": "adaptive"}),
    "decremental": Change({"decremental": True}, ("min_chunk",)),
    "compact": Change({"positions": "compact"}),
    "original": Change({"positions": "original"}),
    "spaced": Change({"spacing": 16}, ("spacing",)),
    "diverse": Change({"diversity": 0.15}, ("diversity",)),
    "recall": Change({"recall": 8, "host_budget": 1024}, ("recall", "recall_by", "host_budget"), of="recall_by"),
    **{
        name: Change({"prefill_attention": name}, of="prefill_attention")
        for name in ("a_shape", "block_sparse", "minference", "vertical_slash", "xattention")
    },
    "loco": Change({"merge": "loco"}, of="merge"),
    **{
        f"{bits}bit": Change(
            {"key_bits": bits, "value_bits": bits},
            ("key_bits", "value_bits", "rounding", "exact_recent", "exact_layers"),
        )
        for bits in (8, 4, 3, 2)
    },
}
"""What may follow a method after a plus sign, and what it changes in the policy."""

_FILE = re.compile(r".*?\.py(?=:|$)")
# What follows the plus of a number such as 1e+3 is digits alone; what follows that of a modifier never is.
_PLUS = re.compile(r"\+(?!\d+(?![a-z\d]))")
_WORDS = {"true": True, "false": False, "none": None, "null": None}


@dataclass(frozen=True)
class Modifier:
    """A modifier as somebody wrote it; `str` gives its one spelling, without the plus."""

    name: str
    """In `MODIFIERS`."""
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def changes(self) -> dict[str, Any]:
        """What it changes in a policy."""
        change = MODIFIERS[self.name]
        changes = {**change.fields, **{name: value for name, value in self.options.items() if name in change.options}}
        inner = {name: value for name, value in self.options.items() if name not in change.options}
        if inner and change.of is not None:
            changes[change.of] = _spelling(str(changes[change.of]), inner)
        return changes

    def __str__(self) -> str:
        return _spelling(self.name, self.options)


@dataclass(frozen=True)
class MethodSpec:
    """A method as somebody wrote it; `str` gives the one spelling that records and tables use."""

    name: str
    """Of a method or scorer, `module:Class` or `file.py:Class`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Its own options."""
    modifiers: tuple[Modifier, ...] = ()

    @property
    def changes(self) -> dict[str, Any]:
        """What the modifiers change in a policy."""
        return {name: value for modifier in self.modifiers for name, value in modifier.changes.items()}

    def __str__(self) -> str:
        return "+".join([_spelling(self.name, self.options), *map(str, self.modifiers)])


def parse(method: str, where: str = "method") -> MethodSpec:
    """Return what a text says.

    Args:
        method: As the module's docstring shows.
        where: What messages call it, such as "method" or "scorer".

    Examples:
        >>> parse("snapkv:kernel=7,pooling=max+prompt_end").options
        {'kernel': 7, 'pooling': 'max'}
    """
    if not isinstance(method, str):
        raise ValueError(f"{where} {shown(method)} is not a text; write it like snapkv:kernel=7")
    if not method.isprintable():
        raise ValueError(f"{where} {shown(method)} has characters that are not printed; write it like snapkv:kernel=7")
    text = method.strip()
    path = _FILE.match(text)
    start = path.end() if path else 0
    head, *modifiers = _PLUS.split(text[start:])
    name, given = _named(text[:start] + head, start)
    if not name:
        raise ValueError(
            f'{where} "{text}" is not NAME, NAME:OPTION=VALUE or MODULE:CLASS; write it like snapkv:kernel=7'
        )
    where = f'{where} "{text}"'
    found, by = list[Modifier](), dict[str, str]()
    for one in modifiers:
        modifier = _modifier(one, where)
        for changed in modifier.changes:
            if changed in by:
                raise ValueError(f"{where}: +{by[changed]} and +{modifier.name} both set {changed}; drop one of them")
            by[changed] = modifier.name
        found.append(modifier)
    return MethodSpec(name, _options(given, where), tuple(found))


def split(methods: str | Sequence[str]) -> list[str]:
    """Return the methods of `a,b:c=1,d=2` or of a list, without repeats; empty parts are left out.

    A part with an equals sign before any colon is an option of the method before it.
    """
    found: list[str] = []
    for part in methods.split(",") if isinstance(methods, str) else methods:
        text = part.strip()
        if "=" in text.partition(":")[0] and found:
            # In a list, or after a modifier, an option cannot be meant for anything else either.
            found[-1] = f"{found[-1]},{text}"
        elif text:
            found.append(text)
    return list(dict.fromkeys(found))


def _named(text: str, start: int = 0) -> tuple[str, str]:
    """Return the name (empty if there is none) and the options of `NAME:OPTION=VALUE`, both as they are written.

    Args:
        text: What is written.
        start: Characters of a file's path in front, whose colons mean nothing.
    """
    pieces = [text[:start], *text[start:].split(":")[1:]] if start else text.split(":")
    pieces = [piece.strip() for piece in pieces]
    names = list(takewhile(lambda piece: "=" not in piece, pieces))
    if not all(names) or not names or len(names) > 2:
        return "", ""
    return ":".join(names), ":".join(pieces[len(names) :])


def _options(given: str, where: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for part in given.split(",") if given else []:
        option, equals, value = (side.strip() for side in part.partition("="))
        if not option or not equals or not value:
            raise ValueError(f'{where}: "{part}" is not an option; write OPTION=VALUE, such as kernel=7')
        if option in options:
            raise ValueError(f"{where} has the option {option} twice; drop one of them")
        options[option] = _value(value)
    return options


def _modifier(text: str, where: str) -> Modifier:
    """Return a modifier; the options of what it names are written as its own, or behind that name's colon."""
    name, colon, given = text.partition(":")
    name = name.strip()
    if name not in MODIFIERS:
        check_retired("modifier", f"+{name}")
        near = nearest(name, MODIFIERS) or list(MODIFIERS)
        raise ValueError(f"{where}: +{name} is unknown; did you mean +{' or +'.join(near)}?")
    if colon and not given.strip():
        raise ValueError(f"{where}: +{name}: has no option after the colon; write +{name}:OPTION=VALUE, or drop it")
    change, options = MODIFIERS[name], _options(given, where)
    named = None if change.of is None else options.get(change.of, change.fields.get(change.of))
    if named is None and (unknown := [option for option in options if option not in change.options]):
        others = f"its options are {', '.join(change.options)}" if change.options else "it has none"
        raise ValueError(
            f"{where}: +{name} has no option {unknown[0]} ({others}); options of the method itself come before the "
            "plus, NAME:OPTION=VALUE+MODIFIER"
        )
    return Modifier(name, options)


def _value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _spelling(name: str, options: Mapping[str, Any]) -> str:
    texts = (str(value).lower() if isinstance(value, bool | None) else str(value) for value in options.values())
    written = ",".join(map("=".join, zip(options, texts, strict=True)))
    return f"{name}{',' if '=' in name else ':'}{written}" if written else name
