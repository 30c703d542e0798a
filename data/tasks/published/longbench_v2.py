"""LongBench v2: 503 multiple-choice questions about texts of 8 thousand to 2 million words.

Paper:     arXiv 2412.15204.
Source:    THUDM/LongBench (MIT), data set THUDM/LongBench-v2, now zai-org/LongBench-v2: one file, data.json; prompts of
           its prompts/ folder, lengths of pred.py and config/model2maxlen.json, which allows 120,000 tokens of prompt.
Fields:    _id, domain, sub_domain, difficulty (easy, hard), length (short, medium, long), question, choice_A ...
           choice_D, answer (a letter), context.
Metrics:   pred.py and result.py: accuracy of the letter after "The correct answer is".
Deviates:  greedy, where the official runs sample at temperature 0.1. An empty answer counts as wrong; the official runs
           leave the question out.

Each row is in three tasks: all of them, those of its difficulty, and those of its length, as in the paper's table,
without a chain of thought.
"""

from __future__ import annotations

from dataclasses import dataclass

from locret.data.tasks.metrics.choice import stated_letter
from locret.data.tasks.published.base import PublishedTask, first, prompts_of
from locret.data.tasks.rows import Row
from locret.data.tasks.task import Sample

LETTERS = "ABCD"
_SPLITS = {"difficulty": ("easy", "hard"), "length": ("short", "medium", "long")}
_PROMPTS: dict[str, str] = prompts_of("longbench_v2")


@dataclass(frozen=True, kw_only=True)
class LongBenchV2Task(PublishedTask):
    """The rows of LongBench v2, or those of one difficulty or length."""

    split: str = ""
    """A difficulty or a length; empty for all rows."""

    def read(self, row: Row) -> list[Sample]:
        """Return the sample of a row; none for a row of another difficulty or length."""
        splits = [row.one_of(field, known) for field, known in _SPLITS.items()]
        if self.split and self.split not in splits:
            return []
        choices = tuple(row.text(f"choice_{letter}").strip() for letter in LETTERS)
        answer = row.one_of("answer", tuple(LETTERS))
        asked = _PROMPTS["choices"].format(
            question=row.text("question").strip(), **dict(zip(LETTERS, choices, strict=True))
        )
        head, tail = _PROMPTS["read"], _PROMPTS["end"] + asked + _PROMPTS["format"]
        more = {"reply": f"The correct answer is ({answer})", "choices": choices, "question": tail.removeprefix("\n")}
        return [self.sample_of(row, head, row.text("context").strip(), tail, (answer,), **more)]


_SIZES = {"": 503, "easy": 192, "hard": 311, "short": 180, "medium": 215, "long": 108}
TASKS: tuple[LongBenchV2Task, ...] = tuple(
    LongBenchV2Task(
        name=f"longbench_v2/{split or 'all'}",
        source="LongBench v2, arXiv 2412.15204",
        metric="accuracy of the letter",
        scored=first(lambda said, letter: float(stated_letter(said) == letter)),
        max_new_tokens=128,
        limit=120_000,
        truncation="middle",
        reencode=True,
        file="data.jsonl",
        hub_file="data.json",
        repo="zai-org/LongBench-v2",
        revision="2b48e494f2c7a2f0af81aae178e05c7e1dde0fe9",
        size=size,
        split=split,
    )
    for split, size in _SIZES.items()
)
