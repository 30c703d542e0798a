"""One way to read a command line: flags are the fields of dataclasses, `--config` reads a recipe, flags override it.

Only this module knows the parser. A dataclass field is the home of an option's default, and the string under the field
its help text. Exit codes: 0 fine, 1 failed, 2 the user must change something, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from locret import shipped

USAGE_ERROR, FAILURE, INTERRUPTED = 2, 1, 130


def parse_options(
    prog: str, description: str, option_classes: Sequence[type], argv: Sequence[str] | None = None
) -> tuple[list[Any], set[str]]:
    """Read the command line (and the YAML file named by `--config`) into one instance per dataclass.

    Args:
        prog: Name of the command, for `--help`.
        description: One sentence, for `--help`.
        option_classes: Dataclasses whose fields become flags, `--like-this` or `--like_this`.
        argv: Arguments; those of the process if None.

    Returns:
        The instances in the order of `option_classes`, and the names the user set (on the command line or in YAML).

    Raises:
        SystemExit: With code 2 for an unknown flag, an unknown YAML key or a value of the wrong type.
        ValueError: Where a dataclass refuses its values.
    """
    from jsonargparse import ArgumentParser, set_parsing_settings

    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(prog=prog, description=description)
    parser.add_argument("--config", action="config", help="YAML recipe; flags after it override it")
    for cls in option_classes:
        parser.add_class_arguments(cls)
    switches = {"--" + f.name for cls in option_classes for f in fields(cls) if f.type in (bool, "bool")}
    lists = {
        "--" + f.name
        for cls in option_classes
        for f in fields(cls)
        if f.type in (list[str], "list[str]") and f.default_factory is list  # what is given adds to the default
    }
    arguments = _normalised(list(sys.argv[1:] if argv is None else argv), switches, lists)
    parsed = parser.parse_args(arguments)
    chosen = {name for name in vars(parser.parse_args(arguments, defaults=False)) if name != "config"}
    instances = [cls(**{f.name: parsed[f.name] for f in fields(cls)}) for cls in option_classes]
    return instances, chosen


def run(main: Callable[[Sequence[str] | None], int | None], argv: Sequence[str] | None = None) -> None:
    """Call a command and leave the process with its exit code; a user's mistake is one line, without a traceback."""
    prog = os.path.basename(sys.argv[0]) if sys.argv else "locret"
    try:
        code = main(argv)
    except ValueError as error:
        sys.exit(_complain(prog, error, USAGE_ERROR))
    except OSError as error:
        sys.exit(_complain(prog, error, FAILURE))
    except KeyboardInterrupt:
        sys.exit(_complain(prog, "interrupted", INTERRUPTED))
    sys.exit(code or 0)


def print_json(record: dict[str, Any]) -> None:
    """Write one JSON object to standard output; logs and progress go to standard error."""
    sys.stdout.write(json.dumps(record, ensure_ascii=False) + "\n")


@contextmanager
def warnings_as_lines(prog: str, *, quiet: bool) -> Iterator[None]:
    """Show each warning as one line on standard error, or none; hide transformers' bars where nobody watches."""
    from transformers.utils import logging

    def show(message: Warning | str, *_: object, **__: object) -> None:
        sys.stderr.write(f"{prog}: warning: {message}\n")

    if quiet or not sys.stderr.isatty():
        logging.disable_progress_bar()
    if quiet:
        logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.showwarning = show
        warnings.simplefilter("ignore" if quiet else "default")
        for category in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", category)
        yield


def _normalised(arguments: list[str], switches: set[str], lists: set[str]) -> list[str]:
    """Accept `--like-this`, a bare `--switch`, a list's flag given again for one more, and shipped recipes anywhere."""
    result = []
    for index, argument in enumerate(arguments):
        if index and arguments[index - 1] == "--config":
            argument = shipped.find(argument)
        elif argument.startswith("--"):
            name, equals, value = argument.partition("=")
            value = shipped.find(value) if name == "--config" else value
            name = "--" + name[2:].replace("-", "_")
            following = arguments[index + 1] if index + 1 < len(arguments) else ""
            whole = (value if equals else following).startswith("[")
            argument = name + ("+" if name in lists and not whole else "") + equals + value
            if argument in switches and following.lower() not in ("true", "false"):
                argument += "=true"
        result.append(argument)
    return result


def _complain(prog: str, error: object, code: int) -> int:
    sys.stderr.write(f"{prog}: {error}\n")
    return code
