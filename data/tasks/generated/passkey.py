"""R.PassKey of InfiniteBench: one pass key of five digits, stated twice in a line of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from locret.data.tasks.generated.base import Draw, GeneratedTask, Planted, Question
from locret.data.tasks.metrics.retrieval import first_integer
from locret.data.tasks.task import Sample


@dataclass(frozen=True, kw_only=True)
class PassKey(GeneratedTask):
    """Find the pass key."""

    settable: ClassVar[tuple[str, ...]] = ("digits",)
    name: str = "passkey"
    source: str = "InfiniteBench R.PassKey (arXiv 2402.13718)"
    metric: str = "first integer"
    introduction: str = (
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. "
        "I will quiz you about the important information."
    )
    max_new_tokens: int = 16

    digits: int = 5
    """Digits of the pass key."""

    def plant(self, draw: Draw) -> Planted:
        """Return the line with the pass key."""
        key = draw.number(self.digits)
        reply = f"The pass key is {key}."
        question = Question(text="What is the pass key?", targets=(key,), reply=reply)
        return Planted(statements=(f"{reply} Remember it. {key} is the pass key.",), questions=(question,))

    def score(self, prediction: str, sample: Sample) -> float:
        """Return 1 if the first integer of the prediction is the pass key."""
        return first_integer(prediction, sample.targets[0])
