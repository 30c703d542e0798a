"""Filler sentences full of look-alikes, and the seeded random streams all generated texts come from.

Distractors are there on purpose: numbers of as many digits as the facts (`The tower has 31764 steps.`) and sentences
that look like keys (`The garden key is 90412.`), so neither "keep the digits" nor "keep what follows *key is*" wins.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from locret.data.text.words import ADJECTIVES, COLORS, NAMES, NOUNS, PLACES, TIMES, VARIABLES, VERBS

Split = Literal["train", "eval"]
NOISE = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")
"""The noise line of InfiniteBench's R.PassKey and R.Number."""
_PLURALS = ("steps", "coins", "pages", "pieces", "lines")


@dataclass(frozen=True, kw_only=True)
class FillerOptions:
    """What the text around the facts looks like."""

    number_share: float = 0.15
    """Share of filler sentences that hold a number (0 to 1)."""
    keylike_share: float = 0.1
    """Share of filler sentences that look like a fact but are none (0 to 1); most of them hold a number too."""
    digits: tuple[int, ...] = (5, 7, 10)
    """Digits of the numbers in filler, as many as the tasks' numbers have; each is as likely as the others."""

    def __post_init__(self) -> None:
        for name in ("number_share", "keylike_share"):
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

    def sentence(self) -> str:
        """Return the next sentence; it never states what a task asks for."""
        kind = self.rng.random()
        if kind < self.options.keylike_share:
            return self._keylike()
        kind -= self.options.keylike_share
        if kind < self.options.number_share:
            return f"The {self._noun()} has {self.number()} {self.rng.choice(_PLURALS)}."
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


def generator(seed: int | str, split: Split, *what: object) -> random.Random:
    """Return the random stream of one seed: streams of different splits or purposes never coincide.

    Raises:
        ValueError: Where the split is neither "train" nor "eval".
    """
    if split not in ("train", "eval"):
        raise ValueError(f'split={split!r} is not a split; use "train" or "eval"')
    return random.Random("/".join(map(str, ("locret", split, *what, seed))))
