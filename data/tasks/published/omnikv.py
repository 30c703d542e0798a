"""2StageRetr: add two numbers, then look the sum up in a dictionary of colours.

Paper:     OmniKV (ICLR 2025), Section 5.
Source:    antgroup/OmniKV, tiny_runs/make_2_stage_questions.py: sizes, prompt and the 23 colours.
Fields:    prompt, answers (one colour).
Deviates:  own random streams. OmniKV puts words into some models' mouths ("First, addition result is" for Yi, a
           sentence about breaking the problem down for Llama) and lets Yi write 50 tokens instead of 200; set `lead`
           and `max_new_tokens` for that.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from locret.data.tasks.metrics.retrieval import any_contained
from locret.data.tasks.published.row_maker import RowMaker
from locret.data.tasks.task import Sample
from locret.data.training.json_rows import text_of, texts_of

SIZES = (40, 50, 60, 70, 80, 90, 100, 140, 180, 200)
"""Entries of the published rows, in turn."""
_COLORS = (
    "red green blue yellow orange purple pink brown black white gray cyan magenta lime maroon navy olive teal violet "
    "indigo gold silver beige"
)
COLORS = tuple(_COLORS.split())
_PROMPT = (
    "Let's play a game. You have a dict and a mathematical addition equation. The keys of a dictionary can be any "
    "number. You need to find the corresponding key value in the dictionary after performing the addition and output "
    "the value corresponding to that key. The Dict is {entries}\nThe equation is {first} + {second} = ?\nMUST first "
    "output the result of the addition, and then answer the corresponding value based on the result."
)


@dataclass(frozen=True, kw_only=True)
class TwoStageTask(RowMaker):
    """The one task of 2StageRetr."""

    settable: ClassVar[tuple[str, ...]] = (*RowMaker.settable, "chat", "lead")

    lead: str = ""
    """What is put into the model's mouth."""

    def system_turn(self) -> str:
        """Return the system turn that a prompt begins with; empty if it has none."""
        return ""

    def maker(
        self, tokenizer: Any, tokens: int | None, *, samples: int, seed: int, data_dir: Path | None
    ) -> Callable[[int], dict[str, Any]]:
        """Return what makes row `index`; without `tokens` sizes are the published ones. No source texts are needed."""
        if tokens is None:
            return lambda i: _row(random.Random(f"{self.name}/{seed}/{tokens}/{i}"), SIZES[i % len(SIZES)])

        def row(rng: random.Random, index: int, size: int) -> dict[str, Any]:
            return _row(rng, size)

        return self.filled(tokenizer, tokens, seed, row, guess=SIZES[0], exact=True, system=self.system_turn())

    def read(self, index: int, where: str, record: Mapping[str, Any]) -> list[Sample]:
        """Return the sample of a row."""
        answers = texts_of(record, where, "answers")
        return [self.sample_of(index, text_of(record, where, "prompt"), "", "", answers, lead=self.lead, span=(0, 0))]

    def score(self, prediction: str, sample: Sample) -> float:
        """Return 1 if the colour is in the answer, in any case. Guessing scores 1/23."""
        return any_contained(prediction, sample.targets)


def _row(rng: random.Random, size: int) -> dict[str, Any]:
    colors = dict(enumerate(rng.choices(COLORS, k=size)))
    total = rng.randrange(size)
    first = rng.randint(0, total)
    prompt = _PROMPT.format(entries=colors, first=first, second=total - first)
    return {"prompt": prompt, "answers": [colors[total]]}


TASKS = (
    TwoStageTask(
        name="twostage/2stage",
        source="2StageRetr (OmniKV, ICLR 2025), antgroup/OmniKV",
        metric="string match, any",
        max_new_tokens=200,
        chat=True,
        file="2stage.jsonl",
    ),
)
