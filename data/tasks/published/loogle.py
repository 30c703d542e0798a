"""LooGLE: questions about long texts written after 2022, several for each text, answered in words of one's own.

Paper:     arXiv 2311.04939.
Source:    bigai-nlco/LooGLE (MIT): prompts and lengths of its config/ folder, Prediction/pred_opensource_models.py;
           data set bigainlco/LooGLE, now bigai-nlco/LooGLE.
Fields:    context, question, answer, also doc_id, title, type, evidence; one row a question, those of a text one after
           the other. Older copies (`LooGLE-testdata`) have one row a text: input, title, qa_pairs (written as Python:
           Q, A, S, type; "none" for summaries), output.
Metrics:   Evaluation/automatic_metrics.py, one at a time: `scorer`. Recall of ROUGE-L unless another is chosen.
Deviates:  answers of cloze tasks are read as literals, where the official code evaluates them as Python. Greedy without
           the official runs' repetition penalty of 2. Of too long a text with several questions the text alone is cut,
           the same for all of them. METEOR, BERTScore and the judgement of GPT-4 are refused.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from locret.data.tasks.metrics.overlap import bleu, rouge_recall
from locret.data.tasks.published.base import PublishedTask
from locret.data.tasks.task import Question, Sample
from locret.data.training.json_rows import BadRow, Entry, text_of

TYPES = ("comprehension_and_reasoning", "computation", "multiple_information_retrieval", "timeline_reorder")
"""Kinds of questions of longdep_qa."""
WORDS, MASKS = ("rouge_l", "rouge_1", "rouge_2", "bleu_1", "bleu_4"), ("exact", "partial")
REFUSED = {
    "meteor": "needs WordNet's data, and the official code takes words in the random order of a set",
    "bertscore": "needs a second model",
    "gpt4": "needs a judge model",
}
_ANSWER = "Please answer the question based on the long texts below. \n"
# Text before the document, the line break before the question, and the question.
_FORMS = {
    "shortdep_qa": (_ANSWER, "Question: {question}\nAnswer: "),
    "longdep_qa": (_ANSWER, "Question: {question}\nAnswer: "),
    "summarization": ("Please generate a summary of the below paper. \n", " Summarization: "),
    "shortdep_cloze": (
        "Please fill in the clozes based on the given long texts below. Each of the placeholder '<mask-n>' in the "
        "question could be an entity of Person, Location or Organiocation. The same masks represent the same entity. "
        "Output a json format answer, for example: {'<mask-0>': 'Bob', '<mask-1>': 'Gorrosion Magazine',"
        "'<mask-2>': 'Bethel Horizon'}\n",
        " Question: {question} What are the masked entities? \nAnswer:",
    ),
}


def score(scorer: str, prediction: str, reference: str) -> float:
    """Return the score of an answer, from 0 to 1; an empty one is taken for "None", as in the official code.

    Args:
        scorer: One of `WORDS`, or of `MASKS` for cloze tasks, whose reference is a dictionary in Python.
        prediction: The generated text.
        reference: The reference.

    Raises:
        ValueError: If the metric's library is not installed, or a cloze's reference is no dictionary.
    """
    prediction = prediction or "None"
    if scorer in MASKS:
        right, masks = _filled(scorer, prediction, reference)
        return right / masks
    kind, _, grams = scorer.partition("_")
    if kind == "rouge":
        return rouge_recall(prediction, reference, scorer.replace("_", "-"))
    return bleu(prediction.split(), reference.split(), grams=int(grams))


def _filled(scorer: str, prediction: str, reference: str) -> tuple[int, int]:
    """Return how many masks an answer fills rightly, and how many there are."""
    right = _dictionary(reference)
    if right is None:
        raise ValueError(f"reference {reference!r} is no dictionary; it must be such as {{'<mask-0>': 'Bob'}}")
    said = _dictionary(prediction) or {}

    def fits(mask: str) -> bool:
        if scorer == "exact":
            return bool(said[mask] == right[mask])
        return isinstance(said[mask], str) and bool(set(right[mask].split()) & set(said[mask].split()))

    return sum(mask in said and fits(mask) for mask in right), len(right)


def _dictionary(text: str) -> dict[str, Any] | None:
    try:
        found = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


@dataclass(frozen=True, kw_only=True)
class LooGLETask(PublishedTask):
    """One file of LooGLE; a text is a sample, whose own question is the first of all that are asked."""

    settable: ClassVar[tuple[str, ...]] = (*PublishedTask.settable, "scorer", "type")

    task: str
    """The file's name in the published set."""
    scorer: str = "rouge_l"
    """rouge_l, rouge_1, rouge_2 (recall), bleu_1 or bleu_4 (4-grams alone); for cloze tasks exact or partial."""
    type: str = ""
    """Ask questions of one kind only, such as computation; empty for all. longdep_qa alone names kinds."""

    def __post_init__(self) -> None:
        super().__post_init__()
        known = MASKS if self.cloze else WORDS
        if self.scorer in REFUSED:
            reason = REFUSED[self.scorer]
            raise ValueError(f"task {self.name}: scorer={self.scorer} {reason}; use one of {', '.join(known)}")
        self.check_choice("scorer", known)
        self.check_choice("type", ("", *TYPES))
        if self.type and self.task != "longdep_qa":
            raise ValueError(f"task {self.name}: type={self.type} has no effect, as only loogle/longdep_qa has kinds")

    @property
    def cloze(self) -> bool:
        """Whether entities are to be filled in."""
        return self.task == "shortdep_cloze"

    def items(self, rows: Iterable[Entry], on_bad: Callable[[BadRow], None] | None = None) -> Iterator[Sample]:
        """Yield a sample for each text, with the questions of all rows that follow each other and share it."""
        together: list[Sample] = []
        for sample in super().items(rows, on_bad):
            if together and together[0].document != sample.document:
                yield _with_all(together)
                together = []
            together.append(sample)
        if together:
            yield _with_all(together)

    def read(self, index: int, where: str, record: Mapping[str, Any]) -> list[Sample]:
        """Return the samples of a row: one, or in older copies one for each question of its text."""
        if "qa_pairs" not in record:
            document, asked = text_of(record, where, "context"), [record]
        else:
            document, asked = text_of(record, where, "input"), _pairs(where, record)
        known = [one for one in asked if not self.type or one.get("type") == self.type]
        return [self._sample(index, where, document, one, record) for one in known]

    def _sample(
        self, index: int, where: str, document: str, one: Mapping[str, Any], record: Mapping[str, Any]
    ) -> Sample:
        head, tail = _FORMS[self.task]
        # Summaries have no question of their own.
        question = "" if self.task == "summarization" else text_of(one, where, "question")
        reference = self._reference(where, one)
        text = tail.format(question=question) if question else tail
        title = record.get("title")
        extra = (("title", title),) if isinstance(title, str) else ()
        return self.sample_of(index, head, document, f"\n{text}", (reference,), question=text, extra=extra)

    def _reference(self, where: str, one: Mapping[str, Any]) -> str:
        answer = one.get("answer")
        if not self.cloze:
            return text_of(one, where, "answer")
        masks = answer if isinstance(answer, dict) else _dictionary(text_of(one, where, "answer"))
        if not masks or not all(isinstance(part, str) for pair in masks.items() for part in pair):
            detail = f"holds {str(answer)[:80]!r} in field 'answer' where masks and their entities are needed"
            raise BadRow(where, "wrong answer", detail)
        return str(masks)

    def score(self, prediction: str, sample: Sample) -> float:
        """Return the chosen metric; for a cloze the share of its masks that are filled rightly."""
        return score(self.scorer, prediction, sample.targets[0])

    def summarise(self, scores: Sequence[float], answers: Sequence[tuple[str, tuple[str, ...]]]) -> float:
        """Return the mean; for cloze tasks the share of all masks that are filled rightly."""
        if not self.cloze or not answers:
            return super().summarise(scores, answers)
        filled = [_filled(self.scorer, said or "None", targets[0]) for said, targets in answers]
        return sum(right for right, _ in filled) / sum(masks for _, masks in filled)


def _with_all(samples: Sequence[Sample]) -> Sample:
    """Return the first of a text's samples, with the questions of all."""
    asked = tuple(Question(text=one.question, targets=one.targets, reply=one.reply) for one in samples)
    return replace(samples[0], asked=asked)


def _pairs(where: str, record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the questions of a text in an older copy, with the names of the newer fields."""
    pairs = record["qa_pairs"]
    if pairs == "none":
        return [{"answer": record.get("output")}]
    if isinstance(pairs, str):
        try:
            pairs = ast.literal_eval(pairs)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            raise BadRow(where, "wrong qa_pairs", "has a field 'qa_pairs' that is no list of questions") from None
    if not isinstance(pairs, list) or not pairs or not all(isinstance(one, dict) for one in pairs):
        raise BadRow(where, "wrong qa_pairs", "has a field 'qa_pairs' that is no list of questions")
    names = {"Q": "question", "A": "answer"}
    return [{names.get(name, name): value for name, value in one.items()} for one in pairs]


def _task(name: str, new: int, metric: str, **more: Any) -> LooGLETask:
    return LooGLETask(
        name=f"loogle/{name}",
        source="LooGLE, arXiv 2311.04939",
        metric=metric,
        max_new_tokens=new,
        chat=False,
        truncation="middle",
        reencode=True,
        file=f"data/{name}.jsonl",
        repo="bigai-nlco/LooGLE",
        revision="4b50b4cb9333b48b3f7ddfd307c1d13369be5d1e",
        questions=100,  # all; a text has about twenty
        task=name,
        max_row_bytes=16 << 20,
        **more,
    )


TASKS: tuple[LooGLETask, ...] = (
    _task("shortdep_qa", 300, "recall of ROUGE-L, or the chosen scorer"),
    _task("longdep_qa", 500, "recall of ROUGE-L, or the chosen scorer"),
    _task("shortdep_cloze", 50, "share of the masks filled rightly", scorer="exact"),
    _task("summarization", 500, "recall of ROUGE-L, or the chosen scorer"),
)
