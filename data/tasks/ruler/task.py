"""A RULER task: makes its rows for any tokenizer and length, or reads published ones."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from locret.data.tasks.metrics.retrieval import all_contained, any_contained
from locret.data.tasks.published.base import Making, RowMaker
from locret.data.tasks.rows import Row
from locret.data.tasks.task import Sample

PROMPTS: dict[str, list[str]] = json.loads(Path(__file__).with_name("prompts.json").read_text(encoding="utf-8"))
"""RULER's templates, and how answers begin."""


class Draft(NamedTuple):
    """A prompt without its length: `RulerTask` looks for the size that fills it."""

    prompt: str
    prefix: str
    """How the answer begins."""
    outputs: tuple[str, ...]
    depths: tuple[float, ...] = ()
    """Where each fact is, from 0 to 1 of the haystack's sentences or lines."""


Drafter = Callable[[random.Random, int, int], Draft]
"""From a random stream, a row's number and a size to a prompt."""


@dataclass(frozen=True, kw_only=True)
class RulerTask(RowMaker):
    """One of the thirteen tasks. Fields of a row: index, input, outputs, answer_prefix, and depths of ours.

    Deviations from RULER's generator, which say nothing about the task: own random streams; sentences end at
    punctuation before white space (RULER asks NLTK); the prompt fills its length to the last unit (RULER: to the last
    25 lines or 500 words); a key that is asked for stands in no other needle of a needle haystack.
    """

    settable: ClassVar[tuple[str, ...]] = (*RowMaker.settable, "chat", "words")
    needs_length: ClassVar[bool] = True

    source: str = "RULER (arXiv 2404.06654), NVIDIA/RULER"
    words: Literal["own", "wonderwords"] = "own"
    """Where keys and words come from: ours, or RULER's lists (of the package of that name)."""
    drafter: Callable[[RulerTask, Making], Drafter]
    """Makes what writes a prompt of a size."""
    unit: int
    """Tokens that size 1 costs, roughly: where to look first."""
    least: int = 1
    """The smallest size that makes sense."""
    every: bool = True
    """Whether all references count, or any is enough."""
    own: str = ""
    """What stands in for RULER's texts unless they are given: "filler" or "own words"."""

    def stand_in(self, data_dir: Path | None) -> str:
        """Return "filler" where essays are missing, or "own words"; words of keys say too little to count."""
        there = data_dir is not None if self.own == "filler" else self.words != "own"
        return "" if there else self.own

    def maker(self, of: Making) -> Callable[[int], dict[str, Any]]:
        """Return what makes row `index`."""
        draft = self.drafter(self, of)

        def row(rng: random.Random, index: int, size: int) -> dict[str, Any]:
            prompt, prefix, outputs, depths = draft(rng, index, size)
            made = {"index": index, "input": prompt, "outputs": list(outputs), "answer_prefix": prefix}
            return made | ({"depths": list(depths)} if depths else {})

        return self.filled(of, row, guess=max(1, (of.tokens or 0) // self.unit), least=self.least)

    def read(self, row: Row) -> list[Sample]:
        """Return the sample of a row. `index` of the row is no row number: RULER writes a character offset there."""
        content, lead, outputs = row.text("input"), row.text("answer_prefix"), row.texts("outputs")
        said = outputs if self.every else outputs[:1]
        document, line, question = content.rpartition("\n")  # in all thirteen the last line asks
        more = {"depths": tuple(row.fields.get("depths", ())), "lead": lead, "question": question}
        return [self.sample_of(row, "", document + line, question, outputs, reply=", ".join(said), **more)]

    def score(self, prediction: str, sample: Sample) -> float:
        """Return the share of references in the answer, or whether any is there, in any case."""
        return (all_contained if self.every else any_contained)(prediction, sample.targets)
