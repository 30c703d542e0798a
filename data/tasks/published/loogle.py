"""LooGLE: questions about long texts written after 2022, several for each text, answered in words of one's own.

Paper:     arXiv 2311.04939.
Source:    bigai-nlco/LooGLE (MIT): prompts and lengths of its config/ folder, Prediction/pred_opensource_models.py;
           data set bigainlco/LooGLE, now bigai-nlco/LooGLE.
Fields:    context, question, answer, also doc_id, title, type, evidence; one row a question, those of a text one after
           the other.
Metrics:   Evaluation/automatic_metrics.py: recall of ROUGE-L, and of cloze tasks exact matches. Its other metrics are
           left out: samples.jsonl has the answers for them.
Deviates:  answers of cloze tasks are read as literals, where the official code evaluates them as Python. Greedy without
           the official runs' repetition penalty of 2. Of too long a text with several questions the text alone is cut,
           the same for all of them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from locret.data.tasks.metrics.overlap import rouge_of_sets
from locret.data.tasks.published.base import PublishedTask, prompts_of
from locret.data.tasks.rows import Row
from locret.data.tasks.task import Question, Sample

# Text before the document, and the question, which follows a line break.
_FORMS: dict[str, list[str]] = prompts_of("loogle")


def _dictionary(text: str) -> dict[str, Any]:
    """Return the dictionary that a text writes in Python; empty if it writes none."""
    try:
        found = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True, kw_only=True)
class LooGLETask(PublishedTask):
    """One file of LooGLE; a text is a sample, whose own question is the first of all that are asked."""

    task: str
    """The file's name in the published set."""

    def items(self, found: Iterable[Row]) -> Iterator[Sample]:
        """Yield a sample for each text, with the questions of all rows that follow each other and share it."""
        for _, group in groupby(super().items(found), key=lambda sample: sample.document):
            first, *others = group
            both = [first, *others]
            yield replace(first, asked=tuple(Question(text=s.question, targets=s.targets, reply=s.reply) for s in both))

    def read(self, row: Row) -> list[Sample]:
        head, tail = _FORMS[self.task]
        # Summaries have no question of their own.
        text = tail.format(question=row.text("question")) if "{" in tail else tail
        return [self.sample_of(row, head, row.text("context"), f"\n{text}", (row.text("answer"),), question=text)]

    def score(self, prediction: str, sample: Sample) -> float:
        """Return recall of ROUGE-L; an empty answer is taken for "None", as in the official code."""
        return rouge_of_sets(prediction or "None", sample.targets[0], "r")


@dataclass(frozen=True, kw_only=True)
class ClozeTask(LooGLETask):
    """Entities that are to be filled in."""

    def read(self, row: Row) -> list[Sample]:
        """Return the sample of a row, whose answer says what every mask hides."""
        answer = row.fields.get("answer")
        masks = answer if isinstance(answer, dict) else _dictionary(row.text("answer"))
        if not masks or not all(isinstance(part, str) for pair in masks.items() for part in pair):
            raise row.bad(f"holds {str(answer)[:80]!r} in field 'answer' where masks and their entities are needed")
        return super().read(row._replace(fields={**row.fields, "answer": str(masks)}))

    def _filled(self, prediction: str, reference: str) -> tuple[int, int]:
        """Return how many masks an answer fills rightly, and how many there are."""
        said, right = _dictionary(prediction or "None"), _dictionary(reference)
        return sum(mask in said and said[mask] == right[mask] for mask in right), len(right)

    def score(self, prediction: str, sample: Sample) -> float:
        """Return the share of the sample's masks that are filled rightly."""
        right, masks = self._filled(prediction, sample.targets[0])
        return right / masks

    def summarise(self, scores: Sequence[float], answers: Sequence[tuple[str, tuple[str, ...]]]) -> float:
        """Return the share of all masks that are filled rightly."""
        filled = [self._filled(said, targets[0]) for said, targets in answers]
        return sum(right for right, _ in filled) / sum(masks for _, masks in filled) if filled else 0.0


_TASKS = {"shortdep_qa": 300, "longdep_qa": 500, "shortdep_cloze": 50, "summarization": 500}
TASKS: tuple[LooGLETask, ...] = tuple(
    (ClozeTask if name == "shortdep_cloze" else LooGLETask)(
        name=f"loogle/{name}",
        source="LooGLE, arXiv 2311.04939",
        metric="share of the masks filled rightly" if name == "shortdep_cloze" else "recall of ROUGE-L",
        max_new_tokens=new,
        chat=False,
        truncation="middle",
        reencode=True,
        file=f"data/{name}.jsonl",
        repo="bigai-nlco/LooGLE",
        revision="4b50b4cb9333b48b3f7ddfd307c1d13369be5d1e",
        questions=100,  # all; a text has about twenty
        task=name,
    )
    for name, new in _TASKS.items()
)
