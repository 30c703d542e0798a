"""SCBench: several questions about one long text, as turns of a conversation or as requests that share the text.

Paper:     arXiv 2412.10319.
Source:    microsoft/MInference, scbench/ (MIT): eval_utils.py, run_scbench.py, compute_scores.py, repo_qa_utils.py at
           fb56c91; data set microsoft/SCBench.
Fields:    id, context (a list of numbers in mf), multi_turns (a list of input, answer and, where a task has them, four
           options, task and name), repo.
Modes:     `scbench/kv` is multi-turn: one cache reads text and first question, then turn after turn; the right answer
           stands in the history, whatever the model wrote. `scbench/kv_requests` is multi-request: every
           question follows the text alone (the official option is called scdq); --questions asks fewer or more.
Metrics:   compute_scores.py. A mixed task's score is the mean of its two kinds' scores, which the official code prints
           side by side.
Deviates:  the text answers of qa_chn and many_shot are taken whole, where the official code takes them for lists of
           characters, so that any answer in brackets is right if the options are (A) to (D). In multi-turn mf every
           turn asks for its own number first, where the official code repeats the last turn's. A text that is too long
           is cut before the chat template is written, not after; for requests also by the tokens of its longest
           question. Both kinds of a mixed task may take the longer one's tokens. An answer is not begun with "This
           paper".
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from locret.data.tasks.metrics.choice import LETTERS, book_choice
from locret.data.tasks.metrics.overlap import character_f1, repeated_function, rouge_lsum
from locret.data.tasks.metrics.retrieval import all_contained, any_contained, first_integer, first_number
from locret.data.tasks.published.base import PublishedTask, prompts_of
from locret.data.tasks.rows import Row
from locret.data.tasks.task import Question, Sample

TURNS, LONGEST, REQUEST_ROOM = 5, 131_072, 1000
"""Questions asked of a text, tokens of text, questions and answers together, and tokens left for a request."""
LIKE = 0.8
"""How like the function an answer must be, besides being likest to it: RepoQA's threshold."""
# What stands before the text, and a question; in mf what precedes the text is made from the first question.
_FORMS: dict[str, list[str]] = prompts_of("scbench")
KINDS = {"summary_with_needles": ("summary", "passkey"), "repoqa_and_kv": ("repoqa", "kv")}
"""Tasks whose questions are of two kinds."""
# What an answer must be, where the metric reads a number.
_NUMBERS = {"mf": r"-?\d+(\.\d+)?", "passkey": r"\d+"}
Functions = Sequence[tuple[str, str]]
"""Name and code of the functions that an answer is compared with."""


def _repeated(prediction: str, targets: Sequence[str], functions: Functions) -> float:
    name = "".join(targets[1:2])
    found, likeness = repeated_function(prediction, functions or [(name, targets[0])])
    return float(found == name and likeness >= LIKE)


# By the kind of a question.
_METRICS: dict[str, Callable[[str, Sequence[str]], float]] = {
    **dict.fromkeys(("kv", "prefix_suffix"), lambda said, targets: float(targets[0] in said)),
    **dict.fromkeys(("qa_eng", "many_shot"), any_contained),
    "vt": lambda said, targets: round(all_contained(said, targets), 2),
    "mf": lambda said, targets: first_number(said, targets[0]),
    "passkey": lambda said, targets: first_integer(said, targets[0]),
    "summary": rouge_lsum,
    "qa_chn": character_f1,
    "choice_eng": lambda said, targets: book_choice(said, targets[0], targets[-1]),
}


@dataclass(frozen=True, kw_only=True)
class SCBenchTask(PublishedTask):
    """One file of SCBench; a row is a sample: a conversation, or a text with all questions about it."""

    task: str
    """The file's name in the published set, without "scbench_"."""
    requests: bool = False
    """Whether every question is asked of the text alone."""

    def read(self, row: Row) -> list[Sample]:
        """Return the conversation of a row, or its first question with all others."""
        document = _numbers(row) if self.task == "mf" else row.text("context")
        turns = row.fields.get("multi_turns")
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
            raise row.bad("has no list of questions in field 'multi_turns'")
        turns = turns if self.requests else turns[:TURNS]
        asked = tuple(self._question(row, row._replace(fields=turn)) for turn in turns)
        head = _FORMS.get(self.task, [""])[0]
        if self.task == "mf":
            head = (str(turns[0]["input"]) if self.requests else _sought(row, turns[0]["input"])) + "\n\n"
        span = (len(head), len(head) + len(document))
        if self.requests:
            text = Sample(id=str(row.number), content=head + document, targets=(), reply="", span=span, asked=asked)
            return [text.asking(asked[0])]
        # In mf the number that is sought stands before the text already.
        content = f"{head}{document}\n\n{turns[0]['input'] if self.task == 'mf' else asked[0].text}"
        return [
            Sample(
                id=str(row.number),
                content=content,
                turns=(content, *(one.text for one in asked[1:])),
                said=tuple(one.reply for one in asked[:-1]),
                targets=tuple(json.dumps(one.targets, ensure_ascii=False) for one in asked),
                reply=json.dumps([one.reply for one in asked], ensure_ascii=False),
                question=asked[0].text,
                span=span,
            )
        ]

    def _question(self, row: Row, turn: Row) -> Question:
        kind, targets = self.task, turn.texts("answer")
        if self.task in KINDS:
            kind = turn.one_of("task", (*KINDS[self.task], *(f"scbench_{kind}" for kind in KINDS[self.task])))
            kind = kind.removeprefix("scbench_")
        values = {"input": turn.text("input")}
        if kind == "choice_eng":
            options = turn.texts("options")
            if len(options) != len(LETTERS) or targets[0] not in options:
                raise row.bad(f"has the options {options!r} to the answer {targets[0]!r}")
            values |= dict(zip(LETTERS, options, strict=True))
            targets = targets[0], LETTERS[options.index(targets[0])]
        elif kind == "repoqa":
            targets = targets[0], turn.text("name"), row.text("repo")
        elif kind in _NUMBERS and not re.fullmatch(_NUMBERS[kind], targets[0]):
            raise row.bad(f"holds {targets[0]!r} in field 'answer' where a number is needed")
        if kind == "mf":
            values["sought"] = _sought(row, values["input"])
        text = _FORMS.get(self.task, ["", "{input}"])[1].format_map(values)
        # The official code writes the answer into the history as it stands.
        return Question(text=text, targets=targets, reply=str(turn.fields["answer"]), gap="" if self.requests else "\n")

    def kind_of(self, targets: Sequence[str]) -> str:
        """Return the kind of the question that has these references; the task's own unless it is mixed."""
        if self.task == "repoqa_and_kv":
            return "repoqa" if len(targets) > 1 else "kv"
        if self.task == "summary_with_needles":
            return "passkey" if re.fullmatch(_NUMBERS["passkey"], targets[0]) else "summary"
        return self.task

    def score(self, prediction: str, sample: Sample) -> float:
        """Return the task's own metric; of a conversation the mean over its turns."""
        answers = _turn_by_turn(prediction, sample.targets)
        known = [one.targets for one in sample.asked] or [targets for _, targets in answers]
        functions = [(one[1], one[0]) for one in known if self.kind_of(one) == "repoqa" and len(one) > 1]
        return sum(self._one(said, targets, functions) for said, targets in answers) / len(answers)

    def _one(self, prediction: str, targets: Sequence[str], functions: Functions) -> float:
        kind = self.kind_of(targets)
        return _repeated(prediction, targets, functions) if kind == "repoqa" else _METRICS[kind](prediction, targets)

    def summarise(self, scores: Sequence[float], answers: Sequence[tuple[str, tuple[str, ...]]]) -> float:
        """Return the mean over all answers; of two kinds the mean of theirs.

        An answer that repeats a function is compared with all functions of its repository that are asked for.
        """
        found = [one for prediction, targets in answers for one in _turn_by_turn(prediction, targets)]
        functions, kinds = defaultdict[str, list[tuple[str, str]]](list), defaultdict[str, list[float]](list)
        for _, targets in found:
            if len(targets) == 3 and self.kind_of(targets) == "repoqa":
                functions[targets[2]].append((targets[1], targets[0]))
        for said, targets in found:
            kinds[self.kind_of(targets)].append(self._one(said, targets, functions["".join(targets[2:3])]))
        means = [sum(part) / len(part) for part in kinds.values()]
        return sum(means) / len(means) if means else 0.0


def _numbers(row: Row) -> str:
    """Return the list of numbers as the prompt has it: as Python writes lists."""
    numbers = row.fields.get("context")
    if not isinstance(numbers, list) or not numbers or any(type(one) not in (int, float) for one in numbers):
        raise row.bad("has no list of numbers in field 'context'")
    return str(numbers)


def _sought(row: Row, question: str) -> str:
    found = re.search(r"The .+ is", question)
    if found is None:
        raise row.bad(f"does not say \"The ... is\" in field 'input': {question[:80]!r}")
    return f"What is {found[0].lower()[:-3]}?"


def _turn_by_turn(prediction: str, targets: Sequence[str]) -> list[tuple[str, tuple[str, ...]]]:
    """Return the answers of a conversation with their references; a single answer is one turn."""
    references = [_list(target) for target in targets]
    if any(reference is None for reference in references):
        return [(prediction, tuple(targets))]
    said = _list(prediction)
    if said is None or len(said) != len(targets):
        raise ValueError(f"{prediction[:80]!r} is not a JSON list of {len(targets)} answers, one for each turn")
    return [(one, tuple(reference or ())) for one, reference in zip(said, references, strict=True)]


def _list(text: str) -> list[str] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) and all(isinstance(one, str) for one in found) else None


# New tokens, what the official code leaves for all answers, metric, rows.
_TASKS = {
    "kv": (150, 150 * TURNS, "the value is in the answer", 100),
    "prefix_suffix": (150, 150 * TURNS, "the string is in the answer", 100),
    "vt": (30, 30 * TURNS, "share of the variables in the answer", 90),
    "repoqa": (1024, 1024 * TURNS, "likest to the right function, by BLEU of 0.8 or more", 88),
    "qa_eng": (40, 40 * TURNS, "the reference is in the answer", 69),
    "qa_chn": (40, 40 * TURNS, "character F1", 35),
    "choice_eng": (40, 40 * TURNS, "accuracy of the letter", 58),
    "many_shot": (10, 10 * TURNS, "the reference is in the answer", 54),
    "mf": (5, 5 * TURNS, "first number", 100),
    "summary": (200, 200 * TURNS, "ROUGE-Lsum", 70),
    "summary_with_needles": (800, (800 + 15) * TURNS // 2, "mean of ROUGE-Lsum and first integer", 70),
    "repoqa_and_kv": (1024, (1024 + 80) * TURNS // 2, "mean of the likest function and the value", 88),
}
TASKS: tuple[SCBenchTask, ...] = tuple(
    SCBenchTask(
        name=f"scbench/{name}{'_requests' * requests}",
        source=f"SCBench, arXiv 2412.10319, multi-{'request' if requests else 'turn'} mode",
        metric=metric,
        max_new_tokens=new,
        limit=LONGEST - room - REQUEST_ROOM * requests,
        truncation="middle",
        reencode=True,
        file=f"data/scbench_{name}.jsonl",
        repo="microsoft/SCBench",
        revision="283310bb8c5ba6909dd9a6b1be087d2937f76f6d",
        size=size,
        questions=TURNS if requests else None,
        task=name,
        requests=requests,
        session=not requests,
    )
    for requests in (False, True)
    for name, (new, room, metric, size) in _TASKS.items()
)
