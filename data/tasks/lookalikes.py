"""Tasks on which eviction alone fails: more facts than a tight budget holds, and filler that looks like facts.

The generated tasks as they are, in texts where neither colons nor digits nor the words of a fact tell which units will
be needed: many keys of which one is asked, needles about things that nobody asks, a pass key among other assignments,
a sequence of digits among others. Backbones are not trained on these texts, so the full cache errs as well; a method
is compared with that.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from locret.data.tasks.generated.base import GeneratedTask
from locret.data.tasks.generated.multikey import MultiKey, needle
from locret.data.tasks.generated.number import Number
from locret.data.tasks.generated.passkey import PassKey
from locret.data.text.embedded_tokenizer import NAMES, VARIABLES
from locret.data.text.filler import Filler, FillerOptions


class _Mixed(Filler, ABC):
    """Filler of which a share are look-alikes of a task's own facts."""

    def __init__(self, rng: random.Random, options: FillerOptions | None, percent: int, digits: int) -> None:
        super().__init__(rng, options)
        self.percent, self.digits = percent, digits

    def sentence(self) -> str:
        """Return the next sentence; it never states what is asked for."""
        return self.lookalike() if 100 * self.rng.random() < self.percent else super().sentence()

    @abstractmethod
    def lookalike(self) -> str:
        """Return a sentence that a rule made for the task could take for a fact."""

    def value(self) -> str:
        """Return a number of as many digits as the facts have."""
        return str(self.rng.randrange(10 ** (self.digits - 1), 10**self.digits))


class _Needles(_Mixed):
    def lookalike(self) -> str:
        return needle(f"the {self._noun()}", self.value())


class _Assignments(_Mixed):
    def lookalike(self) -> str:
        choice, value = self.rng.choice, self.value()
        forms = (
            lambda: f"VAR {choice(VARIABLES)} = {value}.",
            lambda: f"The {self._noun()} key is: {value}.",
            lambda: f"The {self._noun()} = {value}.",
            lambda: f"The number of {choice(NAMES)}: {value}.",
        )
        return choice(forms)()


class _Numbers(_Mixed):
    def lookalike(self) -> str:
        choice, value = self.rng.choice, self.value()
        forms = (
            lambda: f"The {self._noun()} has {value} pages.",
            lambda: f"The number of the {self._noun()} is {value}. Remember it.",
            lambda: f"{value} is the sequence of lines in the {self._noun()} book.",
            lambda: f"The {self._noun()} key is {value}.",
        )
        return choice(forms)()


def _check_percent(task: GeneratedTask, percent: int) -> None:
    if percent > 100:
        raise ValueError(f"task {task.name}: percent={percent} is more than all sentences; give 1 to 100")
    if percent == 100 and task.lookalikes:
        raise ValueError(
            f"task {task.name}: lookalikes={task.lookalikes} changes nothing beside percent=100, which is all of the "
            "filler; lower percent, or drop it"
        )


@dataclass(frozen=True, kw_only=True)
class ManyKeys(MultiKey):
    """Find the number of one key among many."""

    name: str = "lookalikes/keys"
    source: str = "RULER niah_multikey_1 with 32 keys, ours"
    keys: int = 32
    """Keys hidden in the text."""
    version: int = 1


@dataclass(frozen=True, kw_only=True)
class Needles(MultiKey):
    """Find the number of one key among needles about things that nobody asks."""

    settable: ClassVar[tuple[str, ...]] = (*MultiKey.settable, "percent")
    name: str = "lookalikes/needles"
    source: str = "RULER niah_multikey_1 in filler like needles, ours"
    version: int = 1

    percent: int = 20
    """Sentences in a hundred of the filler that are needles about things that are never asked."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_percent(self, self.percent)

    def filler(self, rng: random.Random, options: FillerOptions | None) -> Filler:
        """Return filler with needles of as many digits."""
        return _Needles(rng, options, self.percent, self.digits)


@dataclass(frozen=True, kw_only=True)
class Assignments(PassKey):
    """Find the pass key among other keys and assignments, with colons and equals signs."""

    settable: ClassVar[tuple[str, ...]] = (*PassKey.settable, "percent")
    name: str = "lookalikes/assignments"
    source: str = "InfiniteBench R.PassKey among : and =, ours"
    version: int = 1

    percent: int = 10
    """Sentences in a hundred of the filler that assign a number of as many digits to something else."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_percent(self, self.percent)

    def filler(self, rng: random.Random, options: FillerOptions | None) -> Filler:
        """Return filler with assignments of as many digits."""
        return _Assignments(rng, options, self.percent, self.digits)


@dataclass(frozen=True, kw_only=True)
class Numbers(Number):
    """Find the sequence of digits among numbers that are as long."""

    settable: ClassVar[tuple[str, ...]] = (*Number.settable, "percent")
    name: str = "lookalikes/numbers"
    source: str = "InfiniteBench R.Number with numbers everywhere, ours"

    percent: int = 50
    """Sentences in a hundred of the filler that hold a number of as many digits."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_percent(self, self.percent)

    def filler(self, rng: random.Random, options: FillerOptions | None) -> Filler:
        """Return filler with numbers of as many digits."""
        return _Numbers(rng, options, self.percent, self.digits)


TASKS: tuple[GeneratedTask, ...] = (ManyKeys(), Needles(), Assignments(), Numbers())
