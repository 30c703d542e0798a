"""RULER's needle tasks: keys with magic values in noise, in essays, or among other needles."""

from __future__ import annotations

import random
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from locret.data.tasks.ruler.task import Draft, Drafter, RulerTask, Setting
from locret.data.tasks.ruler.vocabulary import Vocabulary, word_source
from locret.data.text.essays import FILLER, NOISE_LINE, Words, haystack_source, sentences

DEPTHS = tuple(round(100 * step / 39) for step in range(40))
"""Where needles may stand in essays, in per cent of the sentences."""
_ONE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "{kind} afterwards.\n{text}\nWhat is the special magic {kind} for {query} mentioned in the provided text?",
    " The special magic {kind} for {query} mentioned in the provided text is",
)
_SEVERAL = (
    "Some special magic {kind}s are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the {kind}s afterwards.\n{text}\nWhat are all the special magic {kind}s for {query} mentioned in the provided "
    "text?",
    " The special magic {kind}s for {query} mentioned in the provided text are",
)


@dataclass(frozen=True, kw_only=True)
class Needles(RulerTask):
    """One needle task."""

    haystack: Literal["noise", "essay", "needle"]
    key: Literal["word", "uuid"] = "word"
    value: Literal["number", "uuid"] = "number"
    keys: int = 1
    values: int = 1
    """Values of each key."""
    queries: int = 1
    """Keys asked for."""

    opening: ClassVar[str] = " The special magic "
    unit: ClassVar[int] = 25

    @property
    def single_needle(self) -> bool:
        """Whether it hides one needle, alone."""
        return self.haystack != "needle" and self.keys * self.values * self.queries == 1

    @property
    def least(self) -> int:  # type: ignore[override]
        """The shortest haystack: as many lines as needles; a word of an essay."""
        return 1 if self.haystack == "essay" else max(self.keys, self.queries) * self.values

    def texts(self, data_dir: Path | None) -> str | None:
        """Return where haystack and keys come from."""
        hay = [haystack_source(data_dir)] if self.haystack == "essay" else []
        return "; ".join([*hay, *([word_source(self.words)] if self.key == "word" else [])]) or None

    def stand_in(self, data_dir: Path | None) -> str:
        """Return "filler" where essays are missing; words of keys say too little to count."""
        return FILLER if self.haystack == "essay" and data_dir is None else ""

    def drafter(self, setting: Setting) -> tuple[Drafter, str]:
        """Return what writes a prompt, and whether its haystack is "essays" or "filler"."""
        essay = self.haystack == "essay"
        source = Words(setting.data_dir if essay else None, setting.seed)
        return (lambda rng, _, size: self.draft(rng, size, setting.words, source)), source.name if essay else ""

    def draft(self, rng: random.Random, size: int, words: Vocabulary, source: Words) -> Draft:
        """Return a prompt whose haystack has `size` lines (noise, needles) or words (essays)."""
        keys = [self._key(rng, words) for _ in range(max(self.keys, self.queries))]
        facts = {key: [self._value(rng) for _ in range(self.values)] for key in keys}
        needles = [self._sentence(key, value) for key, found in facts.items() for value in found]
        rng.shuffle(needles)
        asked = rng.sample(keys, self.queries)
        outputs = tuple(value for key in asked for value in facts[key])
        place = self._in_essay if self.haystack == "essay" else self._in_lines
        text, depths = place(rng, needles, size, words, source, set(keys))
        query = asked[0] if len(asked) == 1 else ", ".join(asked[:-1]) + ", and " + asked[-1]
        prompt, prefix = _ONE if len(outputs) == 1 else _SEVERAL
        return Draft(
            prompt.format(kind=self.value, text=text, query=query),
            prefix.format(kind=self.value, query=query),
            outputs,
            depths,
        )

    def _in_essay(
        self, rng: random.Random, needles: list[str], size: int, words: Vocabulary, source: Words, _: set[str]
    ) -> tuple[str, tuple[float, ...]]:
        lines = sentences(" ".join(source.first(size)))
        depths = sorted(rng.sample(DEPTHS, len(needles)))
        pieces, last = [], 0
        for depth, needle in zip(depths, needles, strict=True):
            place = len(lines) * depth // 100
            pieces += [*lines[last:place], needle]
            last = place
        return " ".join([*pieces, *lines[last:]]), tuple(depth / 100 for depth in depths)

    def _in_lines(
        self, rng: random.Random, needles: list[str], size: int, words: Vocabulary, _: Words, taken: set[str]
    ) -> tuple[str, tuple[float, ...]]:
        if self.haystack == "noise":
            lines = [NOISE_LINE] * size
        else:
            lines = [self._sentence(self._key(rng, words, taken), self._value(rng)) for _ in range(size)]
        places = sorted(rng.sample(range(size), len(needles)), reverse=True)
        for place, needle in zip(places, needles, strict=True):
            lines.insert(place, needle)
        return "\n".join(lines), tuple(place / size for place in places)

    def _key(self, rng: random.Random, words: Vocabulary, taken: set[str] = frozenset()) -> str:  # type: ignore[assignment]
        # A line of the haystack with a key that is asked for would make the answer ambiguous.
        while (key := words.key(rng) if self.key == "word" else _uuid(rng)) in taken:
            pass
        return key

    def _value(self, rng: random.Random) -> str:
        return str(rng.randint(10**6, 10**7 - 1)) if self.value == "number" else _uuid(rng)

    def _sentence(self, key: str, value: str) -> str:
        return f"One of the special magic {self.value}s for {key} is: {value}."


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))
