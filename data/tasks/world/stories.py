"""Stories of people, things and rooms, told one sentence at a time between other sentences.

Source:    bAbI (arXiv 1502.05698) qa1 to qa5, hidden in long text as BABILong does (arXiv 2406.10149). People, things,
           moves and questions are theirs. A sentence begins with what questions find it by ("The ring was handed by
           Henry to Peter"), and an answer says the sentences it rests on, so that a small model, which learns to read
           on from what it finds but not back, can get there step by step.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from locret.data.tasks.generated.base import Draw, GeneratedTask, Planted, Question
from locret.data.tasks.metrics.retrieval import all_contained
from locret.data.tasks.task import Sample
from locret.data.text.embedded_tokenizer import PEOPLE, ROOMS, THINGS

MOVES = ("moved", "went", "journeyed", "travelled")
TAKEN = ("carried", "held", "grabbed")
HANDED = ("handed", "passed", "brought")
SIDES = ("north", "south", "east", "west")


@dataclass(frozen=True, kw_only=True)
class _Story(GeneratedTask):
    in_order: ClassVar[bool] = True
    metric: str = "the last sentence names it"
    introduction: str = "Here is a text with a story in it. Read it well."
    max_new_tokens: int = 40

    def score(self, prediction: str, sample: Sample) -> float:
        """Return 1 if the last sentence of the prediction has the answer."""
        sentences = [sentence for sentence in prediction.split(".") if sentence.strip()]
        return all_contained(sentences[-1] if sentences else "", sample.targets)


def _people(draw: Draw, count: int) -> list[str]:
    return [draw.word(PEOPLE, "people") for _ in range(count)]


def _names(prediction: str, words: tuple[str, ...], target: str, *, last: bool) -> float:
    """Return 1 if the first of `words` in the prediction, or the last, is the target."""
    found = [word for word in re.findall(r"\w+", prediction) if word in words]
    return float(bool(found) and found[-1 if last else 0] == target)


def _ways(draw: Draw, people: list[str], rooms: list[str], moves: int) -> list[tuple[str, str]]:
    """Return who goes where, step by step; everybody moves so many times, and nobody to where they are."""
    where: dict[str, str] = {}
    ways = []
    for _ in range(moves):
        for person in draw.rng.sample(people, len(people)):
            where[person] = draw.rng.choice([room for room in rooms if room != where.get(person)])
            ways.append((person, where[person]))
    return ways


@dataclass(frozen=True, kw_only=True)
class Whereabouts(_Story):
    """Find where somebody is: where they went last."""

    settable: ClassVar[tuple[str, ...]] = (*GeneratedTask.settable, "people", "moves")
    name: str = "world/qa1"
    source: str = "bAbI qa1 as in BABILong (arXiv 2406.10149)"

    people: int = 4
    """People in the story."""
    moves: int = 3
    """Moves of each of them."""

    def plant(self, draw: Draw) -> Planted:
        """Return the moves, and a question about each of the people."""
        latest: dict[str, Question] = {}
        statements = []
        people, rooms = _people(draw, self.people), draw.some(ROOMS, 5)
        for person, room in _ways(draw, people, rooms, self.moves):
            statements.append(f"{person} {draw.rng.choice(MOVES)} to the {room}.")
            latest[person] = Question(text=f"Where is {person}?", targets=(room,), reply=statements[-1])
        return Planted(statements=tuple(statements), questions=tuple(latest.values()))


@dataclass(frozen=True, kw_only=True)
class Carried(_Story):
    """Find where a thing is: who took it, and where they went last."""

    settable: ClassVar[tuple[str, ...]] = (*GeneratedTask.settable, "people", "moves")
    name: str = "world/qa2"
    version: int = 2
    source: str = "bAbI qa2 as in BABILong (arXiv 2406.10149), things stay with who took them"

    people: int = 3
    """People in the story; each takes one thing."""
    moves: int = 3
    """Moves of each of them."""

    def plant(self, draw: Draw) -> Planted:
        """Return moves and takings, and a question about each thing."""
        people, rooms = _people(draw, self.people), draw.some(ROOMS, 5)
        statements = []
        latest: dict[str, tuple[str, str]] = {}
        for person, room in _ways(draw, people, rooms, self.moves):
            statements.append(f"{person} {draw.rng.choice(MOVES)} to the {room}.")
            latest[person] = (statements[-1], room)
        questions = []
        for person in people:
            thing = draw.word(THINGS, "things")
            taking = f"The {thing} was {draw.rng.choice(TAKEN)} by {person}."
            statements.insert(draw.rng.randrange(1, max(len(statements), 2)), taking)
            move, room = latest[person]
            questions.append(Question(text=f"Where is the {thing}?", targets=(room,), reply=f"{taking} {move}"))
        return Planted(statements=tuple(statements), questions=tuple(questions))


@dataclass(frozen=True, kw_only=True)
class CarriedBefore(_Story):
    """Find where a thing was before: who took it, where they went last, and where they had come from."""

    settable: ClassVar[tuple[str, ...]] = (*GeneratedTask.settable, "people", "moves")
    name: str = "world/qa3"
    version: int = 3
    source: str = "bAbI qa3 as in BABILong (arXiv 2406.10149), things stay with who took them"
    max_new_tokens: int = 48

    people: int = 2
    """People in the story; each takes one thing before they move for the last two times."""
    moves: int = 3
    """Moves of each of them, two or more."""

    def plant(self, draw: Draw) -> Planted:
        """Return takings and moves, and a question about each thing.

        Raises:
            ValueError: If nobody was anywhere before.
        """
        if self.moves < 2:
            raise ValueError(f"task {self.name}: moves={self.moves} has no place before the last; ask for 2 or more")
        people, rooms = _people(draw, self.people), draw.some(ROOMS, 6)
        things = {person: draw.word(THINGS, "things") for person in people}
        takings = {person: f"The {things[person]} was {draw.rng.choice(TAKEN)} by {person}." for person in people}
        statements = draw.rng.sample(sorted(takings.values()), len(people))
        told: dict[str, list[tuple[str, str]]] = {person: [] for person in people}
        moved = {person: draw.rng.choice(MOVES) for person in people}
        for person, room in _ways(draw, people, rooms, self.moves):
            statements.append(f"{person} {moved[person]} to the {room}.")
            told[person].append((statements[-1], room))
        questions = []
        for person in people:
            (before, room), (last, end) = told[person][-2:]
            text = f"Where was the {things[person]} before the {end}?"
            reply = f"{takings[person]} {last} Before {before}"
            questions.append(Question(text=text, targets=(room,), reply=reply))
        return Planted(statements=tuple(statements), questions=tuple(questions))


@dataclass(frozen=True, kw_only=True)
class Directions(_Story):
    """Find a room by the side of another on which it lies."""

    settable: ClassVar[tuple[str, ...]] = (*GeneratedTask.settable, "pairs")
    in_order: ClassVar[bool] = False
    name: str = "world/qa4"
    version: int = 2
    source: str = "bAbI qa4 as in BABILong (arXiv 2406.10149)"
    metric: str = "the last room named"
    max_new_tokens: int = 24

    pairs: int = 6
    """Pairs of neighbours."""

    def plant(self, draw: Draw) -> Planted:
        """Return which room lies where of which, and a question about each pair.

        Raises:
            ValueError: If there are not that many rooms.
        """
        rooms = [draw.word(ROOMS, "rooms") for _ in range(max(self.pairs // 2 + 1, 3))]
        pairs = [(one, other) for one in rooms for other in rooms if one != other]
        statements: list[str] = []
        questions: list[Question] = []
        taken: set[tuple[str, str]] = set()
        for one, other in draw.rng.sample(pairs, len(pairs)):
            sides = [side for side in SIDES if (other, side) not in taken and (side, one) not in taken]
            if len(statements) == self.pairs or not sides:
                continue
            side = draw.rng.choice(sides)
            taken |= {(other, side), (side, one)}
            if draw.rng.random() < 0.5:
                statements.append(f"The place {side} of the {other} is the {one}.")
                question, target = f"What is {side} of the {other}?", one
            else:
                statements.append(f"The {one} is {side} of the {other}.")
                question, target = f"The {one} is {side} of what?", other
            questions.append(Question(text=question, targets=(target,), reply=statements[-1]))
        if len(statements) < self.pairs:
            raise ValueError(f"task {self.name}: one text cannot hold pairs={self.pairs}; ask for fewer")
        return Planted(statements=tuple(statements), questions=tuple(questions))

    def score(self, prediction: str, sample: Sample) -> float:
        """Return 1 if the room is the last that the prediction names."""
        return _names(prediction, ROOMS, sample.targets[0], last=True)


@dataclass(frozen=True, kw_only=True)
class Gifts(_Story):
    """Find who gave what to whom."""

    settable: ClassVar[tuple[str, ...]] = (*GeneratedTask.settable, "gifts")
    name: str = "world/qa5"
    version: int = 2
    source: str = "bAbI qa5 as in BABILong (arXiv 2406.10149)"
    metric: str = "the first person named, or the last"
    max_new_tokens: int = 24

    gifts: int = 6
    """Gifts in the story, each of another thing."""

    def plant(self, draw: Draw) -> Planted:
        """Return who gives what to whom, and three questions about each gift.

        Raises:
            ValueError: If there are not that many things.
        """
        people = _people(draw, 4)
        statements, questions = [], []
        for _ in range(self.gifts):
            (giver, taker), thing = draw.rng.sample(people, 2), draw.word(THINGS, "things")
            statements.append(f"The {thing} was {draw.rng.choice(HANDED)} by {giver} to {taker}.")
            for text, target in (
                (f"Who gave the {thing}?", giver),
                (f"Who received the {thing}?", taker),
                (f"Who gave the {thing} to {taker}?", giver),
            ):
                questions.append(Question(text=text, targets=(target,), reply=statements[-1]))
        return Planted(statements=tuple(statements), questions=tuple(questions))

    @property
    def compares(self) -> tuple[str, ...]:
        """The question says whether the first or the last name counts."""
        return ("question",)

    def score(self, prediction: str, sample: Sample) -> float:
        """Return 1 if who gave is the first that the prediction names, and who received the last."""
        return _names(prediction, PEOPLE, sample.targets[0], last="received" in sample.question)
