"""2StageRetr of OmniKV: add two numbers, then look the sum up in a dictionary read long before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from locret.data.tasks.generated.base import Draw, GeneratedTask, Planted, Question
from locret.data.tasks.metrics.retrieval import all_contained
from locret.data.tasks.task import Sample
from locret.data.text.words import COLORS


@dataclass(frozen=True, kw_only=True)
class TwoStage(GeneratedTask):
    """Look up the value of a sum."""

    settable: ClassVar[tuple[str, ...]] = ("entries", "equations")
    name: str = "two_stage"
    source: str = "OmniKV 2StageRetr (ICLR 2025), a small Dict inside filler"
    metric: str = "string match, all"
    introduction: str = (
        "Read the text and remember the Dict in it. First find the sum of an equation, then give the value for it."
    )
    version: int = 2
    max_new_tokens: int = 24

    entries: int = 16
    """Keys of the dictionary: 0 to entries - 1 (OmniKV: 40 to 200)."""
    equations: int = 1
    """Questions about the text; evaluation asks the first."""

    def plant(self, draw: Draw) -> Planted:
        """Return the dictionary, and its questions."""
        colors = [draw.rng.choice(COLORS) for _ in range(self.entries)]
        entries = ", ".join(f"{key}: {color}" for key, color in enumerate(colors))
        questions = []
        for _ in range(self.equations):
            total = draw.rng.randrange(self.entries)
            first = draw.rng.randint(0, total)
            questions.append(
                Question(
                    text=f"The equation is {first} + {total - first} = ? What is the sum, and the value for it?",
                    targets=(colors[total],),
                    reply=f"{first} + {total - first} = {total}. The value is {total}: {colors[total]}.",
                )
            )
        return Planted(statements=(f"The Dict is: {entries}.",), questions=tuple(questions))

    def score(self, prediction: str, sample: Sample) -> float:
        """Return 1 if the prediction contains the colour."""
        return all_contained(prediction, sample.targets)
