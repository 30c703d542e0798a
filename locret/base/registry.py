"""Things that are chosen by a spec, `NAME:OPTION=VALUE,...`: classes found by name, made with checked options."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from types import MappingProxyType
from typing import Any, ClassVar, NoReturn, TypeVar

from locret.base import method_spec
from locret.base.fields import Range, check_fields, check_ranges, checked
from locret.base.nearest import check_retired, nearest, refuse_unknown

T = TypeVar("T")


class Chosen(ABC):
    """Options of something that is chosen by a spec. Subclasses are frozen dataclasses."""

    kind: ClassVar[str]
    """What messages call it."""
    name: ClassVar[str]
    over_ranks: ClassVar[bool] = False
    """Whether it does the same where processes share the KV heads of a layer (tensor parallelism): it looks at one KV
    head and its query heads at a time, or asks the other processes."""

    ranges: ClassVar[Mapping[str, Range | tuple[Any, ...]]] = MappingProxyType({})
    """What options may be, where their type alone does not say it; see `check_ranges`."""

    def __post_init__(self) -> None:
        """Check the options by their types and ranges."""
        try:
            check_fields(self)
        except ValueError as error:
            self.refuse(str(error))
        check_ranges(self, self.ranges, f"{self.kind} {self.name}: ")

    def refuse(self, why: str) -> NoReturn:
        """Refuse the options."""
        raise ValueError(f"{self.kind} {self.name}: {why}") from None

    def check_file(self) -> None:
        """Read the file that an option names, if one does, to refuse it before a backbone is loaded."""
        return

    def check_effect(self, needed: str, *options: str) -> None:
        """Refuse options that are not at their defaults where nothing reads them without the setting `needed`."""
        for option in options:
            if (value := getattr(self, option)) != getattr(type(self), option):
                self.refuse(f"{option}={value} has no effect without {needed}; set that, or leave it out")


def get(kind: str, classes: Sequence[type[T]], spec: str) -> T:
    """Return what a spec, such as "quest:page=8", means: one of frozen dataclasses with a class variable `name`."""
    parsed = method_spec.parse(spec, kind)
    if parsed.modifiers:
        raise ValueError(f'{kind} "{spec}": +{parsed.modifiers[0]} is for the whole method; write it there')
    known = {one.name: one for one in classes}  # type: ignore[attr-defined]
    if parsed.name not in known:
        refuse_unknown(kind, parsed.name, known)
    return build(kind, parsed.name, known[parsed.name], parsed.options)


def build(kind: str, name: str, made: type[T], given: Mapping[str, Any], needs: str = "") -> T:
    """Return an instance of a dataclass with these options; `needs` says what to give where one is missing."""
    known = {field.name: field for field in fields(made) if field.init}  # type: ignore[arg-type]
    for option in given:
        if option not in known:
            check_retired(f"{kind} option", f"{name}:{option}")
            hint = f"did you mean {' or '.join(nearest(option, known) or known)}?" if known else "there are none"
            raise ValueError(f'{kind} {name}: it has no option "{option}"; {hint}')
    for option, field in known.items():
        if option not in given and field.default is field.default_factory is MISSING:
            raise ValueError(f"{kind} {name} needs {needs or f'its option {option}; write {name}:{option}=VALUE'}")
    try:
        # Checked here as well as by the class itself: one of somebody else's may check nothing.
        return made(**{option: checked(made, option, value) for option, value in given.items()})
    except ValueError as error:
        about = str(error)
        raise ValueError(about if about.startswith(f"{kind} ") else f"{kind} {name}: {about}") from None
    except (TypeError, AssertionError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{kind} {name} cannot be made of these options ({error}); check them") from error
