"""The text that needles are hidden in: essays from a local folder, or filler of our own."""

from __future__ import annotations

import json
import random
import re
import uuid
from collections.abc import Iterator
from itertools import chain, cycle, islice
from pathlib import Path

NOISE_LINE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""The noise of InfiniteBench and RULER, without a line end."""
FILLER = "filler"
"""What tables call a haystack of our own in place of the essays."""
_PLACES = ("PaulGrahamEssays", "niah/PaulGrahamEssays", "PaulGrahamEssays.json", "ruler/PaulGrahamEssays.json")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_WORDS = {
    name: tuple(text.split()) for name, text in json.loads(Path(__file__).with_name("filler.json").read_text()).items()
}


def read_essays(data_dir: Path) -> list[str]:
    """Return the texts of an essay collection, in the order of their file names.

    They are text files of a folder `PaulGrahamEssays`, itself or in `niah/`, or RULER's file `PaulGrahamEssays.json`,
    one object with all of them in `text`.
    """
    for place in (data_dir, *(data_dir / name for name in _PLACES)):
        try:
            if place.suffix == ".json" and place.is_file():
                return [str(json.loads(place.read_text(encoding="utf-8"))["text"])]
            if place.name == "PaulGrahamEssays" and place.is_dir():
                texts = [path.read_text(encoding="utf-8") for path in sorted(place.glob("*.txt"))]
                if texts := [text for text in texts if text.strip()]:
                    return texts
        except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"--data-dir {data_dir}: {place} cannot be read as essays ({error}); get it anew"
            ) from None
    raise ValueError(
        f"--data-dir {data_dir} holds no essays (looked for {', '.join(_PLACES)}); add them, or leave --data-dir out "
        "to hide needles in filler"
    )


def filler_sentences(seed: int) -> Iterator[str]:
    """Yield sentences of our own without end, without numbers and look-alikes of needles, as essays are."""
    rng = random.Random(f"locret/haystack/{seed}")

    def word(kind: str) -> str:
        return rng.choice(_WORDS[kind])

    forms = (
        lambda: f"The {word('adjectives')} {word('nouns')} {word('verbs')} {word('places')} the {word('nouns')}.",
        lambda: f"A {word('nouns')} is {word('adjectives')} and {word('adjectives')}.",
        lambda: f"They say that {word('names')} is {word('adjectives')}.",
        lambda: f"We go from {word('names')} to {word('names')} {word('times')}.",
        lambda: (
            f"The {word('nouns')} {word('verbs')} {word('times')}, but the {word('nouns')} is {word('adjectives')}."
        ),
    )
    while True:
        rng.random()  # one draw a sentence, as every text of earlier releases has it
        yield rng.choice(forms)()


def sentences(text: str) -> list[str]:
    """Split a text at white space after a full stop, question or exclamation mark."""
    return [sentence for sentence in _SENTENCE_END.split(text.strip()) if sentence]


def random_uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


class Words:
    """Words of the essays over and over, or of the filler that stands in for them, read no further than needed."""

    def __init__(self, data_dir: Path | None, seed: int) -> None:
        texts = filler_sentences(seed) if data_dir is None else read_essays(data_dir)
        words = chain.from_iterable(text.split() for text in texts)
        self._more = words if data_dir is None else cycle(words)
        self._read: list[str] = []

    def first(self, count: int) -> list[str]:
        """Return the first `count` words."""
        self._read.extend(islice(self._more, max(0, count - len(self._read))))
        return self._read[:count]
