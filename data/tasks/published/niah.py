"""Needle in a haystack: one statement in essays, over a grid of lengths and depths.

Source:    gkamradt/LLMTest_NeedleInAHaystack (needle, essays), THUDM/LongAlign Needle_test (prompt, question, depths
           from 10 to 90 per cent); the pass key of IM/IMDC in the same essays, with InfiniteBench's wording.
Fields:    context, question, answer, depth.
Deviates:  the published metric is a judge's mark; here it is the share of the needle's words in the answer, which no
           judge is needed for. Depths are shares of the sentences, not of the tokens. Answers have 128 tokens
           (LongAlign: 1024, sampled at temperature 0.1), greedy. Without essays the haystack is filler of our own.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from locret.data.tasks.metrics.retrieval import first_integer
from locret.data.tasks.published.infinitebench_generated import draw_answer, needle_line, question
from locret.data.tasks.published.row_maker import RowMaker, spread
from locret.data.tasks.task import Sample
from locret.data.text.essays import FILLER, Words, haystack_source, sentences
from locret.data.training.json_rows import text_of

SYSTEM = "You are a helpful AI bot that answers questions for a user. Keep your response short and direct"
ANSWER = "eat a sandwich and sit in Dolores Park on a sunny day"
NEEDLE = f"\nThe best thing to do in San Francisco is {ANSWER}.\n"
QUESTION = "What is the best thing to do in San Francisco? Here is the most relevant sentence in the context:"


@dataclass(frozen=True, kw_only=True)
class NeedleTask(RowMaker):
    """One needle in a haystack; the rows of a set are its depths."""

    settable: ClassVar[tuple[str, ...]] = (*RowMaker.settable, "chat", "min_depth", "max_depth")

    single_needle: ClassVar[bool] = True  # type: ignore[misc]
    passkey: bool = False
    """Hide a pass key that differs from row to row, instead of the statement that all rows share."""
    min_depth: int = 10
    """Depth of the first row, in per cent."""
    max_depth: int = 90
    """Depth of the last row, in per cent; those in between are even."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.min_depth <= self.max_depth <= 100:
            raise ValueError(
                f"task {self.name}: min_depth={self.min_depth}, max_depth={self.max_depth} is not a range of depths; "
                "give 0 to 100 per cent, the smaller one first"
            )

    def texts(self, data_dir: Path | None) -> str:
        """Return where the haystack comes from."""
        return haystack_source(data_dir)

    def stand_in(self, data_dir: Path | None) -> str:
        """Return "filler" where there are no essays."""
        return FILLER if data_dir is None else ""

    def maker(
        self, tokenizer: Any, tokens: int | None, *, samples: int, seed: int, data_dir: Path | None
    ) -> Callable[[int], dict[str, Any]]:
        """Return what makes row `index`; `data_dir` holds the essays, see `essays.read_essays`."""
        if tokens is None:
            raise ValueError(f"tokens: {self.name} has no length of its own; give one, such as 32768")
        words = Words(data_dir, seed)

        def row(rng: random.Random, index: int, size: int) -> dict[str, Any]:
            depth = spread(samples, index, self.min_depth / 100, self.max_depth / 100)
            return {**self._row(rng, words.first(size), depth), "haystack": words.name}

        return self.filled(tokenizer, tokens, seed, row, guess=max(1, tokens // 2), system=SYSTEM)

    def _row(self, rng: random.Random, words: list[str], depth: float) -> dict[str, Any]:
        needle, asked, answer = NEEDLE, QUESTION, ANSWER
        if self.passkey:
            answer = draw_answer("passkey", rng)
            needle, asked = f"\n{needle_line('passkey', answer)}\n", question("passkey")
        lines = sentences(" ".join(words))
        first = int(len(lines) * depth)
        context = " ".join(lines[:first]) + needle + " ".join(lines[first:])
        return {"context": context, "question": asked, "answer": answer, "depth": depth}

    def read(self, index: int, where: str, record: Mapping[str, Any]) -> list[Sample]:
        """Return the sample of a row."""
        context, answer = text_of(record, where, "context"), text_of(record, where, "answer")
        tail = f"\n\nRead the document and answer: {text_of(record, where, 'question')}"
        depths = (record["depth"],) if "depth" in record else ()
        return [self.sample_of(index, "", context, tail, (answer,), system=SYSTEM, depths=depths)]

    def score(self, prediction: str, sample: Sample) -> float:
        """Return the share of the needle's words in the answer; of a pass key, 1 if it is the first number."""
        if self.passkey:
            return first_integer(prediction, sample.targets[0])
        said, wanted = _words(prediction), _words(sample.targets[0])
        return len(said & wanted) / len(wanted)


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


def _task(name: str, metric: str, source: str, *, passkey: bool) -> NeedleTask:
    return NeedleTask(
        name=f"niah/{name}",
        source=source,
        metric=metric,
        max_new_tokens=128 if not passkey else 16,
        chat=True,
        file=f"{name}.jsonl",
        passkey=passkey,
    )


TASKS = (
    _task("needle", "share of the needle's words", "gkamradt/LLMTest_NeedleInAHaystack, LongAlign", passkey=False),
    _task("passkey", "first integer", "IM/IMDC's pass key in essays", passkey=True),
)
