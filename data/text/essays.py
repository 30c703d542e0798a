"""The text that needles are hidden in: essays from a local folder, or filler of our own."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from itertools import chain, cycle, islice
from pathlib import Path

from locret.data.text.filler import NOISE, Filler, FillerOptions

NOISE_LINE = " ".join(NOISE)
"""The noise of InfiniteBench and RULER, without a line end."""
_PLACES = ("PaulGrahamEssays", "niah/PaulGrahamEssays", "PaulGrahamEssays.json", "ruler/PaulGrahamEssays.json")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_PLAIN = FillerOptions(number_share=0.0, keylike_share=0.0)
"""Essays hold few numbers and no look-alikes of needles, and so does what stands in for them."""


FILLER = "filler"
"""What tables call a haystack of our own in place of the essays."""


def haystack_source(data_dir: Path | None) -> str:
    """Return where a haystack's text comes from, for results.json."""
    return "our own filler, not the published essays" if data_dir is None else f"essays in {data_dir.name}"


def read_essays(data_dir: Path) -> list[str]:
    """Return the texts of an essay collection, in the order of their file names.

    Args:
        data_dir: Holds a folder `PaulGrahamEssays` of text files, itself or in `niah/`; or RULER's file
            `PaulGrahamEssays.json`, one object with all of them in `text`.

    Raises:
        ValueError: If there is none, or a file is not UTF-8.
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


def essay_words(data_dir: Path | None, seed: int) -> Iterator[str]:
    """Yield the words of the haystack without end: the essays over and over, or filler.

    Args:
        data_dir: Where the essays lie; None for filler.
        seed: Of the filler.
    """
    if data_dir is not None:
        words = [word for text in read_essays(data_dir) for word in text.split()]
        return cycle(words)
    return chain.from_iterable(sentence.split() for sentence in filler_sentences(seed))


def filler_sentences(seed: int) -> Iterator[str]:
    """Yield sentences of our own without end, without numbers."""
    filler = Filler(random.Random(f"locret/haystack/{seed}"), _PLAIN)
    while True:
        yield filler.sentence()


def sentences(text: str) -> list[str]:
    """Split a text at white space after a full stop, question or exclamation mark."""
    return [sentence for sentence in _SENTENCE_END.split(text.strip()) if sentence]


class Words:
    """Words of the essays, or of the filler that stands in for them, read no further than needed."""

    def __init__(self, data_dir: Path | None, seed: int) -> None:
        self.name = FILLER if data_dir is None else "essays"
        self._more = essay_words(data_dir, seed)
        self._read: list[str] = []

    def first(self, count: int) -> list[str]:
        """Return the first `count` words."""
        self._read.extend(islice(self._more, max(0, count - len(self._read))))
        return self._read[:count]
