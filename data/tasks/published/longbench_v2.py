"""LongBench v2: 503 multiple-choice questions about texts of 8 thousand to 2 million words.

Paper:     arXiv 2412.15204.
Source:    THUDM/LongBench (MIT), data set THUDM/LongBench-v2, now zai-org/LongBench-v2: one file, data.json; prompts of
           its prompts/ folder, lengths of pred.py and config/model2maxlen.json, which allows 120,000 tokens of prompt.
Fields:    _id, domain, sub_domain, difficulty (easy, hard), length (short, medium, long), question, choice_A ...
           choice_D, answer (a letter), context.
Metrics:   pred.py and result.py: accuracy of the letter after "The correct answer is".
Deviates:  greedy, where the official runs sample at temperature 0.1. An empty answer counts as wrong; the official runs
           leave the question out.

Each row is in three tasks: all of them, those of its difficulty, and those of its length, as in the paper's table. The
tasks `..._cot` first ask for a chain of thought; a second prompt, without the text, asks for the answer that follows
from it, and that answer counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from locret.data.tasks.metrics.choice import stated_letter
from locret.data.tasks.published.base import PublishedTask, row_id
from locret.data.tasks.task import Sample
from locret.data.training.json_rows import BadRow, text_of

LETTERS = "ABCD"
THOUGHT, ANSWER = 1024, 128
"""Tokens of a chain of thought, and of an answer."""
DIFFICULTIES, LENGTHS = ("easy", "hard"), ("short", "medium", "long")
_CHOICES = "What is the correct answer to this question: {question}\nChoices:\n(A) {A}\n(B) {B}\n(C) {C}\n(D) {D}\n\n"
_FORMAT = 'Format your response as follows: "The correct answer is (insert answer here)".'
_THINK = "Let’s think step by step:"
_READ = "Please read the following text and answer the {question} below.\n\n"
_LIKELY = "hat is the single, most likely answer choice? "
_END = "\n</text>\n\n"


@dataclass(frozen=True, kw_only=True)
class LongBenchV2Task(PublishedTask):
    """The rows of LongBench v2, or those of one difficulty or length."""

    settable: ClassVar[tuple[str, ...]] = (*PublishedTask.settable, "no_context", "compensated")

    split: str = ""
    """A difficulty or a length; empty for all rows."""
    cot: bool = False
    """Whether a chain of thought comes before the answer."""
    no_context: bool = False
    """Ask without the text, which measures what the backbone knows or guesses."""
    compensated: bool = False
    """Count an answer that states no letter as a quarter, which a guess would score."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cot and self.no_context:
            plain = self.name.removesuffix("_cot")
            raise ValueError(f"task {self.name}: no_context=True has no prompt with a chain of thought; use {plain}")

    def read(self, index: int, where: str, record: Mapping[str, Any]) -> list[Sample]:
        """Return the sample of a row; none for a row of another difficulty or length."""
        splits = [_one_of(where, record, field, known) for field, known in _SPLITS.items()]
        if self.split and self.split not in splits:
            return []
        document = text_of(record, where, "context").strip()
        choices = tuple(text_of(record, where, f"choice_{letter}").strip() for letter in LETTERS)
        question = text_of(record, where, "question").strip()
        answer = _one_of(where, record, "answer", tuple(LETTERS))
        asked = _CHOICES.format(question=question, **dict(zip(LETTERS, choices, strict=True)))
        head, tail = _READ.format(question="questions" if self.cot else "question") + "<text>\n", _END + asked
        tail += _THINK if self.cot else _FORMAT
        if self.no_context:
            head, document, tail = "", "", f"{asked}W{_LIKELY}{_FORMAT}"
        more = {"reply": f"The correct answer is ({answer})", "choices": choices, "extra": row_id(record, "_id")}
        return [self.sample_of(index, head, document, tail, (answer,), question=tail.removeprefix("\n"), **more)]

    def follow_up(self, sample: Sample, prediction: str) -> tuple[Sample, int] | None:
        """Return the second prompt of a chain of thought, which has the thought and not the text in it."""
        if not self.cot:
            return None
        asked = sample.content[sample.span[1] :].removeprefix(_END)
        omitted = _READ.format(question="questions") + "The text is too long and omitted here.\n\n"
        content = f"{omitted}{asked} {prediction.strip()}\n\nBased on the above, w{_LIKELY}{_FORMAT}"
        return replace(sample, content=content, span=(0, 0)), min(ANSWER, self.max_new_tokens)

    def score(self, prediction: str, sample: Sample) -> float:
        """Return 1 for the right letter."""
        letter = stated_letter(prediction)
        return 0.25 if letter is None and self.compensated else float(letter == sample.targets[0])


_SPLITS = {"difficulty": DIFFICULTIES, "length": LENGTHS}


def _one_of(where: str, record: Mapping[str, Any], field: str, known: tuple[str, ...]) -> str:
    value = text_of(record, where, field)
    if value not in known:
        raise BadRow(
            where, f"unknown {field}", f"holds {value!r} in field {field!r} where {' or '.join(known)} is right"
        )
    return value


def _task(split: str, size: int, cot: bool) -> LongBenchV2Task:
    return LongBenchV2Task(
        name=f"longbench_v2/{split or 'all'}{'_cot' * cot}",
        source="LongBench v2, arXiv 2412.15204",
        metric="accuracy of the letter",
        max_new_tokens=THOUGHT if cot else ANSWER,
        limit=120_000,
        truncation="middle",
        reencode=True,
        file="data.jsonl",
        hub_file="data.json",
        repo="zai-org/LongBench-v2",
        revision="2b48e494f2c7a2f0af81aae178e05c7e1dde0fe9",
        size=size,
        max_row_bytes=64 << 20,  # texts of two million words are the published data
        split=split,
        cot=cot,
    )


_SIZES = {"": 503, "easy": 192, "hard": 311, "short": 180, "medium": 215, "long": 108}
TASKS: tuple[LongBenchV2Task, ...] = tuple(
    _task(split, size, cot) for cot in (False, True) for split, size in _SIZES.items()
)
