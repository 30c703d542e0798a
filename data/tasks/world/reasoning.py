"""What takes more than one place of the text: two steps, the largest of all, a count, a rule that examples follow.

Source:    SCBench (arXiv 2412.10319) Math.Find and many-shot learning; OmniKV's questions in steps; sentences are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from locret.data.tasks.generated.base import Draw, GeneratedTask, Planted, Question
from locret.data.tasks.metrics.retrieval import all_contained, first_integer
from locret.data.tasks.task import Sample
from locret.data.text.embedded_tokenizer import COLORS, NOUNS, PEOPLE


def _check(task: GeneratedTask, option: str, most: int) -> None:
    """Refuse an option of which there are not enough words.

    Raises:
        ValueError: Naming it.
    """
    if (value := getattr(task, option)) > most:
        raise ValueError(f"task {task.name}: {option}={value} is more than there are; ask for {most} or fewer")


@dataclass(frozen=True, kw_only=True)
class TwoHop(GeneratedTask):
    """Find the code of the city that somebody works for, said in two distant places."""

    settable: ClassVar[tuple[str, ...]] = (*GeneratedTask.settable, "people", "digits")
    name: str = "world/two_hop"
    source: str = "two facts far apart; ours"
    metric: str = "string match, all"
    introduction: str = "Memorize who works where, and every badge."
    max_new_tokens: int = 32

    people: int = 5
    """People in the text, each working for another city."""
    digits: int = 5
    """Digits of each number."""

    def plant(self, draw: Draw) -> Planted:
        """Return a sentence per person, one per city, and a question per person."""
        works, badges, questions = [], [], []
        for _ in range(self.people):
            person, city, number = draw.word(PEOPLE, "people"), draw.name(), draw.number(self.digits)
            works.append(f"{person} works for {city}.")
            badges.append(f"The badge of {city} is {number}.")
            reply = f"{works[-1]} {badges[-1]}"
            questions.append(Question(text=f"What is the badge of {person}?", targets=(number,), reply=reply))
        return Planted(statements=(*works, *badges), questions=tuple(questions))

    def score(self, prediction: str, sample: Sample) -> float:
        """Return 1 if the prediction contains the number."""
        return all_contained(prediction, sample.targets)


@dataclass(frozen=True, kw_only=True)
class Prices(GeneratedTask):
    """Find what costs most or least: every price in the text counts."""

    settable: ClassVar[tuple[str, ...]] = (*GeneratedTask.settable, "things", "apart")
    name: str = "world/prices"
    version: int = 3
    source: str = "SCBench Math.Find (arXiv 2412.10319), numbers spread over the text; ours"
    metric: str = "string match, all"
    introduction: str = "Compare all prices in the text."
    max_new_tokens: int = 24

    things: int = 6
    """Things with a price."""
    apart: int = 4
    """Least difference of two prices, from 10 to 99."""

    def plant(self, draw: Draw) -> Planted:
        """Return a price per thing, and the questions for the highest and the lowest.

        Raises:
            ValueError: If there are not that many prices.
        """
        room = 90 - (self.things - 1) * self.apart
        if room < 1:
            raise ValueError(f"task {self.name}: things={self.things} with apart={self.apart} do not fit 10 to 99")
        low = sorted(draw.rng.randrange(room) for _ in range(self.things))
        prices = [10 + value + index * self.apart for index, value in enumerate(low)]
        _check(self, "things", len(NOUNS))
        things = draw.rng.sample(NOUNS, self.things)
        said = [f"The price {price}: the {thing}." for thing, price in zip(things, prices, strict=True)]
        questions = (
            Question(text="What has the highest price?", targets=(things[-1],), reply=said[-1]),
            Question(text="What has the lowest price?", targets=(things[0],), reply=said[0]),
        )
        first = draw.rng.randrange(2)
        return Planted(
            statements=tuple(draw.rng.sample(said, len(said))), questions=(questions[first], questions[1 - first])
        )

    def score(self, prediction: str, sample: Sample) -> float:
        """Return 1 if the prediction has the thing."""
        return all_contained(prediction, sample.targets)


@dataclass(frozen=True, kw_only=True)
class Count(GeneratedTask):
    """Count how many times something is said to go by."""

    settable: ClassVar[tuple[str, ...]] = (*GeneratedTask.settable, "kinds", "most")
    name: str = "world/count"
    source: str = "counting over the whole text; ours"
    metric: str = "first integer"
    introduction: str = "Count everything that goes by in this text."
    max_new_tokens: int = 16

    kinds: int = 3
    """Kinds of things that go by."""
    most: int = 5
    """Most times that one of them does."""

    def plant(self, draw: Draw) -> Planted:
        """Return a sentence per time, and a question for each kind.

        Raises:
            ValueError: If there are not that many kinds.
        """
        known = ("horse", "dog", "cat", "bird", "fish", "train", "ship")
        _check(self, "kinds", len(known))
        statements, questions = [], []
        for thing in draw.rng.sample(known, self.kinds):
            times = draw.rng.randint(1, self.most)
            statements += [f"A {thing} goes by."] * times
            question = f"How many times did you see a {thing}?"
            questions.append(Question(text=question, targets=(str(times),), reply=f"A {thing} goes by {times} times."))
        draw.rng.shuffle(statements)
        return Planted(statements=tuple(statements), questions=tuple(questions))

    def score(self, prediction: str, sample: Sample) -> float:
        """Return 1 if the first integer of the prediction is the count."""
        return first_integer(prediction, sample.targets[0])


@dataclass(frozen=True, kw_only=True)
class Shots(GeneratedTask):
    """Apply a rule that examples show: what a new pair leads to depends on its second word alone."""

    settable: ClassVar[tuple[str, ...]] = (*GeneratedTask.settable, "rules", "shots")
    name: str = "world/shots"
    source: str = "SCBench many-shot learning (arXiv 2412.10319); ours"
    metric: str = "string match, all"
    introduction: str = "Learn the rules from the examples in this text."
    max_new_tokens: int = 24

    rules: int = 6
    """Nouns with a rule each."""
    shots: int = 3
    """Examples of each rule."""

    def plant(self, draw: Draw) -> Planted:
        """Return the examples, and for each rule a question with a colour that no example of it has.

        Raises:
            ValueError: If there are not that many nouns or colours.
        """
        _check(self, "rules", len(NOUNS))
        _check(self, "shots", len(COLORS) - 1)
        statements, questions = [], []
        for noun in draw.rng.sample(NOUNS, self.rules):
            city = draw.name()
            colors = draw.rng.sample(COLORS, self.shots + 1)
            statements += [f"The goal of a {color} {noun} is {city}." for color in colors[1:]]
            reply = f"The goal of a {colors[0]} {noun} is {city}."
            questions.append(Question(text=f"What is the goal of a {colors[0]} {noun}?", targets=(city,), reply=reply))
        draw.rng.shuffle(statements)
        return Planted(statements=tuple(statements), questions=tuple(questions))

    def score(self, prediction: str, sample: Sample) -> float:
        """Return 1 if the prediction has the city."""
        return all_contained(prediction, sample.targets)
