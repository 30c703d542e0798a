"""OmniKV's 2StageRetr: add two numbers, then look the sum up in a dictionary of colours.

Paper:     OmniKV (ICLR 2025), Section 5.
Source:    antgroup/OmniKV: tiny_runs/make_2_stage_questions.py (sizes, prompt and the 23 colours).
Fields:    prompt, answers (one colour).
Metric:    an answer counts if it contains a reference, in any case.
Deviates:  own random streams. The prompt limit belongs to the model: `limit`, none by default.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from locret.data.tasks.metrics.retrieval import any_contained
from locret.data.tasks.published.base import Making, RowMaker, over, prompts_of
from locret.data.tasks.rows import Row
from locret.data.tasks.task import Sample

SIZES = (40, 50, 60, 70, 80, 90, 100, 140, 180, 200)
"""Entries of the published rows, in turn."""
_COLORS = (
    "red green blue yellow orange purple pink brown black white gray cyan magenta lime maroon navy olive teal violet "
    "indigo gold silver beige"
)
COLORS = _COLORS.split()
_PROMPT: str = prompts_of("omnikv")["two_stage"]


@dataclass(frozen=True, kw_only=True)
class TwoStageTask(RowMaker):
    """The one task of 2StageRetr; guessing scores 1/23."""

    def maker(self, of: Making) -> Callable[[int], dict[str, Any]]:
        """Return what makes row `index`; without a length sizes are the published ones. No source texts are needed."""
        if of.tokens is None:
            return lambda index: _row(self.stream(of, index), index, SIZES[index % len(SIZES)])
        return self.filled(of, _row, guess=SIZES[0])

    def read(self, row: Row) -> list[Sample]:
        return [self.sample_of(row, row.text("prompt"), "", "", row.texts("answers"), span=(0, 0))]


def _row(rng: random.Random, index: int, size: int) -> dict[str, Any]:
    colors = dict(enumerate(rng.choices(COLORS, k=size)))
    total = rng.randrange(size)
    first = rng.randint(0, total)
    return {"prompt": _PROMPT.format(entries=colors, first=first, second=total - first), "answers": [colors[total]]}


TASKS = (
    TwoStageTask(
        name="twostage/2stage",
        source="2StageRetr (OmniKV, ICLR 2025), antgroup/OmniKV",
        file="2stage.jsonl",
        metric="string match, any",
        max_new_tokens=200,
        scored=over(any_contained),
    ),
)
