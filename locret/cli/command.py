"""One way to read a command line: flags are the fields of dataclasses, `--config` reads a recipe, flags override it.

Of a flag that is given again the last one counts, as everywhere; of a flag that is a list and nothing else, all count.

A dataclass field is the home of an option's default, and the string under the field its help text. What a class may
say besides: `exclusive`, groups of its options of which one that is given as a flag replaces a recipe's; and in the
metadata of a field `empty`, whether an empty text is a value.

Exit codes: 0 fine, 1 failed, 2 the user must change something, 130 and 143 interrupted.
"""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from logging import ERROR, getLogger
from typing import Any, get_origin

from locret._version import __version__
from locret.base import interrupts
from locret.base.fields import Refusal
from locret.base.nearest import check_retired, nearest
from locret.cli import ecosystem_names, option_values, recipes

USAGE_ERROR, FAILURE, INTERRUPTED = 2, 1, 130
_FLAG = re.compile(r"--[A-Za-z][\w.+-]*(=.*)?", re.DOTALL)
_LONGEST_MESSAGE = 2000


@dataclass(frozen=True, kw_only=True)
class Option:
    """A field of an option class, or a field of a dataclass in one."""

    name: str
    """As in a recipe; "policy.budget" for a field within a field."""
    kind: Any
    """Its type."""
    default: Any
    """`MISSING` if it must be given."""
    owner: type
    """The option class."""
    holder: type
    """The class that has the field, which is another one within a field."""
    empty: bool = False
    """Whether an empty text is a value."""

    @property
    def flag(self) -> str:
        """As on the command line."""
        return _flag(self.name)

    @property
    def help(self) -> str:
        """The string under the field."""
        from locret.cli.option_help import field_docs

        return field_docs(self.holder).get(self.name.rpartition(".")[2], "")


@dataclass(frozen=True)
class Given:
    """A value that the user gave, and how."""

    value: Any
    setting: str
    """The flag or key as typed, for messages."""
    recipe: str | None = None
    """The recipe that has the key; None for a flag, whose value is a text."""

    @property
    def text(self) -> bool:
        """Whether the value is a text of the command line, or several."""
        return self.recipe is None

    def __str__(self) -> str:
        several = self.text and isinstance(self.value, list)
        shown = option_values.shown(" ".join(self.value) if several else self.value)
        return f"{self.setting} {shown}" if self.recipe is None else f"{self.setting}: {shown} in {self.recipe}"

    @property
    def name(self) -> str:
        """The setting, and where it stands."""
        setting = option_values.shown(self.setting)
        return setting if self.recipe is None else f"{setting} in {self.recipe}"


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
        SystemExit: With code 0 once `--help`, `--version`, `--print-config` or `--print-completion` has been answered.
        ValueError: For an unknown flag or key, a value of the wrong type, or one that a dataclass refuses.
    """
    options = options_of(option_classes)
    line = _CommandLine(options)
    line.take(list(sys.argv[1:] if argv is None else argv))
    _answer_questions(line.asked, options, prog, description, option_classes)
    values = _values(options, _merged(line, option_classes))
    if "print_config" not in line.asked or not _lacking(options, values):
        instances = _instances(option_classes, options, values)
    if "print_config" in line.asked:
        _leave(_as_recipe(options, values))
    return instances, set(values)


def run(
    main: Callable[[Sequence[str] | None], int | None], argv: Sequence[str] | None = None, *, prog: str | None = None
) -> None:
    """Call a command and leave the process with its exit code; a user's mistake is one line, without a traceback.

    Args:
        main: The command.
        argv: Its arguments; those of the process if None.
        prog: Its name; that of the module or program if None.
    """
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
        code = FAILURE if _stdout_is_gone(error) else _complain(prog, error, FAILURE)
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


_CHATTY = ("bitsandbytes", "accelerate.big_modeling")
"""Loggers that warn of what was asked for: the first at every int8 product, the second of weights on disk."""


@contextmanager
def warnings_as_lines(prog: str, *, quiet: bool) -> Iterator[None]:
    """Show each warning as one line on standard error, or none; hide transformers' bars where nobody watches."""
    from transformers.utils import logging

    def show(message: Warning | str, *_: object, **__: object) -> None:
        sys.stderr.write(f"{prog}: warning: {_one_line(message)}\n")

    if quiet or not sys.stderr.isatty():
        logging.disable_progress_bar()
    if quiet:
        logging.set_verbosity_error()
    for name in _CHATTY:
        getLogger(name).setLevel(ERROR)
    with warnings.catch_warnings():
        warnings.showwarning = show
        warnings.simplefilter("ignore" if quiet else "default")
        # A file that a refused command left open is closed, and warned about, whenever Python collects it.
        for category in (DeprecationWarning, PendingDeprecationWarning, FutureWarning, ResourceWarning):
            warnings.simplefilter("ignore", category)
        yield


class _CommandLine:
    """What stands on a command line, as typed: values of options, recipes, and what is asked instead of a run."""

    def __init__(self, options: Mapping[str, Option]) -> None:
        self.options = options
        self.flags: dict[str, Given] = {}
        self.recipes: list[str] = []
        self.asked: dict[str, str] = {}

    def take(self, arguments: list[str]) -> None:
        """Read all arguments.

        Raises:
            ValueError: For one that is no flag, a flag that there is not, one without a value, or an option that is
                given by two names.
        """
        waiting = list(reversed(arguments))
        while waiting:
            argument = waiting.pop()
            try:
                argument.encode()
            except UnicodeEncodeError:
                raise ValueError(
                    f"{option_values.shown(argument)} on the command line is not UTF-8; write it in UTF-8"
                ) from None
            if argument == "-h":
                argument = "--help"
            if not _FLAG.fullmatch(argument):
                raise ValueError(
                    f"{option_values.shown(argument)} belongs to no option; write --OPTION VALUE, in quotes if the "
                    "value has spaces"
                )
            typed, equals, value = argument.partition("=")
            self._take(typed, value if equals else None, waiting)

    def _take(self, typed: str, value: str | None, waiting: list[str]) -> None:
        name = typed.removeprefix("--").rstrip("+").replace("-", "_")
        if name in ("help", "version", "print_config"):
            if value is not None:
                raise ValueError(f"{typed} takes no value; drop ={option_values.shown(value)}")
            self.asked[name] = ""
            return
        if name in ("config", "print_completion"):
            text = _next(typed, value, waiting)
            if name == "config":
                self.recipes.append(text)
            else:
                self.asked[name] = text
            return
        if name == "local_rank" and name not in self.options:
            _note_local_rank(typed, _next(typed, value, waiting))
            return
        name, option = _known(name, option_values.shown(typed), self.options)
        texts = self._values_of(option, typed, value, waiting)
        before = self.flags.get(name)
        if before is not None and option_values.adds_up(option.kind):
            texts = [*(before.value if isinstance(before.value, list) else [before.value]), *texts]
        elif before is not None and _plain(before.setting) != _plain(typed):
            raise ValueError(f"{before} and {typed} {option_values.shown(texts[0])} set the same; drop one of them")
        self.flags[name] = Given(texts if len(texts) > 1 else texts[0], typed)

    def _values_of(self, option: Option, typed: str, value: str | None, waiting: list[str]) -> list[str]:
        """Return the texts that follow a flag: one, or several of a list."""
        if value is None and bool in option_values.union_members(option.kind):
            follows = waiting[-1].lower() if waiting else ""
            return [waiting.pop() if follows in ("true", "false") else "true"]
        texts = [_next(typed, value, waiting)]
        if value is None and option_values.takes_list(option.kind):
            while waiting and not waiting[-1].startswith("-"):
                texts.append(waiting.pop())
        return texts


def _note_local_rank(typed: str, value: str) -> None:
    """Take what some launchers (deepspeed) say on the command line besides, or instead of, the environment.

    Raises:
        ValueError: If it is no number, or the environment says otherwise.
    """
    if not value.isdecimal():
        raise ValueError(f"{typed} {option_values.shown(value)} is not the number of a process on this machine")
    if os.environ.setdefault("LOCAL_RANK", value) != value:
        raise ValueError(f"{typed} {value} is not what LOCAL_RANK says ({os.environ['LOCAL_RANK']}); drop one of them")


def _next(typed: str, value: str | None, waiting: list[str]) -> str:
    """Return the value of a flag that needs one."""
    if value is not None:
        return value
    if not waiting:
        raise ValueError(f"{typed} needs a value; write {typed} VALUE")
    if _FLAG.fullmatch(waiting[-1]):
        raise ValueError(
            f"{typed} needs a value before {option_values.shown(waiting[-1])}; a value that begins with -- is written "
            f"{typed}=VALUE"
        )
    return waiting.pop()


def options_of(classes: Sequence[type]) -> dict[str, Option]:
    """Return all options of a command by name, those of a dataclass within a field after the field itself."""
    found: dict[str, Option] = {}

    def add(owner: type, holder: type, prefix: str, defaults: Any) -> None:
        kinds = option_values.types_of(holder)
        for field in fields(holder):
            name = prefix + field.name
            default = option_values.default_of(field) if defaults is None else getattr(defaults, field.name)
            found[name] = Option(
                name=name, kind=kinds[field.name], default=default, owner=owner, holder=holder, **field.metadata
            )
            if is_dataclass(kinds[field.name]):
                add(owner, kinds[field.name], name + ".", None if default is MISSING else default)

    for cls in classes:
        add(cls, cls, "", None)
    return found


def _known(name: str, setting: str, options: Mapping[str, Option]) -> tuple[str, Option]:
    """Return the whole name of an option that was named, and the option.

    Raises:
        ValueError: If there is none; the message says what may be meant, in the way the name was given.
    """
    if alias := ecosystem_names.meant(name, options):
        return alias, options[alias]
    if name in options:
        return name, options[name]
    root, _, member = name.partition(".")
    if member and root in options and get_origin(options[root].kind) is dict:
        return name, options[root]
    check_retired("option", name)
    if advice := ecosystem_names.advice(name):
        raise ValueError(f"{setting} is not an option here: {advice}")
    check_retired("option", _flag(member or name))
    inner = {other for other in options if other.startswith(root + ".")}
    near = nearest(name, [*options, *_QUESTIONS])
    if member and inner:
        near = [f"{root}.{other}" for other in nearest(member, [other.partition(".")[2] for other in inner])]
    shown = [_flag(other) if setting.startswith("--") else other for other in near]
    raise ValueError(
        f"{setting} is unknown; " + (f"did you mean {' or '.join(shown)}?" if shown else "--help lists the options")
    )


_QUESTIONS = ("config", "help", "version", "print_config", "print_completion")


def _plain(flag: str) -> str:
    return flag.rstrip("+").replace("_", "-")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _merged(line: _CommandLine, classes: Sequence[type]) -> dict[str, Given]:
    """Return what the recipes say, in their order, and the flags in place of it.

    Raises:
        ValueError: For a recipe that cannot be read, or a key that is unknown or given twice.
    """
    found: dict[str, Given] = {}
    for recipe in line.recipes:
        found |= _of_recipe(recipe, line.options)
    given = [name for name, one in line.flags.items() if one.value != "null"]
    for group in (group for cls in classes for group in getattr(cls, "exclusive", ())):
        for name in group:
            if name in found and name not in given and any(other in given for other in group):
                del found[name]
            # Nothing is chosen by what is taken back.
            for values in (found, line.flags):
                if name in values and values[name].value in (None, "null"):
                    values.pop(name)
                    found.pop(name, None)
    for name in line.flags:
        for inner in [other for other in found if other.startswith(name + ".")]:
            del found[inner]
    return found | line.flags


def _of_recipe(recipe: str, options: Mapping[str, Option]) -> dict[str, Given]:
    found: dict[str, Given] = {}

    def take(prefix: str, values: Mapping[Any, Any]) -> None:
        for key, value in values.items():
            one = Given(value, f"{prefix}{key}", recipe)
            name, option = _known(prefix + str(key).replace("-", "_"), one.name, options)
            if name in found:
                raise ValueError(f"{one.name} sets the same as {found[name].setting}; drop one of them")
            if is_dataclass(option.kind) and isinstance(value, Mapping):
                take(f"{name}.", value)
            else:
                found[name] = one

    take("", recipes.read(recipe))
    return found


def _values(options: Mapping[str, Option], given: Mapping[str, Given]) -> dict[str, Any]:
    """Return the values by name of the field: typed, whole, and without what was set to null.

    Raises:
        ValueError: For a value of the wrong type.
    """
    found: dict[str, Any] = {}
    for name in sorted(given, key=lambda name: name.count(".")):
        one = given[name]
        option = options.get(name) or options[name.partition(".")[0]]
        root, *path = name.split(".")
        if one.value is None or one.value == "null":
            if not path and option_values.takes_none(option.kind):
                found[name] = None
            continue
        if path and option.name == root:  # a member of a mapping
            _put(found.setdefault(root, {}), path, recipes.scalar(one.value) if one.text else one.value)
            continue
        value = _typed(option, one)
        if path:
            inner = found.setdefault(root, {})
            inner = inner if isinstance(inner, dict) else asdict(inner)
            found[root] = {**inner, path[0]: value}
        else:
            found[root] = value
    for name in {name.partition(".")[0] for name in given if "." in name} & found.keys():
        option = options[name]  # members came one by one, and belong together
        try:
            found[name] = option_values.read(found[name], option.kind, text=False)
        except option_values.WrongType as error:
            raise ValueError(f"{option.flag} {option_values.shown(found[name])} is not {error}") from None
        except ValueError as error:
            raise ValueError(f"{option.flag}: {error}") from None
    return found


def _typed(option: Option, given: Given) -> Any:
    """Return a value as its option's type.

    Raises:
        ValueError: If it is not of that type, or an empty text.
    """
    value, several = given.value, given.text and isinstance(given.value, list)
    try:
        if several:
            value = [_item(option, text) for text in given.value]
        else:
            value = option_values.read(value, option.kind, text=given.text)
    except option_values.WrongType as error:
        default = option.default
        example = "" if default in (MISSING, None, "") or is_dataclass(default) else f"; give one such as {default}"
        raise ValueError(f"{given} is not {error}{'' if 'one of' in str(error) else example}") from None
    except ValueError as error:
        raise ValueError(f"{given.name}: {error}") from None
    if isinstance(value, str) and not value.strip() and option.default != "" and not option.empty:
        raise ValueError(f"{given.name} is empty; give a value, or leave it out")
    return value


def _item(option: Option, text: str) -> Any:
    """Return one of several values of a flag; a list among them is not taken apart."""
    (kind, *_) = [kind for kind in option_values.union_members(option.kind) if get_origin(kind) is list]
    (item,) = option_values.read(text, kind, text=True) if not text.startswith("[") else [text]
    return item


def _put(values: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        inner = values.get(name)
        values[name] = values = dict(inner) if isinstance(inner, Mapping) else {}
    values[path[-1]] = value


def _lacking(options: Mapping[str, Option], values: Mapping[str, Any]) -> list[Option]:
    needed = (option for option in options.values() if option.default is MISSING and "." not in option.name)
    return [option for option in needed if option.name not in values]


def _instances(classes: Sequence[type], options: Mapping[str, Option], values: Mapping[str, Any]) -> list[Any]:
    if lacking := _lacking(options, values):
        names, first = " and ".join(option.flag for option in lacking), lacking[0]
        said = f"is missing: {first.help}" if len(lacking) == 1 else f"are missing; {first.flag}: {first.help}"
        raise ValueError(f"{names} {said}".rstrip("."))
    return [cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values}) for cls in classes]


def _answer_questions(
    asked: Mapping[str, str], options: Mapping[str, Option], prog: str, description: str, classes: Sequence[type]
) -> None:
    """Answer what is asked instead of a run, and leave."""
    from locret.cli import option_help

    if "help" in asked:
        _leave(option_help.text(options, prog, description, classes))
    if "version" in asked:
        _leave(f"{prog} {__version__}\n")
    if "print_completion" in asked:
        _leave(option_help.completion(options, prog, description, classes, asked["print_completion"]))


def _as_recipe(options: Mapping[str, Option], values: Mapping[str, Any]) -> str:
    """Return a recipe of what was given; what was not follows as comments, with its default."""

    def plain(value: Any) -> Any:
        if is_dataclass(value) and not isinstance(value, type):
            return plain(asdict(value))
        if isinstance(value, Mapping):
            return {name: plain(one) for name, one in value.items()}
        return [plain(one) for one in value] if isinstance(value, list | tuple) else value

    lines = [recipes.dump({name: plain(value) for name, value in values.items()})]
    for name, option in options.items():
        if name not in values and "." not in name:
            default = "required" if option.default is MISSING else plain(option.default)
            lines += [f"# {line}\n" for line in recipes.dump({name: default}).splitlines()]
    return "".join(lines)


def _leave(text: str) -> None:
    sys.stdout.write(text)
    raise SystemExit(0)


def _stdout_is_gone(error: OSError) -> bool:
    """Return whether nobody reads what is printed any more; what is still to be printed is then dropped."""
    import select

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
        error = f"{_flag(error.setting)} {error.value} {error.rule}"
    line = _one_line(error) or type(error).__name__
    if len(line) > _LONGEST_MESSAGE:
        line = line[: _LONGEST_MESSAGE // 2] + " ... " + line[-_LONGEST_MESSAGE // 2 :]
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            sys.stderr.write(f"{prog}: {line}\n")
    return code
