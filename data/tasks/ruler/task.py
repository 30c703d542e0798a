"""A RULER task: makes its rows for any tokenizer and length, or reads published ones of either layout."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from locret.data.tasks.metrics.retrieval import all_contained, any_contained
from locret.data.tasks.published.row_maker import RowMaker, counter, frame_tokens
from locret.data.tasks.ruler.vocabulary import Vocabulary, vocabulary
from locret.data.tasks.task import Sample
from locret.data.training.json_rows import BadRow, text_of, texts_of


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
class RulerTask(RowMaker):
    """One of the thirteen tasks. Fields of a row: index, input, outputs, length, answer_prefix.

    In the older layout `input` ends with what the answer begins with; in the newer that stands in `answer_prefix`.
    Deviations from RULER's generator, which say nothing about the task: own random streams; sentences end at
    punctuation before white space (RULER asks NLTK); the prompt fills its length to the last unit (RULER: to the last
    25 lines or 500 words); a key that is asked for stands in no other needle of a needle haystack.
    """

    settable: ClassVar[tuple[str, ...]] = (*RowMaker.settable, "chat", "words")

    opening: ClassVar[str]
    """The first words of how the answer begins, by which the older layout is split."""
    unit: ClassVar[int]
    """Tokens that size 1 costs, roughly: where to look first."""
    least: ClassVar[int]
    """The smallest size that makes sense."""
    match: ClassVar[Literal["all", "part"]] = "all"
    """Whether all references count, or any is enough."""

    metric: str = "string match, all"
    source: str = "RULER (arXiv 2404.06654), NVIDIA/RULER"
    words: str = "own"
    """Where keys and words come from: "own", or "wonderwords" (RULER's lists; needs that package)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        vocabulary(self.words)

    @abstractmethod
    def drafter(self, setting: Setting) -> tuple[Drafter, str]:
        """Return what writes a prompt of a size, and which of several forms it has, in a word or two.

        Raises:
            ValueError: If a source text is missing.
        """

    def maker(
        self, tokenizer: Any, tokens: int | None, *, samples: int, seed: int, data_dir: Path | None
    ) -> Callable[[int], dict[str, Any]]:
        """Return what makes row `index`; see `RowMaker.maker`."""
        if tokens is None:
            raise ValueError(f"tokens: {self.name} has no length of its own; give one, such as 4096")
        count, around = counter(tokenizer), frame_tokens(self, tokenizer) + self.max_new_tokens
        draft, form = self.drafter(
            Setting(
                count=count,
                words=vocabulary(self.words),
                tokens=tokens,
                answer_tokens=self.max_new_tokens,
                seed=seed,
                data_dir=data_dir,
            )
        )

        def row(rng: random.Random, index: int, size: int) -> dict[str, Any]:
            found = draft(rng, index, size)
            made = {"index": index, "input": found.prompt, "outputs": list(found.outputs)}
            made |= {"answer_prefix": found.prefix} | ({"depths": list(found.depths)} if found.depths else {})
            return made | ({"form": form} if form else {})

        guess, least = max(1, tokens // self.unit), self.least
        make = self.filled(tokenizer, tokens, seed, row, guess=guess, least=least)

        def whole(index: int) -> dict[str, Any]:
            made = make(index)
            return made | {"length": count(made["input"] + made["answer_prefix"]) + around}

        return whole

    def read(self, index: int, where: str, record: Mapping[str, Any]) -> list[Sample]:
        """Return the sample of a row of either layout. `index` of the row is not a row number: the newer generator
        writes a character offset there.

        Raises:
            BadRow: If a field is missing, empty or of the wrong type.
        """
        content, outputs = text_of(record, where, "input"), texts_of(record, where, "outputs")
        if "answer_prefix" in record:
            lead = text_of(record, where, "answer_prefix")
        else:
            start = content.rfind(self.opening)
            if start < 0:
                detail = f"has a field 'input' that does not end with how an answer begins ({self.opening!r} ...)"
                raise BadRow(where, "no answer prefix", detail)
            content, lead = content[:start], content[start:]
        said = outputs if self.match == "all" else outputs[:1]
        return [
            Sample(
                id=str(index),
                content=content,
                targets=outputs,
                reply=", ".join(said),
                depths=tuple(record.get("depths", ())),
                lead=lead,
            )
        ]

    def score(self, prediction: str, sample: Sample) -> float:
        """Return the share of references in the answer ("all"), or whether any is there ("part"), in any case."""
        return (all_contained if self.match == "all" else any_contained)(prediction, sample.targets)
