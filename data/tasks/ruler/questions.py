"""RULER's question answering: a question of SQuAD or HotpotQA, its paragraphs, and as many others as fit."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from locret.data.tasks.ruler.task import Draft, Drafter, RulerTask, Setting

_PROMPT = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "The following are given documents.\n\n{documents}\n\nAnswer the question based on the given documents. Only give "
    "me the answer and do not output any other words.\n\nQuestion: {question}"
)
_PREFIX = " Answer:"
FILES = {
    "squad": ("squad.json", "dev-v2.0.json", "dev-v1.1.json"),
    "hotpotqa": ("hotpotqa.json", "hotpot_dev_distractor_v1.json"),
}


@dataclass(frozen=True)
class Asked:
    """A question, its answers, the numbers of its documents, and of documents about the same article."""

    question: str
    answers: tuple[str, ...]
    own: tuple[int, ...]
    near: tuple[int, ...] = ()


@dataclass(frozen=True)
class QuestionSet:
    """Questions in the order of their file, and all documents in alphabetical order."""

    questions: list[Asked]
    documents: list[str]


@dataclass(frozen=True, kw_only=True)
class Questions(RulerTask):
    """One question answering task; its size is the number of documents."""

    match: ClassVar[Literal["all", "part"]] = "part"

    metric: str = "string match, part"
    dataset: Literal["squad", "hotpotqa"]
    opening: ClassVar[str] = " Answer:"
    unit: ClassVar[int] = 150
    least: ClassVar[int] = 1

    def texts(self, data_dir: Path | None) -> str:
        """Return where the questions come from."""
        return f"{self.dataset} in {data_dir.name if data_dir else 'no folder'}"

    def drafter(self, setting: Setting) -> tuple[Drafter, str]:
        """Return what writes a prompt; row i asks question i of the file, and starts over at its end."""
        found = self.load(setting.data_dir)
        asked = found.questions
        return (lambda rng, index, size: self.draft(rng, size, asked[index % len(asked)], found.documents)), ""

    def draft(self, rng: random.Random, size: int, asked: Asked, documents: list[str]) -> Draft:
        """Return a prompt with `size` documents (all there are, if that is fewer; never fewer than the question's)."""
        room, near = max(0, size - len(asked.own)), [*asked.near]
        if size >= len(documents):
            chosen = [*range(len(documents))]
        elif room <= len(near):
            chosen = [*asked.own, *rng.sample(near, room)]
        else:
            held = {*asked.own, *near}
            others = [number for number in range(len(documents)) if number not in held]
            chosen = [*asked.own, *near, *rng.sample(others, min(room - len(near), len(others)))]
        rng.shuffle(chosen)
        text = "\n\n".join(f"Document {place}:\n{documents[number]}" for place, number in enumerate(chosen, 1))
        return Draft(_PROMPT.format(documents=text, question=asked.question), _PREFIX, asked.answers)

    def load(self, data_dir: Path | None) -> QuestionSet:
        """Read the question set.

        Args:
            data_dir: Holds one of `FILES`, itself, in a folder `ruler`, or in one named as the data set.

        Raises:
            ValueError: If there is no such file, or it has another form.
        """
        names = FILES[self.dataset]
        if data_dir is None:
            raise ValueError(
                f"{self.name} is made from questions of {self.dataset}, which cannot be generated; pass --data-dir "
                f"with a folder that holds {' or '.join(names)}, or leave the task out"
            )
        places = [folder / name for folder in (data_dir, data_dir / "ruler", data_dir / self.dataset) for name in names]
        path = next((place for place in places if place.is_file()), None)
        if path is None:
            raise ValueError(
                f"--data-dir {data_dir} has no question set for {self.name}; put {' or '.join(names)} there, or leave "
                "the task out"
            )
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            return _squad(data) if self.dataset == "squad" else _hotpotqa(data)
        except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} is no {self.dataset} file ({type(error).__name__}: {error}); get it anew"
            ) from None


def _squad(data: Any) -> QuestionSet:
    paragraphs = [[part["context"] for part in article["paragraphs"]] for article in data["data"]]
    documents = sorted({text for article in paragraphs for text in article})
    number = {text: place for place, text in enumerate(documents)}
    questions = []
    for article, texts in zip(data["data"], paragraphs, strict=True):
        for part in article["paragraphs"]:
            own = number[part["context"]]
            near = tuple(dict.fromkeys(number[text] for text in texts if number[text] != own))
            for asked in part["qas"]:
                if not asked.get("is_impossible", False):
                    answers = tuple(answer["text"] for answer in asked["answers"])
                    questions.append(Asked(asked["question"], answers, (own,), near))
    return _checked(questions, documents)


def _hotpotqa(data: Any) -> QuestionSet:
    rows = [(row, [f"{title}\n{''.join(lines)}" for title, lines in _paragraphs(row["context"])]) for row in data]
    documents = sorted({text for _, texts in rows for text in texts})
    number = {text: place for place, text in enumerate(documents)}
    found = [
        Asked(row["question"], (row["answer"],), tuple(dict.fromkeys(number[text] for text in texts)))
        for row, texts in rows
    ]
    return _checked(found, documents)


def _paragraphs(context: Any) -> list[tuple[str, list[str]]]:
    """Return titles and sentences, from pairs (the original file) or from two lists (the Hub's)."""
    if isinstance(context, dict):
        return list(zip(context["title"], context["sentences"], strict=True))
    return [(title, lines) for title, lines in context]


def _checked(questions: list[Asked], documents: list[str]) -> QuestionSet:
    if not questions or not all(asked.answers for asked in questions):
        raise ValueError("it has no questions, or questions without an answer")
    return QuestionSet(questions, documents)
