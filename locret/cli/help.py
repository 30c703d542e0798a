"""Help of a command, from its dataclasses: the string under a field is the option's help."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import MISSING
from typing import Any, Literal, get_args, get_origin

from locret.base.fields import union_members
from locret.cli.options import ALIASES, Option, flag_of

_METAVARS = {int: "N", float: "X", str: "TEXT", bool: "true|false", list: "A,B", tuple: "A,B"}


def text(
    options: Mapping[str, Option], prog: str, description: str, classes: Sequence[type], *, everything: bool = False
) -> str:
    """Return what `--help` prints: the usual options, or all of them."""
    shown = {name: one for name, one in options.items() if everything or is_usual(one)}
    usage = f"{prog} [--config RECIPE] [--OPTION VALUE ...]"
    parser = argparse.ArgumentParser(prog, usage, description, add_help=False, formatter_class=_Formatter)
    general = parser.add_argument_group("recipe and help")
    general.add_argument("-h", "--help", action="store_true", help="Show this text, with `all` every option, and stop.")
    general.add_argument("--version", action="store_true", help="Show the version and stop.")
    general.add_argument("--config", metavar="RECIPE", help="YAML file of options; flags override it.")
    general.add_argument(
        "--print-config", action="store_true", help="Print a recipe of what was given, with all defaults, and stop."
    )
    for cls in classes:
        title = (cls.__doc__ or "").strip().splitlines()[0].rstrip(".")
        group = parser.add_argument_group(title[:1].lower() + title[1:])
        for option in shown.values():
            if option.owner is cls:
                _add(group, option, shown)
    left_out = len(options) - len(shown)
    more = f"\n--help all lists {left_out} more options.\n" if left_out else ""
    return parser.format_help() + more


def is_usual(option: Option) -> bool:
    """Return whether the short help shows an option: the class that declares its field says so, or says nothing."""
    declaring = next(cls for cls in option.owner.__mro__ if option.name in cls.__dict__.get("__annotations__", {}))
    usual = declaring.__dict__.get("usual")
    return usual is None or option.name in usual or option.default is MISSING


class _Formatter(argparse.HelpFormatter):
    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


def _add(group: Any, option: Option, options: Mapping[str, Option]) -> None:
    members = [kind for kind in union_members(option.kind) if kind is not type(None)]
    settings: dict[str, Any] = {"action": "store_true"} if members == [bool] else {"metavar": _metavar(members)}
    if len(members) == 1 and get_origin(members[0]) is Literal:
        settings["choices"] = [str(value) for value in get_args(members[0])]
    parts = ["required"] if option.default is MISSING else []
    value = option.default
    if value not in (MISSING, None, "", False, [], {}) and not hasattr(value, "__dataclass_fields__"):
        parts.append("default: " + (",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)))
    if others := [name for name in ALIASES.get(option.name, ()) if name not in options]:
        parts.append("also " + ", ".join(map(flag_of, others)))
    about = f"{option.help} ({'; '.join(parts)})" if parts else option.help
    group.add_argument(flag_of(option.name), help=about.replace("%", "%%"), **settings)


def _metavar(members: Sequence[Any]) -> str:
    if list(members) == [list[str]]:  # a text that stands for a list is a list
        return "TEXT"
    names = [
        "|".join(map(str, get_args(kind)))
        if get_origin(kind) is Literal
        else _METAVARS.get(get_origin(kind) or kind, "MAPPING")
        for kind in members
    ]
    shown = dict.fromkeys(name for name in names if not (name == "TEXT" and ("A,B" in names or "N" in names)))
    return "|".join(shown)
