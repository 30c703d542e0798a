"""What all commands share: options from a command line, refusals in one line, exit codes, output.

Exit codes: 0 fine, 1 failed, 2 the user must change something, 130 and 143 interrupted.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from errno import ENOSPC
from logging import ERROR, LogRecord, getLogger
from typing import Any, NoReturn

from locret._version import __version__
from locret.base import interrupts
from locret.base.fields import Refusal
from locret.base.nearest import check_retired, nearest
from locret.base.warned import Note
from locret.cli import options as read
from locret.cli.options import typed

USAGE_ERROR, FAILURE = 2, 1
_LONGEST_MESSAGE = 2000
LINES_EVERY = 10.0
"""Seconds between two lines about progress where nobody sees a bar."""
_CHATTY = ("bitsandbytes", "accelerate.big_modeling")
"""Loggers that warn of what was asked for: the first at every int8 product, the second of weights on disk."""


def parse_options(
    prog: str, description: str, option_classes: Sequence[type], argv: Sequence[str] | None = None
) -> tuple[list[Any], set[str]]:
    """Read the command line (and the YAML file named by `--config`) into one instance per dataclass.

    Returns:
        The instances in the order of `option_classes`, and the names the user set (on the command line or in YAML).

    Raises:
        SystemExit: With code 0 once `--help`, `--version` or `--print-config` has been answered.
        ValueError: For an unknown flag or key, a value of the wrong type, or one that a dataclass refuses.
    """
    options = read.options_of(option_classes)
    line = read.CommandLine(options, list(sys.argv[1:] if argv is None else argv))
    if "help" in line.asked:
        from locret.cli import help as shown  # argparse, which a run does not need

        _leave(shown.text(options, prog, description, option_classes, everything=line.asked["help"] == "all"))
    if "version" in line.asked:
        _leave(f"{prog} {__version__}\n")
    values = read.values_of(options, read.merged(line, option_classes))
    printing = "print_config" in line.asked
    instances = [] if printing and read.lacking(options, values) else read.instances(option_classes, options, values)
    if printing:
        _leave(read.as_recipe(options, values))
    return instances, set(values)


def _leave(text: str) -> NoReturn:
    sys.stdout.write(text)
    raise SystemExit(0)


def run(
    main: Callable[[Sequence[str] | None], int | None], argv: Sequence[str] | None = None, *, prog: str | None = None
) -> None:
    """Call a command and leave the process with its exit code; a user's mistake is one line, without a traceback."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    prog = prog or (module.name if module else os.path.basename(sys.argv[0]))
    interrupts.answer(prog)
    code: int | str | None
    try:
        try:
            code = main(argv)
        except SystemExit as end:
            code = end.code
        if sys.stdout is not None:
            sys.stdout.flush()
    except ValueError as error:
        code = _complain(prog, error, USAGE_ERROR)
    except OSError as error:
        full = error.errno == ENOSPC and error.filename is None
        said = f"{error.strerror} for what is printed or written; make some, or write elsewhere" if full else error
        code = FAILURE if _stdout_is_gone(error) else _complain(prog, said, FAILURE)
    except MemoryError:
        code = _complain(
            prog, "there is not enough memory for what is asked; give less to read, or smaller files", FAILURE
        )
    except KeyboardInterrupt as signal:
        code = _complain(prog, "interrupted", interrupts.code_of(signal))
    sys.exit(code or 0)


def print_json(record: dict[str, Any]) -> None:
    """Write one JSON object to standard output; logs and progress go to standard error."""
    text = json.dumps(record, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:  # half a character, such as in the name of a file, or a terminal without it
        text = json.dumps(record)
    sys.stdout.write(text + "\n")


class _Lines:
    """A stream for a bar that writes what it draws to standard error as lines, now and then."""

    def __init__(self) -> None:
        self.due = time.monotonic() + LINES_EVERY

    def write(self, text: str) -> None:
        if time.monotonic() >= self.due and (line := text.strip()):
            sys.stderr.write(line + "\n")
            self.due = time.monotonic() + LINES_EVERY

    def flush(self) -> None:
        sys.stderr.flush()


@contextmanager
def bars_on_terminals(*, quiet: bool = False) -> Iterator[None]:
    """Show bars on a terminal alone, and not there if `quiet`; elsewhere our own (`disable=None`) become lines."""
    from tqdm.std import tqdm
    from transformers.utils import logging

    before = tqdm.__init__

    def begin(bar: Any, *args: Any, disable: bool | None = True, **how: Any) -> None:
        if disable is None and not quiet:
            shape = "{l_bar} {n_fmt} of {total_fmt} {unit}, {elapsed} gone, {remaining} left{postfix}"
            if how.get("total") is None and not args:
                shape = "{desc}: {n_fmt} {unit}, {elapsed} gone{postfix}"
            disable, how = False, {**how, "file": _Lines(), "bar_format": shape}
        before(bar, *args, disable=disable, **how)

    if quiet:
        logging.disable_progress_bar()  # those of downloads too, which ask for the terminal themselves
    if quiet or not sys.stderr.isatty():
        tqdm.__init__ = begin
    try:
        yield
    finally:
        tqdm.__init__ = before


@contextmanager
def warnings_as_lines(prog: str, *, quiet: bool) -> Iterator[None]:
    """Show each warning as one line on standard error, or none; and bars where somebody watches."""
    from transformers.utils import logging

    def show(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
        kind = "note" if issubclass(category, Note) else "warning"
        sys.stderr.write(f"{prog}: {kind}: {_one_line(message)}\n")

    if quiet:
        logging.set_verbosity_error()
    for name in _CHATTY:
        getLogger(name).setLevel(ERROR)
    getLogger("transformers.modeling_utils").addFilter(_no_report)
    with bars_on_terminals(quiet=quiet), warnings.catch_warnings():
        warnings.showwarning = show
        warnings.simplefilter("ignore" if quiet else "default")
        # A file that a refused command left open is closed, and warned about, whenever Python collects it.
        for category in (DeprecationWarning, PendingDeprecationWarning, FutureWarning, ResourceWarning):
            warnings.simplefilter("ignore", category)
        yield


def _no_report(record: LogRecord) -> bool:
    return "LOAD REPORT" not in str(record.msg)  # what it lists is refused, or warned of, by name


def _stdout_is_gone(error: OSError) -> bool:
    """Return whether nobody reads what is printed any more; what is still to be printed is then dropped."""
    if not isinstance(error, BrokenPipeError) or sys.stdout is None:
        return False
    with suppress(OSError, ValueError):
        if hasattr(select, "poll"):  # another pipe can break too
            output = select.poll()
            output.register(sys.stdout.fileno(), 0)
            if not any(state & select.POLLERR for _, state in output.poll(0)):
                return False
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _one_line(message: object) -> str:
    return " ".join(part.strip() for part in str(message).splitlines() if part.strip())


def _complain(prog: str, error: object, code: int) -> int:
    if isinstance(error, Refusal):
        error = error.spelled(read.flag_of)
    line = _one_line(error) or type(error).__name__
    if len(line) > _LONGEST_MESSAGE:
        line = line[: _LONGEST_MESSAGE // 2] + " ... " + line[-_LONGEST_MESSAGE // 2 :]
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            sys.stderr.write(f"{prog}: {line}\n")
    return code


def chosen(prog: str, about: Mapping[str, str], arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Return the word that a command line begins with, and what follows."""
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help", "help"):
        width = max(map(len, about))
        lines = [f"  {prog} {name:<{width}}  {text[:1].lower()}{text[1:].rstrip('.')}" for name, text in about.items()]
        usage = f"usage: {prog} COMMAND [--OPTION VALUE ...]"
        _leave("\n".join([usage, "", *lines, "", f"{prog} COMMAND --help lists its options.", ""]))
    if name == "--version":
        _leave(f"{prog} {__version__}\n")
    if name not in about:
        check_retired(prog, name)
        near = nearest(name, about)
        hint = f"did you mean {' or '.join(near)}?" if near else f"`{prog}` lists all"
        raise ValueError(f"there is no command {typed(name)!r}; {hint}")
    return name, rest


def with_flag(arguments: list[str], flag: str) -> list[str]:
    """Put a flag before the values that are written first."""
    count = next((at for at, word in enumerate(arguments) if word.startswith("-") and word != "-"), len(arguments))
    if not count:
        return arguments
    if flag in {word.partition("=")[0].replace("_", "-") for word in arguments[count:]}:
        raise ValueError(f"{arguments[0]} and {flag} set the same; drop one of them")
    return [flag, *arguments]
