"""What a RULER task needs to write a prompt, and what it writes: a draft, whose size is then fitted to the length."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from locret.data.tasks.ruler.vocabulary import Vocabulary


@dataclass(frozen=True)
class Draft:
    """A prompt without its length: `RulerTask` looks for the size that fills it."""

    prompt: str
    prefix: str
    """How the answer begins."""
    outputs: tuple[str, ...]
    depths: tuple[float, ...] = ()
    """Where each fact is, from 0 to 1 of the haystack's sentences or lines."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all rows of a task share."""

    count: Callable[[str], int]
    """Tokens of a text."""
    words: Vocabulary
    tokens: int
    """Length of prompt and answer together."""
    answer_tokens: int
    seed: int
    data_dir: Path | None


Drafter = Callable[[random.Random, int, int], Draft]
"""From a random stream, a row's number and a size to a prompt."""


@dataclass(frozen=True, kw_only=True)
class Kind(ABC):
    """What a task asks."""

    lead: ClassVar[str]
    """The first words of how the answer begins, by which the older layout is split."""
    unit: ClassVar[int]
    """Tokens that size 1 costs, roughly: where to look first."""
    least: ClassVar[int]
    """The smallest size that makes sense."""

    @abstractmethod
    def drafter(self, setting: Setting) -> tuple[Drafter, str]:
        """Return what writes a prompt of a size, and which of several forms it has, in a word or two.

        Raises:
            ValueError: If a source text is missing.
        """
