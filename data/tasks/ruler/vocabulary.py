"""The words of RULER's keys and lists: our own by default, or those of the wonderwords package, as RULER has them."""

from __future__ import annotations

import json
import random
from functools import lru_cache
from importlib import resources
from itertools import product
from pathlib import Path
from typing import NamedTuple

_SYLLABLES = ["".join(pair) for pair in product("bdfgklmnprstvz", "aeiou")]


class Vocabulary(NamedTuple):
    """Parts of keys (`calm-river`), and words that stand alone."""

    adjectives: tuple[str, ...]
    nouns: tuple[str, ...]
    words: tuple[str, ...]

    def key(self, rng: random.Random) -> str:
        """Return an adjective and a noun joined by a hyphen."""
        return f"{rng.choice(self.adjectives)}-{rng.choice(self.nouns)}"

    def distinct(self, rng: random.Random, count: int) -> list[str]:
        """Return that many different words; invented ones of four syllables if there are not enough real ones.

        RULER turns to a longer list of English words in that case; 24 million words can be invented.
        """
        if count <= len(self.words):
            return rng.sample(self.words, count)
        # Numbers written in base 70 are all different words.
        size = len(_SYLLABLES)
        return [
            "".join(_SYLLABLES[number // size**place % size] for place in range(4))
            for number in rng.sample(range(size**4), count)
        ]


@lru_cache
def vocabulary(source: str) -> Vocabulary:
    """Return the words of a source: "own" or "wonderwords"."""
    if source == "own":
        own = json.loads(Path(__file__).with_name("words.json").read_text(encoding="utf-8"))
        adjectives, nouns = (tuple(" ".join(own[kind]).split()) for kind in ("adjectives", "nouns"))
        return Vocabulary(adjectives, nouns, tuple(sorted({*adjectives, *nouns})))
    try:
        folder = resources.files("wonderwords") / "assets"
    except ModuleNotFoundError:
        raise ValueError(
            'words="wonderwords" needs the package of that name; install it with `pip install wonderwords`, '
            'or use words="own"'
        ) from None
    texts = [(folder / f"{kind}list.txt").read_text(encoding="utf-8") for kind in ("adjective", "noun", "verb")]
    adjectives, nouns, verbs = (tuple(sorted({word.strip() for word in text.split("\n")} - {""})) for text in texts)
    return Vocabulary(adjectives, nouns, tuple(sorted({*adjectives, *nouns, *verbs})))
