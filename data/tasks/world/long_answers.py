"""Long answers: a way from place to place, and a procedure of many steps; each step finds its own place in the text.

Source:    LongProc (arXiv 2501.05414), path traversal and countdown, in small; sentences are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from locret.data.tasks.generated.base import Draw, GeneratedTask, Planted, Question
from locret.data.tasks.task import Sample
from locret.data.text.embedded_tokenizer import COLORS


def steps_in_order(prediction: str, targets: tuple[str, ...]) -> float:
    """Return the share of the steps that the prediction has in order; what comes after a missing one does not count."""
    place, right = 0, 0
    for target in targets:
        found = prediction.find(target, place)
        if found < 0:
            break
        place, right = found + len(target), right + 1
    return right / len(targets)


@dataclass(frozen=True, kw_only=True)
class Path(GeneratedTask):
    """Walk from place to place until the way ends."""

    settable: ClassVar[tuple[str, ...]] = (*GeneratedTask.settable, "hops", "others")
    name: str = "world/path"
    version: int = 2
    source: str = "LongProc path traversal (arXiv 2501.05414), ours"
    metric: str = "steps in order"
    introduction: str = "Remember every way from place to place."
    max_new_tokens: int = 120
    may_be_zero: ClassVar[frozenset[str]] = frozenset({"others"})

    hops: int = 8
    """Steps of the way."""
    others: int = 2
    """Other ways in the text, half as long."""

    def plant(self, draw: Draw) -> Planted:
        """Return the steps of all ways, and a question for each way."""
        statements, questions = [], []
        for hops in (self.hops, *[max(self.hops // 2, 1)] * self.others):
            places = [draw.name() for _ in range(hops + 1)]
            way = [f"From {one} go to {other}." for one, other in zip(places, places[1:], strict=False)]
            way.append(f"From {places[-1]} go back.")
            statements += way
            text = f"From {places[0]} walk to the end."
            questions.append(Question(text=text, targets=tuple(way), reply=" ".join(way)))
        first, *others = statements
        draw.rng.shuffle(others)
        return Planted(statements=(first, *others), questions=tuple(questions))

    def score(self, prediction: str, sample: Sample) -> float:
        """Return the share of the steps that the prediction has in order."""
        return steps_in_order(prediction, sample.targets)


@dataclass(frozen=True, kw_only=True)
class Countdown(GeneratedTask):
    """Count down and say of each number what the text says of it."""

    settable: ClassVar[tuple[str, ...]] = (*GeneratedTask.settable, "steps")
    name: str = "world/countdown"
    version: int = 3
    source: str = "LongProc countdown (arXiv 2501.05414) as a procedure with lookups, ours"
    metric: str = "steps in order"
    introduction: str = "Every number has a color in this text."
    max_new_tokens: int = 120

    steps: int = 10
    """Numbers to say, at most 45."""

    def plant(self, draw: Draw) -> Planted:
        """Return the colour of each number and of some beyond, and a question for the whole way and for half of it.

        Raises:
            ValueError: If there are not that many numbers.
        """
        if self.steps > 45:
            raise ValueError(f"task {self.name}: steps={self.steps} is more than 45; ask for fewer")
        start = draw.rng.randint(9 + self.steps, 98)
        numbers = range(start, start - self.steps, -1)
        said = [f"Number {number} is {draw.rng.choice(COLORS)}." for number in numbers]
        half = max(self.steps // 2, 1)
        # Every number of the reply is then the one below the last that was said.
        questions = tuple(
            Question(
                text=f"Count down to Number {numbers[end - 1]} from below Number {numbers[first] + 1}.",
                targets=tuple(said[first:end]),
                reply=" ".join(said[first:end]),
            )
            for first, end in ((0, self.steps), (0, half), (half % self.steps, self.steps))
        )
        return Planted(statements=tuple(draw.rng.sample(said, len(said))), questions=questions)

    def score(self, prediction: str, sample: Sample) -> float:
        """Return the share of the steps that the prediction has in order."""
        return steps_in_order(prediction, sample.targets)
