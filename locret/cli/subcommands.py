"""Commands that begin with a word of their own, each with its options: which was meant, and help."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from locret._version import __version__
from locret.base.nearest import check_retired, nearest
from locret.cli import command as cli
from locret.cli.options import typed


@dataclass(frozen=True, kw_only=True)
class Subcommand:
    """What one word does."""

    about: str
    """One sentence."""
    classes: tuple[type, ...]
    """Dataclasses whose fields are its options."""
    words: str
    """The option whose values may be written first, without its flag."""
    act: Callable[..., int]
    """Takes an instance of each class, and the names that the user gave; returns the exit code."""


def run_subcommand(prog: str, commands: Mapping[str, Subcommand], argv: Sequence[str] | None) -> int:
    """Do what a command line says, and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name, rest = chosen(prog, {name: one.about for name, one in commands.items()}, arguments)
    one = commands[name]
    line = with_flag(rest, "--" + one.words.replace("_", "-"))
    instances, given = cli.parse_options(f"{prog} {name}", one.about, one.classes, line)
    return one.act(*instances, frozenset(given))


def chosen(prog: str, about: Mapping[str, str], arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Return the word that a command line begins with, and what follows.

    Args:
        prog: Name of the command.
        about: What each word does.
        arguments: The command line.
    """
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help", "help"):
        sys.stdout.write(listing(prog, about))
        raise SystemExit(0)
    if name == "--version":
        sys.stdout.write(f"{prog} {__version__}\n")
        raise SystemExit(0)
    if name not in about:
        check_retired(prog, name)
        near = nearest(name, about)
        hint = f"did you mean {' or '.join(near)}?" if near else f"`{prog}` lists all"
        raise ValueError(f"there is no command {typed(name)!r}; {hint}")
    return name, rest


def listing(prog: str, about: Mapping[str, str]) -> str:
    """Return the help that lists all words."""
    width = max(map(len, about))
    lines = [f"  {prog} {name:<{width}}  {text[:1].lower()}{text[1:].rstrip('.')}" for name, text in about.items()]
    usage = f"usage: {prog} COMMAND [--OPTION VALUE ...]"
    return "\n".join([usage, "", *lines, "", f"{prog} COMMAND --help lists its options.", ""])


def with_flag(arguments: list[str], flag: str) -> list[str]:
    """Put a flag before the values that are written first."""
    count = next((at for at, word in enumerate(arguments) if word.startswith("-") and word != "-"), len(arguments))
    if not count:
        return arguments
    if flag in {word.partition("=")[0].replace("_", "-") for word in arguments[count:]}:
        raise ValueError(f"{arguments[0]} and {flag} set the same; drop one of them")
    return [flag, *arguments]
