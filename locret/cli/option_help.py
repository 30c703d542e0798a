"""Help and shell completion of a command, from its dataclasses: the string under a field is the option's help."""

from __future__ import annotations

import argparse
import ast
import inspect
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING
from functools import cache
from typing import Any, Literal, get_args, get_origin

from locret.cli import ecosystem_names
from locret.cli.option_values import union_members

SHELLS = ("bash", "zsh", "tcsh")
_FILES = ("config", "model", "adapter", "heads", "dataset", "output", "picture", "init_from")
_FILE_ENDINGS = ("_file", "_dir", "context", "questions")


def text(parser_options: Mapping[str, Any], prog: str, description: str, classes: Sequence[type]) -> str:
    """Return what `--help` prints."""
    return _parser(parser_options, prog, description, classes).format_help()


def completion(
    parser_options: Mapping[str, Any], prog: str, description: str, classes: Sequence[type], shell: str
) -> str:
    """Return a script that completes the command's options in a shell.

    Raises:
        ValueError: For another shell.
    """
    return _completed(_parser(parser_options, prog, description, classes), shell)


def completion_of_all(prog: str, subcommands: Mapping[str, tuple[Any, ...]], shell: str) -> str:
    """Return a script that completes a command's words, and the options of each.

    Args:
        prog: Name of the command.
        subcommands: By their words, the arguments of `text` for each.
        shell: One of `SHELLS`.

    Raises:
        ValueError: For another shell.
    """
    parser = argparse.ArgumentParser(prog)
    words = parser.add_subparsers()
    for name, parts in subcommands.items():
        words.add_parser(name, help=parts[2], parents=[_parser(*parts)], add_help=False)
    return _completed(parser, shell)


def _completed(parser: argparse.ArgumentParser, shell: str) -> str:
    if shell not in SHELLS:
        raise ValueError(f"--print-completion {shell} is unknown; choose one of {', '.join(SHELLS)}")
    import shtab

    return str(shtab.complete(parser, shell=shell))


@cache
def field_docs(cls: type) -> dict[str, str]:
    """Return the string under each field of a dataclass and its bases, on one line."""
    found = {}
    for one in reversed(cls.__mro__):
        tree = None
        with suppress(OSError, TypeError, SyntaxError):  # builtins, and where there are no sources
            tree = ast.parse(textwrap.dedent(inspect.getsource(one))).body[0]
        body = getattr(tree, "body", [])
        for field, below in zip(body, body[1:], strict=False):
            named = isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            if named and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                found[field.target.id] = " ".join(str(below.value.value).split())
    return found


class _Formatter(argparse.HelpFormatter):
    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


def _parser(
    options: Mapping[str, Any], prog: str, description: str, classes: Sequence[type]
) -> argparse.ArgumentParser:
    usage = f"{prog} [--config RECIPE] [--OPTION VALUE ...]"
    parser = argparse.ArgumentParser(prog, usage, description, add_help=False, formatter_class=_Formatter)
    general = parser.add_argument_group("recipe and help")
    general.add_argument("-h", "--help", action="store_true", help="Show this text and stop.")
    general.add_argument("--version", action="store_true", help="Show the version and stop.")
    recipe = general.add_argument("--config", metavar="RECIPE", help="YAML file of options; flags override it.")
    recipe.complete = _shtab_file()  # type: ignore[attr-defined]
    general.add_argument(
        "--print-config", action="store_true", help="Print a recipe of what was given, with all defaults, and stop."
    )
    general.add_argument(
        "--print-completion", metavar="SHELL", choices=SHELLS, help=f"Print a script for {', '.join(SHELLS)} and stop."
    )
    for cls in classes:
        title = (cls.__doc__ or "").strip().splitlines()[0].rstrip(".")
        group = parser.add_argument_group(title[:1].lower() + title[1:])
        for option in options.values():
            if option.owner is cls:
                _add(group, option, options)
    return parser


def _add(group: Any, option: Any, options: Mapping[str, Any]) -> None:
    members = [kind for kind in union_members(option.kind) if kind is not type(None)]
    if members == [bool]:
        settings: dict[str, Any] = {"action": "store_true"}
    else:
        settings = {"metavar": _metavar(members)}
        if len(members) == 1 and get_origin(members[0]) is Literal:
            settings["choices"] = [str(value) for value in get_args(members[0])]
    action = group.add_argument(option.flag, help=_help(option, options).replace("%", "%%"), **settings)
    if option.name in _FILES or option.name.endswith(_FILE_ENDINGS):
        action.complete = _shtab_file()


def _help(option: Any, options: Mapping[str, Any]) -> str:
    parts = []
    if option.default is MISSING:
        parts.append("required")
    elif option.default not in (None, "", False, [], {}) and not hasattr(option.default, "__dataclass_fields__"):
        value = option.default
        parts.append("default: " + (",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)))
    if others := ecosystem_names.others(option.name, options):
        parts.append("also " + ", ".join("--" + name.replace("_", "-") for name in others))
    return f"{option.help} ({'; '.join(parts)})" if parts else option.help


def _metavar(members: Sequence[Any]) -> str:
    names = []
    for kind in members:
        if get_origin(kind) is Literal:
            names.append("|".join(map(str, get_args(kind))))
        else:
            origin = get_origin(kind) or kind
            names.append(
                {int: "N", float: "X", str: "TEXT", bool: "true|false", list: "A,B", tuple: "A,B"}.get(
                    origin, "MAPPING"
                )
            )
    # A text that stands for a list is a list.
    if list(members) == [list[str]]:
        return "TEXT"
    shown = dict.fromkeys(name for name in names if not (name == "TEXT" and ("A,B" in names or "N" in names)))
    return "|".join(shown)


def _shtab_file() -> dict[str, str]:
    # What shtab.FILE is, without importing it for every help.
    return {"bash": "_shtab_compgen_files", "zsh": "_files", "tcsh": "f"}
