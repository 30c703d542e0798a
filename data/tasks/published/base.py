"""What a published benchmark's task is: its items, its protocol, and how an answer is scored.

A generated task (`locret.data.tasks`) makes its samples; a published one reads rows that others wrote and puts them
into the prompt that its authors prescribe. The protocol belongs to the task: truncation, generation length, stop rule,
chat template or not, and the metric with its cleaning of the answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Union

Truncation = Literal["middle", "words", "none"]
MAX_ROW_BYTES = 4_900_000
"""Just under 5 MB: 1.2 million tokens of English."""
OnBadRow = Callable[["BadRow"], None]
Record = Union[Mapping[str, Any], "BadRow"]
"""A row, or what is wrong with it."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """One question of a published task; it stands where `Sample` stands for generated ones."""

    id: str
    """Unique within the task: "12" for row 12, "12/3" for question 3 of row 12; both from 0."""
    content: str
    """The official prompt, whole: no chat template, not truncated."""
    targets: tuple[str, ...]
    """The references."""
    reply: str
    """What the oracle takes for the true answer: the first reference in most tasks."""
    system: str = ""
    """System turn, where the protocol has one."""
    choices: tuple[str, ...] = ()
    """The options of a choice, or all classes of a classification."""
    depths: tuple[float, ...] = ()
    """Where each planted statement is, from 0 to 1, where that is known."""
    span: tuple[int, int] = (0, 0)
    """Where the document begins and ends in `content`, in characters; truncation "words" cuts there alone."""
    lead: str = ""
    """What the protocol puts into the model's mouth after the assistant header."""
    plain: bool = False
    """Whether this prompt is a text to complete although the task's others are chat turns."""
    extra: tuple[tuple[str, str], ...] = ()
    """Further facts that a metric needs, as names and values."""

    @property
    def document(self) -> str:
        """The long text of the prompt."""
        return self.content[slice(*self.span)]


class BadRow(ValueError):
    """A row that cannot be asked; `reason` is a few words that a count of skipped rows is kept under."""

    def __init__(self, place: str, reason: str, detail: str):
        super().__init__(f"{place}: {detail}; mend or drop the row, or pass --skip-bad-rows to leave out such rows")
        self.place = place
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class PublishedTask(ABC):
    """A task of a published benchmark. The fields named in `settable` are its options; they stand in every result."""

    settable: ClassVar[tuple[str, ...]] = ("max_new_tokens", "limit", "max_row_bytes")
    """Fields that a user may change; all others are the protocol."""

    name: str
    """Benchmark and task, such as "longbench/qasper"."""
    version: int = 1
    """Raise it when prompts or scores change: results of different versions are never compared."""
    source: str
    """Paper or repository that the protocol comes from."""
    metric: str
    """The metric in a few words."""
    max_new_tokens: int
    min_new_tokens: int = 0
    """Tokens before which neither the end of the text nor `stop` counts."""
    chat: bool
    """Whether the prompt is a user turn of the chat template; else it is a text to complete."""
    stop: tuple[str, ...] = ()
    """The answer is cut before the first of these."""
    limit: int | None = None
    """Tokens of the whole prompt that the protocol allows, before the chat template; with truncation "words", of the
    document alone. None if it sets none."""
    truncation: Truncation = "none"
    """What is cut from a longer prompt: its middle, or words of its document."""
    reencode: bool = False
    """Whether a prompt cut in the middle is decoded to text and encoded again, as some protocols do."""
    cut_start: bool = False
    """Whether truncation "words" cuts the document's start instead of its end."""
    file: str
    """Where the rows lie in the published layout, relative to a local copy (`--data-dir`)."""
    repo: str
    """Data set repository on the Hub."""
    revision: str
    """Commit that the repository is pinned to."""
    hub_file: str = ""
    """Where the rows lie in that repository; `file` if empty. "data.zip!a.jsonl" is a file inside an archive."""
    size: int | None = None
    """Items of the published set, where known."""
    max_row_bytes: int = MAX_ROW_BYTES
    """A longer line is a bad row."""

    def items(self, records: Iterable[tuple[str, Record]], on_bad: OnBadRow | None = None) -> Iterator[Item]:
        """Yield the items of rows, one after the other.

        Args:
            records: Rows as `read_records` yields them, each with its place "file:line" for messages.
            on_bad: Called with each row that cannot be asked, which is then left out; if None, it is raised. The ids
                of other rows do not depend on it.

        Raises:
            BadRow: Naming file, line and field.
        """
        for index, (place, record) in enumerate(records):
            try:
                if isinstance(record, BadRow):
                    raise record
                found = self.read(index, place, record)
            except BadRow as bad:
                if on_bad is None:
                    raise
                on_bad(bad)
            else:
                yield from found

    @abstractmethod
    def read(self, index: int, place: str, record: Mapping[str, Any]) -> list[Item]:
        """Return the items of row `index`.

        Raises:
            BadRow: If a field is missing, empty or of the wrong type.
        """

    @abstractmethod
    def score(self, prediction: str, item: Item) -> float:
        """Return the score of a generated answer, from 0 to 1."""

    def __post_init__(self) -> None:
        for field, value in (("max_new_tokens", self.max_new_tokens), ("max_row_bytes", self.max_row_bytes)):
            if type(value) is not int or value < 1:
                raise ValueError(f"task {self.name}: {field}={value!r} must be a whole number, 1 or more")
        if self.limit is not None and (type(self.limit) is not int or self.limit < 2):
            raise ValueError(f"task {self.name}: limit={self.limit!r} must be a number of tokens, 2 or more, or none")

    def summarise(self, scores: Sequence[float], answers: Sequence[tuple[str, tuple[str, ...]]]) -> float:
        """Return the task's score from its items', from 0 to 1: their mean, unless a protocol has another rule.

        Args:
            scores: What `score` gave.
            answers: Predictions with their references, for protocols whose task score is no mean of items' scores.
        """
        return sum(scores) / len(scores) if scores else 0.0

    def allowed(self, item: Item, count: Callable[[str], int]) -> int | None:
        """Return the tokens that this item's prompt may have; None if the protocol sets no limit.

        Args:
            item: The item.
            count: Tokens of a text, as the tokenizer counts by default; some protocols leave room for the reference.
        """
        return self.limit

    def framed(self, item: Item, content: str, tokenizer: Any) -> str | None:
        """Return the whole chat prompt where the official runs wrote their own; None for the chat template.

        Args:
            item: The item.
            content: Its content after truncation.
            tokenizer: Tells which model family's turns to write.
        """
        return None

    def options(self) -> dict[str, Any]:
        """Return the options as a dictionary."""
        return {name: getattr(self, name) for name in self.settable}
