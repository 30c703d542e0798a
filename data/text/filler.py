"""Filler sentences full of look-alikes, and the seeded random streams all generated texts come from.

Distractors are there on purpose: numbers of as many digits as the facts (`The tower has 31764 steps.`) and sentences
that look like keys (`The garden key is 90412.`), so neither "keep the digits" nor "keep what follows *key is*" wins.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Literal

from locret.data.text.words import ADJECTIVES, COLORS, NAMES, NOUNS, PLACES, ROOMS, THINGS, TIMES, VARIABLES, VERBS

Split = Literal["train", "eval"]
NOISE = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")
"""The noise line of InfiniteBench's R.PassKey and R.Number."""
_LONG = 4
"""Digits from which on numbers are values, which are drawn anew for every fact."""
_TRIES = 32
"""Draws of a look-alike about something else, before a plain sentence stands there."""
_THINGS = frozenset(word.lower() for word in (*NAMES, *NOUNS, *ROOMS, *THINGS, *VARIABLES))
"""What facts are about."""
_PLURALS = ("steps", "coins", "pages", "pieces", "lines")


@dataclass(frozen=True, kw_only=True)
class FillerOptions:
    """What the text around the facts looks like."""

    number_share: float = 0.15
    """Share of filler sentences that hold a number (0 to 1)."""
    keylike_share: float = 0.1
    """Share of filler sentences that look like a fact but are none (0 to 1); most of them hold a number too."""
    lookalike_share: float = 0.0
    """Share of filler sentences that have a fact's own marks and words (colons, equals signs, bare numbers, stories)
    and are about what nobody asks (0 to 1)."""
    digits: tuple[int, ...] = (5, 7, 10)
    """Digits of the numbers in filler, as many as the tasks' numbers have; each is as likely as the others."""
    noise_share: float = 0.0
    """Share of the filler that is the noise line of InfiniteBench ("The grass is green. ..."), 0 to 1."""

    def __post_init__(self) -> None:
        for name in ("number_share", "keylike_share", "noise_share", "lookalike_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} is not a share; give a number from 0 to 1")
        if not self.digits or min(self.digits) < 1:
            raise ValueError(
                f"digits={self.digits} leaves no number to write; give one or more lengths, each at least 1"
            )


class Filler:
    """An endless source of filler sentences, the same for the same generator state."""

    def __init__(self, rng: random.Random, options: FillerOptions | None = None):
        self.rng = rng
        self.options = options or FillerOptions()
        self.about: frozenset[str] = frozenset()
        """What look-alikes are not about; see `things_of`."""
        self._line: list[str] = []
        """What is left of a noise line."""

    def sentence(self) -> str:
        """Return the next sentence; it never states what a task asks for."""
        if self._line:
            return self._line.pop()
        kind = self.rng.random()
        if kind < self.options.keylike_share:
            return self._keylike()
        # Asked only where it matters, so that the streams of other texts stay as they are.
        if self.options.lookalike_share and self.rng.random() < self.options.lookalike_share:
            return self._about_others()
        kind -= self.options.keylike_share
        if kind < self.options.number_share:
            return f"The {self._noun()} has {self.number()} {self.rng.choice(_PLURALS)}."
        if self.options.noise_share and self.rng.random() < self.options.noise_share:
            self._line = list(reversed(NOISE))
            return self._line.pop()
        return self._plain()

    def number(self) -> str:
        """Return a number without a leading zero."""
        digits = self.rng.choice(self.options.digits)
        return str(self.rng.randrange(10 ** (digits - 1), 10**digits))

    def _noun(self) -> str:
        return self.rng.choice(NOUNS)

    def _plain(self) -> str:
        choice, noun = self.rng.choice, self._noun
        forms = (
            lambda: f"The {choice(ADJECTIVES)} {noun()} {choice(VERBS)} {choice(PLACES)} the {noun()}.",
            lambda: f"A {noun()} is {choice(ADJECTIVES)} and {choice(ADJECTIVES)}.",
            lambda: f"They say that {choice(NAMES)} is {choice(ADJECTIVES)}.",
            lambda: f"We go from {choice(NAMES)} to {choice(NAMES)} {choice(TIMES)}.",
            lambda: f"The {noun()} {choice(VERBS)} {choice(TIMES)}, but the {noun()} is {choice(ADJECTIVES)}.",
        )
        return choice(forms)()

    def _keylike(self) -> str:
        choice, noun = self.rng.choice, self._noun
        forms = (
            lambda: f"The {noun()} key is {self.number()}.",
            lambda: f"The pass of the {noun()} is {self.number()}.",
            lambda: f"The number of the {noun()} is {self.number()}. Remember it.",
            lambda: f"The sequence of lines in the {noun()} book is {self.number()}.",
            lambda: f"One of the {choice(ADJECTIVES)} numbers in {choice(NAMES)} is {self.number()}.",
            lambda: f"The magic of {choice(NAMES)} is {choice(ADJECTIVES)}.",
            lambda: f"Some special numbers for {choice(NAMES)} were lost.",
            lambda: f"The variable {choice(VARIABLES)} was not assigned.",
            lambda: f"The value for the {noun()} is {choice(COLORS)}.",
            lambda: "The pass key was lost.",
            lambda: f"The number of {choice(NAMES)} was unknown.",
        )
        return choice(forms)()

    def _about_others(self) -> str:
        for _ in range(_TRIES):
            found = self._lookalike()
            if not self.about & _things(found):
                return found
        return self._plain()

    def _lookalike(self) -> str:
        choice, noun, number = self.rng.choice, self._noun, self.number
        forms = (
            lambda: f"One of the special magic numbers for the {noun()} is: {number()}.",
            lambda: f"The {noun()} key is: {number()}.",
            lambda: f"VAR {noun()} = {number()}.",
            lambda: f"The {noun()} = {number()}.",
            lambda: f"{number()} {number()} {number()}.",
            lambda: f"The {choice(COLORS)} {noun()} vault holds {number()}.",
            lambda: f"The badge of the {noun()} is {number()}.",
            lambda: f"The guest of the {noun()} carries {number()}.",
            lambda: f"The code of the {noun()} is now {number()}.",
            lambda: f"The {noun()} is worth {self.rng.randrange(10, 100)} coins.",
            lambda: f"The string of the {noun()} is {choice(NAMES)} {choice(COLORS)} {choice(NAMES)}.",
            lambda: f"Nobody went to the {choice(ROOMS)}.",
            lambda: f"Somebody took the {choice(THINGS)} to the {choice(ROOMS)}.",
            lambda: f"The {noun()} is {choice(('north', 'south', 'east', 'west'))} of {choice(NAMES)}.",
            lambda: f"From the {noun()} go to the {noun()}.",
            lambda: f"Number {self.rng.randrange(10, 100)} is unknown.",
            lambda: f"A {noun()} goes away.",
            lambda: f"The goal of the {noun()} is unknown.",
        )
        return choice(forms)()


def things_of(*texts: str) -> frozenset[str]:
    """Return the people, places, things, variables and short numbers that texts are about."""
    return frozenset().union(*map(_things, texts))


def _things(text: str) -> frozenset[str]:
    words = frozenset(re.findall(r"\w+", text.lower()))
    return words & _THINGS | {word for word in words if word.isdigit() and len(word) < _LONG}


def generator(seed: int | str, split: Split, *what: object) -> random.Random:
    """Return the random stream of one seed: streams of different splits or purposes never coincide.

    Raises:
        ValueError: Where the split is neither "train" nor "eval".
    """
    if split not in ("train", "eval"):
        raise ValueError(f'split={split!r} is not a split; use "train" or "eval"')
    return random.Random("/".join(map(str, ("locret", split, *what, seed))))
