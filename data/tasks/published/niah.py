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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from locret.data.tasks.made import FILLER, Words, sentences
from locret.data.tasks.metrics.retrieval import first_integer
from locret.data.tasks.published.base import Making, RowMaker, first, spread
from locret.data.tasks.published.infinitebench import needle
from locret.data.tasks.rows import Row
from locret.data.tasks.task import Sample

SYSTEM = "You are a helpful AI bot that answers questions for a user. Keep your response short and direct"
ANSWER = "eat a sandwich and sit in Dolores Park on a sunny day"
NEEDLE = f"\nThe best thing to do in San Francisco is {ANSWER}.\n"
QUESTION = "What is the best thing to do in San Francisco? Here is the most relevant sentence in the context:"
DEPTHS = 0.1, 0.9
"""Of the first row and of the last; those in between are even."""


@dataclass(frozen=True, kw_only=True)
class NeedleTask(RowMaker):
    """One needle in a haystack; the rows of a set are its depths."""

    settable: ClassVar[tuple[str, ...]] = (*RowMaker.settable, "chat")
    needs_length: ClassVar[bool] = True

    passkey: bool = False
    """Hide a pass key that differs from row to row, instead of the statement that all rows share."""

    def stand_in(self, data_dir: Path | None) -> str:
        return FILLER if data_dir is None else ""

    def maker(self, of: Making) -> Callable[[int], dict[str, Any]]:
        """Return what makes row `index`; `data_dir` holds the essays, see `made.read_essays`."""
        words = Words(of.data_dir, of.seed)

        def row(rng: random.Random, index: int, size: int) -> dict[str, Any]:
            depth = spread(of.samples, index, *DEPTHS)
            line, asked, answer = NEEDLE, QUESTION, ANSWER
            if self.passkey:
                line, asked, answer = needle("passkey", rng)
                line = f"\n{line}\n"
            lines = sentences(" ".join(words.first(size)))
            place = int(len(lines) * depth)
            context = " ".join(lines[:place]) + line + " ".join(lines[place:])
            return {"context": context, "question": asked, "answer": answer, "depth": depth}

        return self.filled(of, row, guess=max(1, (of.tokens or 0) // 2), system=SYSTEM)

    def read(self, row: Row) -> list[Sample]:
        tail = f"\n\nRead the document and answer: {row.text('question')}"
        depths = (row.fields["depth"],) if "depth" in row.fields else ()
        return [self.sample_of(row, "", row.text("context"), tail, (row.text("answer"),), system=SYSTEM, depths=depths)]


def share_of_words(prediction: str, needle: str) -> float:
    """Return the share of the needle's words in the answer."""
    said, wanted = (set(re.findall(r"\w+", text.lower())) for text in (prediction, needle))
    return len(said & wanted) / len(wanted)


_TASKS: dict[str, dict[str, Any]] = {
    "needle": {
        "source": "gkamradt/LLMTest_NeedleInAHaystack, LongAlign",
        "metric": "share of the needle's words",
        "max_new_tokens": 128,
        "scored": first(share_of_words),
    },
    "passkey": {
        "source": "IM/IMDC's pass key in essays",
        "metric": "first integer",
        "max_new_tokens": 16,
        "scored": first(first_integer),
        "passkey": True,
    },
}
TASKS = tuple(NeedleTask(name=f"niah/{name}", file=f"{name}.jsonl", **facts) for name, facts in _TASKS.items())
