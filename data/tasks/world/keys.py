"""What belongs to a key: among near-equal keys, by either end of a string, the latest of several, in other words.

Source:    SCBench (arXiv 2412.10319), Retr.KV and Retr.Prefix-Suffix; NoLiMa (arXiv 2502.05167), questions that share
           no word with the text. Sentences and sizes are ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from locret.data.tasks.generated.base import Draw, GeneratedTask, Planted, Question
from locret.data.tasks.metrics.retrieval import all_contained
from locret.data.tasks.task import Sample
from locret.data.text.embedded_tokenizer import COLORS, COUNTRY_OF, NAMES


@dataclass(frozen=True, kw_only=True)
class NearKeys(GeneratedTask):
    """Find the number of a key of two words; other keys share one of them."""

    settable: ClassVar[tuple[str, ...]] = (*GeneratedTask.settable, "keys", "digits")
    name: str = "world/near_keys"
    source: str = "SCBench Retr.KV (arXiv 2412.10319) with near-equal keys, ours"
    metric: str = "string match, all"
    introduction: str = "Memorize what every vault holds."
    max_new_tokens: int = 24

    keys: int = 16
    """Keys hidden in the text, at most 42 times 23."""
    digits: int = 4
    """Digits of each number."""

    def plant(self, draw: Draw) -> Planted:
        """Return a sentence per key, and a question for each.

        Raises:
            ValueError: If there are not that many keys.
        """
        per_name = min(max(math.isqrt(self.keys), 1), len(COLORS))
        names = [draw.name() for _ in range(math.ceil(self.keys / per_name))]
        every = [(color, name) for name in names for color in draw.rng.sample(COLORS, per_name)]
        draw.rng.shuffle(every)
        questions = []
        for color, name in every[: self.keys]:
            number = draw.number(self.digits)
            reply = f"The {color} {name} vault holds {number}."
            text = f"Which number is in the {color} {name} vault?"
            questions.append(Question(text=text, targets=(number,), reply=reply))
        return Planted(statements=tuple(one.reply for one in questions), questions=tuple(questions))

    def score(self, prediction: str, sample: Sample) -> float:
        """Return 1 if the prediction contains the number."""
        return all_contained(prediction, sample.targets)


@dataclass(frozen=True, kw_only=True)
class Strings(GeneratedTask):
    """Find a string of words by its first two and its last two; others share words with it."""

    settable: ClassVar[tuple[str, ...]] = (*GeneratedTask.settable, "strings")
    name: str = "world/strings"
    version: int = 2
    source: str = "SCBench Retr.Prefix-Suffix (arXiv 2412.10319), strings of five words, ours"
    metric: str = "the string, word for word"
    introduction: str = "Memorize every string in the text."
    max_new_tokens: int = 24

    strings: int = 8
    """Strings hidden in the text."""

    def plant(self, draw: Draw) -> Planted:
        """Return the strings, and a question for each by its beginning and its end.

        Raises:
            ValueError: If there are not that many.
        """
        rng = draw.rng
        shared = [draw.name() for _ in range(max(self.strings // 2, 1))]
        statements, questions = [], []
        for index in range(self.strings):
            # Two strings each share their first word, and two others their last; the pairs of words are unique.
            first, last = shared[index // 2 % len(shared)], shared[(index + 1) // 2 % len(shared)]
            second, fourth = draw.name(), draw.name()
            string = f"{first} {second} {rng.choice(COLORS)} {fourth} {last}"
            statements.append(f"One string begins with {string}.")
            text = f"Which string begins with {first} {second} and ends with {fourth} {last}?"
            questions.append(Question(text=text, targets=(string,), reply=statements[-1]))
        return Planted(statements=tuple(statements), questions=tuple(questions))

    def score(self, prediction: str, sample: Sample) -> float:
        """Return 1 if the prediction contains the string."""
        return all_contained(prediction, sample.targets)


@dataclass(frozen=True, kw_only=True)
class Latest(GeneratedTask):
    """Find the number of a key that has been changed several times: the latest counts."""

    settable: ClassVar[tuple[str, ...]] = (*GeneratedTask.settable, "keys", "changes", "digits")
    in_order: ClassVar[bool] = True
    name: str = "world/latest"
    source: str = "the same key several times, the latest wins; ours"
    metric: str = "string match, all"
    introduction: str = "Numbers change in this text. Remember the current number of every place."
    max_new_tokens: int = 24

    keys: int = 4
    """Keys in the text."""
    changes: int = 3
    """Numbers of each key, one after the other."""
    digits: int = 4
    """Digits of each number."""

    def plant(self, draw: Draw) -> Planted:
        """Return the numbers of all keys, in turns, and a question for each key."""
        names = [draw.name() for _ in range(self.keys)]
        latest: dict[str, str] = {}
        statements = []
        for _ in range(self.changes):
            for name in draw.rng.sample(names, len(names)):
                latest[name] = draw.number(self.digits)
                statements.append(f"The code of {name} is now {latest[name]}.")
        questions = [
            Question(
                text=f"What is the current code of {name}?",
                targets=(latest[name],),
                reply=f"The code of {name} is now {latest[name]}.",
            )
            for name in names
        ]
        return Planted(statements=tuple(statements), questions=tuple(questions))

    def score(self, prediction: str, sample: Sample) -> float:
        """Return 1 if the prediction contains the latest number."""
        return all_contained(prediction, sample.targets)


@dataclass(frozen=True, kw_only=True)
class Paraphrase(GeneratedTask):
    """Find the number of a city that the question calls by its country."""

    settable: ClassVar[tuple[str, ...]] = (*GeneratedTask.settable, "guests", "digits")
    name: str = "world/paraphrase"
    source: str = "NoLiMa (arXiv 2502.05167): the question shares no word with the needle; ours"
    metric: str = "string match, all"
    introduction: str = "Guests come from many cities. Remember what they carry."
    max_new_tokens: int = 24

    guests: int = 8
    """Guests in the text."""
    digits: int = 5
    """Digits of each number."""

    def plant(self, draw: Draw) -> Planted:
        """Return a sentence per guest, and a question for each."""
        statements, questions = [], []
        for _ in range(self.guests):
            city = draw.word(CITIES, "cities with a country")
            number = draw.number(self.digits)
            statements.append(f"The guest from {city} carries {number}.")
            questions.append(
                Question(
                    text=f"Which number was brought out of {COUNTRY_OF[city]}?", targets=(number,), reply=statements[-1]
                )
            )
        return Planted(statements=tuple(statements), questions=tuple(questions))

    def score(self, prediction: str, sample: Sample) -> float:
        """Return 1 if the prediction contains the number."""
        return all_contained(prediction, sample.targets)


CITIES = tuple(name for name in NAMES if name in COUNTRY_OF)
