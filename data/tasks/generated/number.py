"""R.Number of InfiniteBench: a sequence of ten digits in which digits repeat, so that it must be read exactly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from locret.data.tasks.generated.base import Draw, GeneratedTask, Planted, Question
from locret.data.tasks.metrics.retrieval import first_integer
from locret.data.tasks.task import Sample


@dataclass(frozen=True, kw_only=True)
class Number(GeneratedTask):
    """Find the sequence of digits."""

    settable: ClassVar[tuple[str, ...]] = ("digits",)
    name: str = "number"
    source: str = "InfiniteBench R.Number (arXiv 2402.13718)"
    metric: str = "first integer"
    introduction: str = (
        "There is an important info hidden inside a lot of irrelevant text. Find it. "
        "I will quiz you about the important information there."
    )
    max_new_tokens: int = 20

    digits: int = 10
    """Digits of the sequence; half of them repeat a neighbour."""

    def plant(self, draw: Draw) -> Planted:
        """Return the line with the sequence: random digits, then copies of random ones next to them."""
        digits = list(draw.number((self.digits + 1) // 2))
        while len(digits) < self.digits:
            place = draw.rng.randrange(len(digits))
            digits.insert(place, digits[place])
        number = "".join(digits)
        reply = f"The sequence of digits is {number}."
        question = Question(text="What is the sequence of digits?", targets=(number,), reply=reply)
        statement = f"{reply} Remember it. {number} is the sequence of digits."
        return Planted(statements=(statement,), questions=(question,))

    def score(self, prediction: str, sample: Sample) -> float:
        """Return 1 if the first integer of the prediction is the sequence."""
        return first_integer(prediction, sample.targets[0])
