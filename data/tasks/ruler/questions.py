"""RULER's question answering: a question of SQuAD or HotpotQA, its paragraphs, and as many others as fit."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from locret.data.tasks.ruler.task import PROMPTS, Draft, Drafter, Making, RulerTask

FILES = {
    "squad": ("squad.json", "dev-v2.0.json", "dev-v1.1.json"),
    "hotpotqa": ("hotpotqa.json", "hotpot_dev_distractor_v1.json"),
}


class Asked(NamedTuple):
    """A question, its answers, the numbers of its documents, and of documents about the same article."""

    question: str
    answers: tuple[str, ...]
    own: tuple[int, ...]
    near: tuple[int, ...] = ()


class QuestionSet(NamedTuple):
    """Questions in the order of their file, and all documents in alphabetical order."""

    questions: list[Asked]
    documents: list[str]


def questions(dataset: Literal["squad", "hotpotqa"]) -> Callable[[RulerTask, Making], Drafter]:
    """Return what makes prompts with so many documents (all there are, if that is fewer; never fewer than the
    question's); row i asks question i of the file, and starts over at its end.
    """

    def drafter(task: RulerTask, of: Making) -> Drafter:
        (every, documents), (form, prefix) = load(task.name, dataset, of.data_dir), PROMPTS["qa"]

        def draft(rng: random.Random, index: int, size: int) -> Draft:
            asked = every[index % len(every)]
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
            return Draft(form.format(documents=text, question=asked.question), prefix, asked.answers)

        return draft

    return drafter


def load(task: str, dataset: str, data_dir: Path | None) -> QuestionSet:
    """Read one of `FILES`, from a folder itself, from `ruler` in it, or from a folder named as the data set."""
    names = FILES[dataset]
    folders = [data_dir, data_dir / "ruler", data_dir / dataset] if data_dir is not None else []
    path = next((folder / name for folder in folders for name in names if (folder / name).is_file()), None)
    if path is None:
        raise ValueError(
            f"{task} is made from questions of {dataset}, which cannot be generated; pass --data-dir with a folder "
            f"that holds {' or '.join(names)}, or leave the task out"
        )
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        found = _squad(data) if dataset == "squad" else _hotpotqa(data)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no {dataset} file ({type(error).__name__}: {error}); get it anew") from None
    if not found.questions or not all(asked.answers for asked in found.questions):
        raise ValueError(f"{path} has no questions, or questions without an answer; get it anew")
    return found


def _squad(data: Any) -> QuestionSet:
    paragraphs = [[part["context"] for part in article["paragraphs"]] for article in data["data"]]
    documents = sorted({text for article in paragraphs for text in article})
    number = {text: place for place, text in enumerate(documents)}
    found = []
    for article, texts in zip(data["data"], paragraphs, strict=True):
        for part in article["paragraphs"]:
            own = number[part["context"]]
            near = tuple(dict.fromkeys(number[text] for text in texts if number[text] != own))
            for asked in part["qas"]:
                if not asked.get("is_impossible", False):
                    answers = tuple(answer["text"] for answer in asked["answers"])
                    found.append(Asked(asked["question"], answers, (own,), near))
    return QuestionSet(found, documents)


def _hotpotqa(data: Any) -> QuestionSet:
    def paragraphs(context: Any) -> Any:  # pairs of title and sentences in the original file, two lists on the Hub
        return zip(context["title"], context["sentences"], strict=True) if isinstance(context, dict) else context

    rows = [(row, [f"{title}\n{''.join(lines)}" for title, lines in paragraphs(row["context"])]) for row in data]
    documents = sorted({text for _, texts in rows for text in texts})
    number = {text: place for place, text in enumerate(documents)}
    found = [
        Asked(row["question"], (row["answer"],), tuple(dict.fromkeys(number[text] for text in texts)))
        for row, texts in rows
    ]
    return QuestionSet(found, documents)
