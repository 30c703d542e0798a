"""RULER's niah_multivalue: one key with several numbers, all of them asked; other keys have one number each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from locret.data.tasks.generated.base import Draw, GeneratedTask, Planted, Question
from locret.data.tasks.generated.multikey import INTRODUCTION, needle
from locret.data.tasks.metrics.retrieval import all_contained
from locret.data.tasks.task import Sample


@dataclass(frozen=True, kw_only=True)
class MultiValue(GeneratedTask):
    """Find all numbers of one key."""

    settable: ClassVar[tuple[str, ...]] = ("values", "others", "digits")
    name: str = "multivalue"
    source: str = "RULER niah_multivalue (arXiv 2404.06654), other keys added, numbers ten apart by their first digits"
    metric: str = "string match, all"
    introduction: str = INTRODUCTION
    version: int = 5
    max_new_tokens: int = 64
    may_be_zero: ClassVar[frozenset[str]] = frozenset({"others"})

    values: int = 4
    """Numbers of the key."""
    others: int = 2
    """Other keys in the text, with one number each."""
    digits: int = 7
    """Digits of each number."""

    def plant(self, draw: Draw) -> Planted:
        """Return the needles of the key, then the others'; the reply names the key's numbers in ascending order."""
        key = draw.name()
        numbers = tuple(sorted(self._numbers(draw), key=int))
        others = [(draw.name(), draw.number(self.digits)) for _ in range(self.others)]
        question = Question(
            text=f"What are all the special magic numbers for {key} mentioned in the provided text?",
            targets=numbers,
            reply=f"The special magic numbers {', '.join(f'for {key} is: {number}' for number in numbers)}.",
        )
        statements = (*(needle(key, number) for number in numbers), *(needle(*pair) for pair in others))
        return Planted(statements=statements, questions=(question,))

    def _numbers(self, draw: Draw) -> list[str]:
        """Draw the key's numbers; as far as there are digits, first ones are consecutive, and second ones the same.

        A small model, which reads two digits at a time, can then name them one after the other; which text or key they
        belong to, the digits do not tell.
        """
        leading = range(1, 10)[: self.values]
        shift = draw.rng.randint(0, 9 - len(leading))
        second = str(draw.rng.randrange(10)) if self.digits > 1 else ""
        numbers = [draw.number(self.digits, first=int(f"{digit + shift}{second}")) for digit in leading]
        return [*numbers, *(draw.number(self.digits) for _ in range(self.values - len(numbers)))]

    def score(self, prediction: str, sample: Sample) -> float:
        """Return the share of the numbers that the prediction contains."""
        return all_contained(prediction, sample.targets)
