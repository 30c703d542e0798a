"""RULER's niah_multikey: several keys with a number each, one of them asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from locret.data.tasks.generated.base import Draw, GeneratedTask, Planted, Question
from locret.data.tasks.metrics.retrieval import all_contained
from locret.data.tasks.task import Sample

INTRODUCTION = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the numbers afterwards."
)


def needle(key: str, number: str) -> str:
    """Return RULER's needle sentence."""
    return f"One of the special magic numbers for {key} is: {number}."


@dataclass(frozen=True, kw_only=True)
class MultiKey(GeneratedTask):
    """Find the number of one key among several."""

    settable: ClassVar[tuple[str, ...]] = ("keys", "digits")
    name: str = "multikey"
    source: str = "RULER niah_multikey_1 (arXiv 2404.06654)"
    metric: str = "string match, all"
    introduction: str = INTRODUCTION
    version: int = 2
    max_new_tokens: int = 24

    keys: int = 8
    """Keys hidden in the text."""
    digits: int = 7
    """Digits of each number."""

    def plant(self, draw: Draw) -> Planted:
        """Return one needle per key, and a question for each."""
        pairs = [(draw.name(), draw.number(self.digits)) for _ in range(self.keys)]
        questions = tuple(
            Question(
                text=f"What is the special magic number for {key} mentioned in the provided text?",
                targets=(number,),
                reply=f"The special magic number for {key} is: {number}.",
            )
            for key, number in pairs
        )
        return Planted(statements=tuple(needle(*pair) for pair in pairs), questions=questions)

    def score(self, prediction: str, sample: Sample) -> float:
        """Return 1 if the prediction contains the number."""
        return all_contained(prediction, sample.targets)
