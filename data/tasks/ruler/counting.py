"""RULER's aggregation tasks: the most common words of a list, the most frequent words of a coded text."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import ClassVar

from locret.data.tasks.ruler.task import Draft, Drafter, RulerTask, Setting
from locret.data.tasks.ruler.vocabulary import Vocabulary, word_source

_CWE = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{list}\nQuestion: What are the 10 most common words in the above list?"
)
_CWE_PREFIX = " Answer: The top 10 words that appear most often in the list are:"
_FWE = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. {text}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three "
    "most frequently appeared words in the above coded text?"
)
_FWE_PREFIX = " Answer: According to the coded text above, the three most frequently appeared words are:"
SHORT = 4096
"""Below this length RULER repeats words less often."""
_PROBES = 8
"""Smallest prompts that are looked at: words have as many tokens as a tokenizer gives them."""


@dataclass(frozen=True, kw_only=True)
class CommonWords(RulerTask):
    """Ten words appear often, all others rarely; the size is the number of different words."""

    common: int = 10
    often: int = 30
    rarely: int = 3
    opening: ClassVar[str] = " Answer: The top 10 words "
    unit: ClassVar[int] = 15
    least: ClassVar[int] = 12

    def texts(self, data_dir: Path | None) -> str:
        """Return where the words come from."""
        return word_source(self.words)

    def stand_in(self, data_dir: Path | None) -> str:
        """Return "own words" where the words are not RULER's."""
        return "own words" if self.words == "own" else ""

    def drafter(self, setting: Setting) -> tuple[Drafter, str]:
        """Return what writes a prompt, and "short lists" where a length or tokenizer leaves little room."""
        probes = [self.draft(random.Random(draw), self.least, setting.words).prompt for draw in range(_PROBES)]
        long = setting.tokens >= SHORT and max(map(setting.count, probes)) < 0.9 * setting.tokens
        form = "" if long else "short lists"
        return (lambda rng, _, size: self.draft(rng, size, setting.words, short=not long)), form

    def draft(self, rng: random.Random, size: int, words: Vocabulary, *, short: bool = False) -> Draft:
        """Return a prompt about `size` different words, after one worked example of 40 words, or 20 if it is short."""
        shown, said = self._list(rng, 20 if short else 40, words, *((3, 1) if short else (10, 3)))
        answer = " ".join(f"{place}. {word}" for place, word in enumerate(said, 1))
        asked, outputs = self._list(rng, size, words, *((6, 1) if short else (self.often, self.rarely)))
        prompt = f"{_CWE.format(list=shown)}{_CWE_PREFIX} {answer}\n{_CWE.format(list=asked)}"
        return Draft(prompt, _CWE_PREFIX, tuple(outputs))

    def _list(self, rng: random.Random, size: int, words: Vocabulary, often: int, rarely: int) -> tuple[str, list[str]]:
        drawn = words.distinct(rng, size)
        common, others = drawn[: self.common], drawn[self.common :]
        entries = common * often + others * rarely
        rng.shuffle(entries)
        return " ".join(f"{place}. {word}" for place, word in enumerate(entries, 1)), common


@dataclass(frozen=True, kw_only=True)
class FrequentWords(RulerTask):
    """Coded words whose frequencies follow a Zipf law; the most frequent one is noise, shown as dots."""

    alpha: float = 2.0
    letters: int = 6
    asked: int = 3
    opening: ClassVar[str] = " Answer: According to the coded text above"
    unit: ClassVar[int] = 5
    least: ClassVar[int] = 60

    def drafter(self, setting: Setting) -> tuple[Drafter, str]:
        """Return what writes a prompt."""
        return (lambda rng, _, size: self.draft(rng, size)), ""

    def draft(self, rng: random.Random, size: int) -> Draft:
        """Return a prompt whose coded text has about `size` words: word k appears size / (k^alpha zeta(alpha)) times.

        The sum over all k is `size`; each count is rounded down, and words that would not appear are left out.
        """
        names: list[str] = ["..."]
        text: list[str] = []
        total = _zeta(self.alpha)
        for rank in count(1):
            times = int(size / (rank**self.alpha * total))
            if not times:
                break
            while rank > len(names):
                if (name := "".join(rng.choices(string.ascii_lowercase, k=self.letters))) not in names:
                    names.append(name)
            text += [names[rank - 1]] * times
        rng.shuffle(text)
        return Draft(_FWE.format(text=" ".join(text)), _FWE_PREFIX, tuple(names[1 : self.asked + 1]))


def _zeta(alpha: float, terms: int = 1000) -> float:
    """Return the sum of 1/k^alpha over all k: terms one by one, the rest by the Euler-Maclaurin formula."""
    head = sum(rank**-alpha for rank in range(1, terms))
    return head + terms ** (1 - alpha) / (alpha - 1) + terms**-alpha / 2
