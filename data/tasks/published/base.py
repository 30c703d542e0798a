"""What a published benchmark's task is: rows that others wrote, in the prompt that its authors prescribe."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from locret.data.tasks.published import loading
from locret.data.tasks.task import Sample, SampleSet, Selection, Task, Wanted
from locret.data.training.json_rows import MAX_ROW_BYTES, BadRow, Entry

if TYPE_CHECKING:
    from typing_extensions import Self

_TEMPLATE_ROOM, _QUESTION_ROOM = 128, 1024
"""Tokens left for turns around a prompt, and for turns and question around a document that alone is counted."""


def prompts_of(benchmark: str) -> Any:
    """Return the texts that a benchmark's authors prescribe, which lie beside its file."""
    return json.loads(Path(__file__).with_name(f"{benchmark}_prompts.json").read_text(encoding="utf-8"))


def row_id(record: Mapping[str, Any], field: str = "id") -> tuple[tuple[str, str], ...]:
    """Return what a row says of its own number, as a sample's `extra`."""
    return (("row id", str(record[field])),) if field in record else ()


@dataclass(frozen=True, kw_only=True)
class PublishedTask(Task):
    """A task of a published benchmark: one file of rows, each with one or several questions."""

    settable: ClassVar[tuple[str, ...]] = ("max_new_tokens", "limit", "max_row_bytes")

    file: str
    """Where the rows lie in the published layout, relative to a local copy (`--data-dir`)."""
    repo: str = ""
    """Data set repository on the Hub; empty if it is not there."""
    revision: str = ""
    """Commit that the repository is pinned to."""
    hub_file: str = ""
    """Where the rows lie in that repository; `file` if empty. "data.zip!a.jsonl" is a file inside an archive."""
    max_row_bytes: int = MAX_ROW_BYTES
    """A longer row is a bad row."""

    @abstractmethod
    def read(self, index: int, where: str, record: Mapping[str, Any]) -> list[Sample]:
        """Return the samples of row `index`.

        Raises:
            BadRow: If a field is missing, empty or of the wrong type.
        """

    def __post_init__(self) -> None:
        for field, value in (("max_new_tokens", self.max_new_tokens), ("max_row_bytes", self.max_row_bytes)):
            if type(value) is not int or value < 1:
                raise ValueError(f"task {self.name}: {field}={value!r} must be a whole number, 1 or more")
        if self.limit is not None and (type(self.limit) is not int or self.limit < 2):
            raise ValueError(f"task {self.name}: limit={self.limit!r} must be a number of tokens, 2 or more, or none")

    def check_choice(self, option: str, known: Sequence[str]) -> None:
        """Refuse an option's value that is none of the known ones.

        Raises:
            ValueError: Naming those.
        """
        if (value := getattr(self, option)) not in known:
            choices = ", ".join(filter(None, known))
            raise ValueError(f"task {self.name}: {option}={value!r} is unknown; use one of {choices}")

    def sample_of(
        self, index: int, head: str, document: str, tail: str, targets: tuple[str, ...], **more: Any
    ) -> Sample:
        """Return the sample of row `index`: a document between two texts, and what is right."""
        span = len(head), len(head) + len(document)
        facts = {"id": str(index), "reply": targets[0], "span": span, **more}
        return Sample(content=head + document + tail, targets=targets, **facts)

    def items(self, rows: Iterable[Entry], on_bad: Callable[[BadRow], None] | None = None) -> Iterator[Sample]:
        """Yield the samples of rows, one after the other.

        Args:
            rows: The rows of the task's file.
            on_bad: Called with each row that cannot be asked, which is then left out; if None, it is raised. The ids
                of other rows do not depend on it.

        Raises:
            BadRow: Naming file, line and field.
        """
        for row in rows:
            try:
                found = self.read(row.number, row.where, row.load())
            except BadRow as bad:
                if on_bad is None:
                    raise
                on_bad(bad)
            else:
                yield from found

    def select(self, wanted: Wanted) -> Selection:
        """Return the asked rows of the task's file, with prompts that fit the backbone.

        Raises:
            NoSamples: If there is no file.
            ValueError: If a row is bad, or the backbone leaves no room for a prompt.
            OSError: If the Hub or the file cannot be read.
        """
        task, limit_from = self.fitted(wanted.positions, wanted.max_prompt, wanted.max_new_tokens)
        found = loading.FileSamples(task.opened(wanted), wanted.samples)
        return task.selection(limit_from, {task.limit or 0: found}, wanted, self.max_new_tokens)

    def opened(self, wanted: Wanted) -> loading.TaskRows:
        """Return the task's rows, found but not read."""
        return loading.open_task(
            self, data_dir=wanted.folders, revision=wanted.revision, skip_bad_rows=wanted.skip_bad_rows
        )

    def fitted(self, positions: int | None, max_prompt: int | None, max_new_tokens: int | None) -> tuple[Self, str]:
        """Return the task with prompts that fit the backbone, or what the user asked for, and where its limit is from.

        Args:
            positions: Positions of the backbone, where it says.
            max_prompt: The user's limit in tokens; replaces both others.
            max_new_tokens: The user's longest answer; the protocol's holds where it is shorter.

        Raises:
            ValueError: If the backbone has no room for a prompt besides the answer.
        """
        task = self.shortened(max_new_tokens)
        if max_prompt is not None:
            # A protocol that cuts nothing leaves it to the user where.
            cut = "middle" if task.truncation == "none" else task.truncation
            return replace(task, limit=max_prompt, truncation=cut, bound=max_prompt), "--max-prompt"
        if positions is None or task.truncation == "none":
            return task, "protocol" if task.limit else "none"
        room = _QUESTION_ROOM if task.truncation == "words" else _TEMPLATE_ROOM if task.chat else 0
        fits = positions - task.max_new_tokens - room
        if task.limit is not None and task.limit <= fits:
            return task, "protocol"
        if fits < 2:
            raise ValueError(
                f"task {task.name}: {task.max_new_tokens:,} new tokens leave no room for a prompt within the "
                f"{positions:,} positions of this backbone; lower --max-new-tokens, or give --max-prompt"
            )
        origin = "backbone" if task.limit else "backbone, as the protocol leaves it to the model"
        return replace(task, limit=fits), origin

    def shortened(self, max_new_tokens: int | None) -> Self:
        """Return the task with answers that are no longer than the user wants; its protocol's may be shorter."""
        if max_new_tokens is None:
            return self
        return replace(self, max_new_tokens=min(self.max_new_tokens, max_new_tokens))

    def selection(self, limit_from: str, samples: Mapping[int, SampleSet], wanted: Wanted, longest: int) -> Selection:
        """Return samples of the task with everything that their results depend on besides the backbone.

        Args:
            limit_from: Where the prompts' length comes from.
            samples: By length.
            wanted: What the evaluation asks.
            longest: The protocol's longest answer.
        """
        facts = {
            "version": self.version,
            **self.options(),
            "source": self.source,
            "metric": self.metric,
            "prompt": {
                "form": wanted.template if self.chat else "completion",
                "limit": self.limit,
                "limit_from": limit_from,
                "truncation": self.truncation,
            },
            "generation": {
                "decoding": "greedy",
                "max_new_tokens": self.max_new_tokens,
                "shortened": self.max_new_tokens < longest,
                "min_new_tokens": self.min_new_tokens,
                "stop": list(self.stop),
            },
            "data": [own.facts() for own in samples.values()],
            "asked": {str(tokens): len(own.chosen) for tokens, own in samples.items()},
            "of": self.size,
            **({} if self.questions is None else {"questions": self.questions}),
        }
        return Selection(self, samples, facts)
