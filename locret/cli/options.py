"""Options: flags are the fields of dataclasses, `--config` reads a recipe, flags override it.

Of a flag that is given again the last one counts, as everywhere; of a flag that is a list and nothing else, all count.

A dataclass field is the home of an option's default, and the string under the field its help text. What a class may
say besides: `exclusive`, groups of its options that exclude each other, of which a flag replaces a recipe's; `usual`,
those of its fields that the short help shows (all, if it says nothing); and in the metadata of a field `empty`, whether
an empty text is a value.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, get_origin

from locret.base import fields as values
from locret.base.nearest import check_retired, nearest
from locret.cli import recipes

_FLAG = re.compile(r"--[A-Za-z][\w.-]*(=.*)?", re.DOTALL)
_QUESTIONS = ("config", "help", "version", "print_config")
_ELSEWHERE = dict.fromkeys(
    ("shard", "shard_offload", "shard_offload_dir"),
    "is for locret-train, locret-infer and locret-eval; this command is one process, so leave it out, or use "
    "--device-map auto",
)
"""Options of some commands that are asked of others too."""
ALIASES: dict[str, tuple[str, ...]] = {
    "model": ("model_name_or_path", "pretrained"),
    "revision": ("model_revision",),
    "dtype": ("torch_dtype",),
    "attn": ("attn_implementation",),
    "adapter": ("adapter_name_or_path", "peft"),
    "dataset": ("dataset_name", "dataset_path"),
    "split": ("dataset_split",),
    "steps": ("max_steps",),
    "lr": ("learning_rate",),
    "eps": ("adam_epsilon",),
    "gradient_accumulation": ("gradient_accumulation_steps",),
    "output": ("output_dir", "output_path"),
    "overwrite": ("overwrite_output_dir",),
    "save_every": ("save_steps",),
    "keep_checkpoints": ("save_total_limit",),
    "log_every": ("logging_steps",),
    "resume": ("resume_from_checkpoint",),
    "repo": ("hub_model_id", "repo_id"),
    "samples": ("limit",),
    "methods": ("method",),
    "max_new_tokens": ("max_tokens",),
    "system": ("system_prompt",),
    "name": ("served_model_name",),
    "budget": ("max_capacity_prompt", "cache_budget"),
    "keep": ("budget_share",),
}
"""Names that transformers, TRL, the Hub, lm-evaluation-harness, servers and methods that bound the cache have for our
options; a name that an option of a command has itself is that option."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """A field of an option class. The members of a mapping, or of a dataclass, are written behind a dot."""

    name: str
    """As in a recipe."""
    kind: Any
    """Its type."""
    default: Any
    """`MISSING` if it must be given."""
    owner: type
    """The option class."""
    empty: bool = False
    """Whether an empty text is a value."""

    @property
    def help(self) -> str:
        """The string under the field."""
        return _field_docs(self.owner).get(self.name, "")


@cache
def _field_docs(cls: type) -> dict[str, str]:
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


@dataclass(frozen=True)
class Given:
    """A value that the user gave, and how."""

    value: Any
    setting: str
    """The flag or key as typed, for messages."""
    recipe: str | None = None
    """The recipe that has the key; None for a flag, whose value is a text or a list of texts."""

    def __str__(self) -> str:
        if self.recipe is not None:
            return f"{self.setting}: {typed(self.value)} in {self.recipe}"
        return f"{self.setting} {typed(' '.join(self.value) if isinstance(self.value, list) else self.value)}"

    @property
    def name(self) -> str:
        """The setting, and where it stands."""
        return typed(self.setting) + ("" if self.recipe is None else f" in {self.recipe}")


class CommandLine:
    """What stands on a command line, as typed: values of options, recipes, and what is asked instead of a run."""

    def __init__(self, options: Mapping[str, Option], arguments: list[str]) -> None:
        self.options = options
        self.flags: dict[str, Given] = {}
        self.recipes: list[str] = []
        self.asked: dict[str, str] = {}
        waiting = arguments[::-1]
        while waiting:
            argument = waiting.pop()
            try:
                argument.encode()
            except UnicodeEncodeError:
                raise ValueError(f"{typed(argument)} on the command line is not UTF-8; write it in UTF-8") from None
            if not _FLAG.fullmatch(argument := "--help" if argument == "-h" else argument):
                raise ValueError(
                    f"{typed(argument)} belongs to no option; write --OPTION VALUE, in quotes if the value has spaces"
                )
            flag, equals, value = argument.partition("=")
            self._take(flag, value if equals else None, waiting)

    def _take(self, flag: str, value: str | None, waiting: list[str]) -> None:
        name = flag.removeprefix("--").replace("-", "_")
        if name in ("help", "version", "print_config"):
            if value is not None:
                raise ValueError(f"{flag} takes no value; drop ={typed(value)}")
            self.asked[name] = waiting.pop() if name == "help" and waiting[-1:] == ["all"] else ""
        elif name == "config":
            self.recipes.append(_next(flag, value, waiting))
        elif name == "local_rank" and name not in self.options:  # deepspeed says so besides the environment
            os.environ.setdefault("LOCAL_RANK", _next(flag, value, waiting))
        else:
            name, option = known(name, typed(flag), self.options)
            texts, before = self._values_of(option, flag, value, waiting), self.flags.get(name)
            if before is not None and values.takes_list(option.kind) and str not in values.union_members(option.kind):
                texts = [*(before.value if isinstance(before.value, list) else [before.value]), *texts]
            elif before is not None and before.setting.replace("_", "-") != flag.replace("_", "-"):
                raise ValueError(f"{before} and {flag} {typed(texts[0])} set the same; drop one of them")
            self.flags[name] = Given(texts if len(texts) > 1 else texts[0], flag)

    def _values_of(self, option: Option, flag: str, value: str | None, waiting: list[str]) -> list[str]:
        """Return the texts that follow a flag: one, or several of a list."""
        if value is None and bool in values.union_members(option.kind):
            follows = waiting[-1].lower() if waiting else ""
            return [waiting.pop() if follows in ("true", "false") else "true"]
        texts = [_next(flag, value, waiting)]
        if value is None and values.takes_list(option.kind):
            while waiting and not waiting[-1].startswith("-"):
                texts.append(waiting.pop())
        return texts


def _next(flag: str, value: str | None, waiting: list[str]) -> str:
    """Return the value of a flag that needs one."""
    if value is not None:
        return value
    if not waiting:
        raise ValueError(f"{flag} needs a value; write {flag} VALUE")
    if _FLAG.fullmatch(waiting[-1]):
        raise ValueError(
            f"{flag} needs a value before {typed(waiting[-1])}; a value that begins with -- is written {flag}=VALUE"
        )
    return waiting.pop()


def options_of(classes: Sequence[type]) -> dict[str, Option]:
    """Return all options of a command by name."""
    found = dict[str, Option]()
    for cls in classes:
        for one in fields(cls):
            kind, default = values.types_of(cls)[one.name], values.default_of(one)
            found[one.name] = Option(name=one.name, kind=kind, default=default, owner=cls, **one.metadata)
    return found


def known(name: str, setting: str, options: Mapping[str, Option]) -> tuple[str, Option]:
    """Return the whole name of an option that was named, and the option."""
    if name not in options:
        name = next((own for own, others in ALIASES.items() if name in others and own in options), name)
    if name in options:
        return name, options[name]
    root, _, member = name.partition(".")
    if member and root in options and any(map(_has_members, values.union_members(options[root].kind))):
        return name, options[root]
    check_retired("option", root)
    check_retired("option", flag_of(member or name))
    if name in _ELSEWHERE:
        raise ValueError(f"{setting} {_ELSEWHERE[name]}")
    near = nearest(name, [*options, *_QUESTIONS])
    shown = " or ".join(flag_of(other) if setting.startswith("--") else other for other in near)
    raise ValueError(f"{setting} is unknown; " + (f"did you mean {shown}?" if shown else "--help lists the options"))


def _has_members(kind: Any) -> bool:
    return is_dataclass(kind) or (get_origin(kind) or kind) is dict


def flag_of(name: str) -> str:
    """Return the flag of an option's name."""
    return "--" + name.replace("_", "-")


def typed(value: Any) -> str:
    """Return a value as somebody typed it, for a message: on one line, and not longer than helps."""
    text = value if isinstance(value, str) else repr(value)
    line = re.sub(r"\s+", " ", text.encode(errors="backslashreplace").decode())
    return line if len(line) <= 80 else line[:80] + "..."


def merged(line: CommandLine, classes: Sequence[type]) -> dict[str, Given]:
    """Return what the recipes say, in their order, and the flags in place of it."""
    found: dict[str, Given] = {}
    for recipe in line.recipes:
        own: dict[str, Given] = {}
        for key, value in recipes.read(recipe).items():
            one = Given(value, str(key), recipe)
            name, _ = known(str(key).replace("-", "_"), one.name, line.options)
            if name in own:
                raise ValueError(f"{one.name} sets the same as {own[name].setting}; drop one of them")
            own[name] = one
        found |= own
    given = [name for name, one in line.flags.items() if one.value != "null"]
    for group in (group for cls in classes for group in getattr(cls, "exclusive", ())):
        for name in group:
            if name in found and name not in given and any(other in given for other in group):
                del found[name]
            # Nothing is chosen by what is taken back.
            for both in (found, line.flags):
                if name in both and both[name].value in (None, "null"):
                    both.pop(name)
                    found.pop(name, None)
        two = [str((found | line.flags)[name]) for name in group if name in found or name in line.flags][:2]
        if len(two) == 2:
            raise ValueError(f"{' and '.join(two)} exclude each other; drop one of them")
    for name in line.flags:
        for inner in [other for other in found if other.startswith(name + ".")]:
            del found[inner]
    return found | line.flags


def values_of(options: Mapping[str, Option], given: Mapping[str, Given]) -> dict[str, Any]:
    """Return the values by name of the field: typed, whole, and without what was set to null."""
    found: dict[str, Any] = {}
    for name in sorted(given, key=lambda name: name.count(".")):
        one = given[name]
        root, *path = name.split(".")
        option = options[root]
        if one.value is None or one.value == "null":
            if not path and values.takes_none(option.kind):
                found[name] = None
        elif not path:
            found[root] = _read(option, one)
        else:
            whole: Any = found.get(root)
            if is_dataclass(whole) and not isinstance(whole, type):
                whole = asdict(whole)
            found[root] = dict(whole) if isinstance(whole, Mapping) else {}
            _put(found[root], path, one.value if one.recipe else recipes.scalar(one.value))
    for name in {name.partition(".")[0] for name in given if "." in name} & found.keys():
        found[name] = _read(options[name], Given(found[name], flag_of(name)))
    return found


def _read(option: Option, given: Given) -> Any:
    """Return a value as its option's type."""
    value, text = given.value, given.recipe is None and not isinstance(given.value, Mapping)
    kinds = values.union_members(option.kind)
    if text and value[:1] == "{" and any(map(_has_members, kinds)):
        value = recipes.scalar(value)
        text = isinstance(value, str)
    try:
        if text and isinstance(value, list):
            (kind,) = [kind for kind in kinds if get_origin(kind) is list]
            value = [item for one in value for item in values.read(one, kind, text=True)]
        else:
            value = values.read(value, option.kind, text=text)
    except values.WrongType as error:
        default = option.default
        said = ",".join(map(str, default)) if isinstance(default, list | tuple) else default
        example = "" if default in (MISSING, None, "") or is_dataclass(default) else f"; give one such as {said}"
        raise ValueError(f"{given} is not {error}{'' if 'one of' in str(error) else example}") from None
    except ValueError as error:
        raise ValueError(f"{given.name}: {error}") from None
    if isinstance(value, str) and not value.strip() and option.default != "" and not option.empty:
        raise ValueError(f"{given.name} is empty; give a value, or leave it out")
    return value


def _put(mapping: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        inner = mapping.get(name)
        mapping[name] = mapping = dict(inner) if isinstance(inner, Mapping) else {}
    mapping[path[-1]] = value


def lacking(options: Mapping[str, Option], found: Mapping[str, Any]) -> list[Option]:
    """Return the options that must be given and were not."""
    return [option for option in options.values() if option.default is MISSING and option.name not in found]


def instances(classes: Sequence[type], options: Mapping[str, Option], found: Mapping[str, Any]) -> list[Any]:
    """Return an instance of each class."""
    if missing := lacking(options, found):
        names, first = " and ".join(flag_of(option.name) for option in missing), missing[0]
        said = f"is missing: {first.help}" if len(missing) == 1 else f"are missing; {flag_of(first.name)}: {first.help}"
        raise ValueError(f"{names} {said}".rstrip("."))
    return [cls(**{f.name: found[f.name] for f in fields(cls) if f.name in found}) for cls in classes]


def as_recipe(options: Mapping[str, Option], found: Mapping[str, Any]) -> str:
    """Return a recipe of what was given; what was not follows as comments, with its default."""

    def plain(value: Any) -> Any:
        if is_dataclass(value) and not isinstance(value, type):
            return plain(asdict(value))
        if isinstance(value, Mapping):
            return {name: plain(one) for name, one in value.items()}
        return [plain(one) for one in value] if isinstance(value, list | tuple) else value

    lines = [recipes.dump({name: plain(value) for name, value in found.items()})]
    for name, option in options.items():
        if name not in found:
            default = "required" if option.default is MISSING else plain(option.default)
            lines += [f"# {line}\n" for line in recipes.dump({name: default}).splitlines()]
    return "".join(lines)
