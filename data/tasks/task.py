"""What an evaluation task is: which samples it has, how they become prompts, and how an answer is scored.

Truncation, generation length, stop rule, chat template or not, and the metric with its cleaning of the answer belong to
the task.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

SAMPLES = 100
"""Samples of a task per length where they are made, if the user does not say."""
Answers = Sequence[tuple[str, tuple[str, ...]]]
"""Predictions with their references."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question about a text, and what is right."""

    text: str
    targets: tuple[str, ...]
    """The references."""
    reply: str
    """What a model should say; retaining heads and oracle labels take it for the true answer."""
    gap: str = "\n"
    """What stands between the text and the question."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One question about a text, or one session, and what is right."""

    content: str
    """The user's turn, or the text to complete: whole, without chat template, not truncated."""
    targets: tuple[str, ...]
    """The references."""
    reply: str
    """What a model should say; retaining heads and oracle labels take it for the true answer."""
    id: str = ""
    """Where it comes from, unique within the task: "12" for row 12, "12/3" for question 3 of row 12; both from 0."""
    question: str = ""
    """What is asked at the end of `content`, where that is known."""
    system: str = ""
    """System turn, where the protocol has one."""
    choices: tuple[str, ...] = ()
    """The options of a choice, or all classes of a classification."""
    turns: tuple[str, ...] = ()
    """All user turns of a session that is read into one cache, `content` first; each is answered by one of `choices`,
    or freely where there are none. Empty for a single question."""
    said: tuple[str, ...] = ()
    """What stands as the answer to each turn but the last when the next one is asked, whatever the model has answered;
    empty where its own answers stand."""
    depths: tuple[float, ...] = ()
    """Where each planted statement is, from 0 (start of the text) to 1 (end), where that is known."""
    span: tuple[int, int] = (0, 0)
    """Where the document begins and ends in `content`, in characters; truncation "words" cuts there alone."""
    lead: str = ""
    """What the protocol puts into the model's mouth after the assistant header."""
    plain: bool = False
    """Whether this prompt is a text to complete although the task's others are chat turns."""
    asked: tuple[Question, ...] = ()
    """All questions that the task could ask of this text, its own among them; empty where they are not known."""

    @property
    def document(self) -> str:
        """The long text of the prompt."""
        return self.content[slice(*self.span)]

    def asking(self, question: Question) -> Sample:
        """Return the sample that asks another question of the same text, right after the document."""
        content = f"{self.content[: self.span[1]]}{question.gap}{question.text}"
        own = {"question": question.text, "targets": question.targets, "reply": question.reply}
        return replace(self, content=content, **own)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What an evaluation asks of every task; a task takes what applies to it."""

    tokenizer: Callable[[], Any]
    """Loads the backbone's, for texts that are made to a length."""
    lengths: Sequence[int]
    """Tokens of the prompts of tasks that have no length of their own; 0 for published sizes."""
    samples: int | None = None
    """Samples per task and length; None for 100, or for all rows of a file."""
    seed: int = 0
    """Of the samples that are made."""
    folders: Sequence[str] | None = None
    """Local copies of published data, searched in order; None for the Hub."""
    positions: int | None = None
    """Of the backbone, where it says."""
    max_prompt: int | None = None
    """The user's limit of a published prompt in tokens."""
    max_new_tokens: int | None = None
    """The user's longest answer."""
    template: str = "chat"
    """How tasks that are chat turns become text, see `locret.conversation.turns`."""


class NoSamples(ValueError):
    """There are no rows of a task, and none can be made; `reason` is what a suite's table says of it."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason or message


@dataclass(kw_only=True)
class SampleSet:
    """The samples of one task and length that an evaluation asks."""

    task: Task
    chosen: Sequence[int]
    """Their numbers in the whole set, ascending."""
    sample: Callable[[int], Sample]
    """Returns the one of a number."""
    facts: dict[str, Any]
    """What tells these data from others."""
    of: int | None = None
    """Size of the whole set; None where it is unknown."""
    made: bool = False
    """Whether they are made for the run, so that there is no whole set."""
    stand_in: str = ""
    """What stands in for published texts, in a word or two."""

    def label(self, count: int) -> str:
        """Return the task's name, with what part of the set was asked, or what stands in for the published texts."""
        if self.stand_in:
            return f"{self.task.name} ({self.stand_in})"
        if self.made or count == self.of:
            return self.task.name
        part = f"of {self.of:,}" if self.of is not None else "row" if count == 1 else "rows"
        return f"{self.task.name} ({count:,} {part})"


@dataclass(frozen=True)
class Selection:
    """What an evaluation asks of one task."""

    task: Task
    """With the limits that hold here."""
    samples: Mapping[int, SampleSet]
    """By length: tokens of the prompts where they are made to a length, else most tokens; 0 where nothing limits it."""
    facts: dict[str, Any]
    """Everything that results depend on besides the backbone."""


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A task of `locret-eval`. The fields named in `settable` are its options; they stand in every result."""

    settable: ClassVar[tuple[str, ...]] = ()
    """Fields that a user may change; all others are the protocol."""

    name: str
    """Benchmark and task, such as "longbench/qasper"."""
    version: int = 1
    """Raise it when prompts or scores change: results of different versions are never compared."""
    source: str
    """Paper or repository that the task comes from."""
    metric: str
    """The metric in a few words."""
    max_new_tokens: int
    min_new_tokens: int = 0
    """Tokens before which neither the end of the text nor `stop` counts."""
    chat: bool = True
    """Whether the prompt is a user turn of the chat template; else it is a text to complete."""
    stop: tuple[str, ...] = ()
    """The answer is cut before the first of these."""
    limit: int | None = None
    """Tokens of the whole prompt that the protocol allows, before the chat template; with truncation "words", of the
    document alone. None if it sets none."""
    bound: int | None = None
    """Tokens that the whole prompt may have, chat template included; what `truncation` cuts is cut further for it."""
    truncation: Literal["middle", "words", "none"] = "none"
    """What is cut from a longer prompt: its middle, or words of its document."""
    reencode: bool = False
    """Whether a prompt cut in the middle is decoded to text and encoded again, as some protocols do."""
    cut_start: bool = False
    """Whether truncation "words" cuts the document's start instead of its end."""
    size: int | None = None
    """Samples of the published set, where known."""
    questions: int | None = None
    """Most questions of each text that are asked, unless the user gives a number; None: a sample's own alone."""
    session: bool = False
    """Whether a sample is a session of turns that follow each other in one cache."""
    asks_first: bool = False
    """Whether what a row asks stands before its document too, so that no text of the task is read without it."""

    @abstractmethod
    def select(self, wanted: Wanted) -> Selection:
        """Return the samples that an evaluation asks, found but not all read."""

    @abstractmethod
    def score(self, prediction: str, sample: Sample) -> float:
        """Return the score of a generated answer, from 0 to 1."""

    @property
    def family(self) -> str:
        """The benchmark; empty for the tasks of other packages and files."""
        return self.name.split("/")[0] if "/" in self.name and ":" not in self.name else ""

    def summarise(self, scores: Sequence[float], answers: Answers) -> float:
        """Return the task's score from its samples', from 0 to 1: their mean, unless a protocol has another rule."""
        return sum(scores) / len(scores) if scores else 0.0

    def allowed(self, sample: Sample, count: Callable[[str], int]) -> int | None:
        """Return the tokens that this sample's prompt may have; None if the protocol sets no limit.

        `count` gives the tokens of a text as the tokenizer counts by default; some protocols leave room for the answer.
        """
        return self.limit

    def framed(self, sample: Sample, content: str, tokenizer: Any) -> str | None:
        """Return the whole chat prompt where the official runs wrote their own around the content that is left after
        truncation; None for the chat template.
        """
        return None
