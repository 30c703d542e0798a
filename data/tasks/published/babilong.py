"""BABILong: bAbI's facts about people, places and things, hidden in books; one answer of a few words.

Paper:     arXiv 2406.10149.
Source:    booydar/babilong (Apache-2.0): prompts.py, metrics.py and scripts/run_model_on_babilong.py; data sets
           RMT-team/babilong (100 rows for each task and length) and RMT-team/babilong-1k-samples (1,000).
Fields:    input (the text), question, target.
Lengths:   0k, 1k, 2k, 4k ... 512k, 1M, 10M, in tokens of GPT-2, so that another tokenizer may count more or fewer. They
           are chosen by --lengths (4096 for 4k); 0k, the facts alone, by the option `length` or the suite babilong-0k.
Metrics:   metrics.py: the first sentence must name the right label and no other.
Deviates:  never. The official runs of some backbones have "You are a helpful assistant." as their system turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from locret.data.tasks.metrics.choice import only_labels
from locret.data.tasks.published.base import PublishedTask, prompts_of
from locret.data.tasks.published.loading import FileSamples
from locret.data.tasks.task import Sample, SampleSet, Selection, Wanted
from locret.data.training.json_rows import BadRow, text_of

if TYPE_CHECKING:
    from typing_extensions import Self

LENGTHS = {"0k": 0, **{f"{2**power}k": 1024 << power for power in range(10)}, "1M": 1 << 20, "10M": 10 << 20}
"""Tokens, as --lengths has them."""
REVISIONS = {
    "babilong": "ee0d588794c7ac098062ee0d247c733d62e94fe2",
    "babilong-1k-samples": "fc4d1a584dfc498c37578753bee4cdd91b987ae2",
}
_PROMPTS: dict[str, dict[str, str]] = prompts_of("babilong")
_PLACES = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
LABELS = {
    **dict.fromkeys(("qa1", "qa2", "qa3", "qa4"), _PLACES),
    "qa5": ("Bill", "Fred", "Jeff", "Mary", "apple", "football", "milk"),
    "qa6": ("no", "yes"),
    "qa7": ("none", "one", "three", "two"),
    "qa8": ("apple", "football", "milk", "nothing"),
    "qa9": ("no", "yes"),
    "qa10": ("maybe", "no", "yes"),
}


@dataclass(frozen=True, kw_only=True)
class BabilongTask(PublishedTask):
    """One task of BABILong; a file holds its rows of one length."""

    settable: ClassVar[tuple[str, ...]] = (
        *PublishedTask.settable,
        "length",
        "collection",
        "instruction",
        "examples",
        "post_prompt",
    )

    task: str
    """The task's name in the published set."""
    length: str = ""
    """Length of the rows as the data set names it, such as 4k; empty for those of --lengths."""
    collection: Literal["babilong", "babilong-1k-samples"] = "babilong"
    """The data set: 100 rows for each task and length, or 1,000 of lengths up to 128k."""
    instruction: bool = True
    """Say what the task is."""
    examples: bool = True
    """Show two or three examples before the text."""
    post_prompt: bool = True
    """Say what the answer must look like."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_choice("length", ("", *LENGTHS))
        self.check_choice("collection", tuple(REVISIONS))

    def read(self, index: int, where: str, record: Mapping[str, Any]) -> list[Sample]:
        """Return the sample of a row."""
        document = text_of(record, where, "input").strip()
        question, target = text_of(record, where, "question"), text_of(record, where, "target")
        labels = LABELS[self.task]
        if not {label.lower() for label in labels} >= set(target.lower().split(",")):
            raise BadRow(
                where, "wrong target", f"holds {target!r} in field 'target' where {', '.join(labels)} are known"
            )
        own = _PROMPTS[self.task]
        parts = (own[name] if getattr(self, name) else "" for name in ("instruction", "examples", "post_prompt"))
        head = ("\n\n".join([*parts, "<context>"])).lstrip() + "\n"
        asked = f"Question: {question}".rstrip()  # an example may ask the same, without that word
        tail, targets = f"\n</context>\n\n{asked}", (target, question)  # the metric looks into the question too
        return [self.sample_of(index, head, document, tail, targets, question=asked, choices=labels)]

    def select(self, wanted: Wanted) -> Selection:
        """Return the asked rows of every length.

        Raises:
            NoSamples: If there is no file of a length.
            ValueError: If a length is none of the benchmark's, or a row is bad.
            OSError: If the Hub or a file cannot be read.
        """
        lengths = [LENGTHS[self.length]] if self.length else wanted.lengths
        task, _ = self.fitted(wanted.positions, wanted.max_prompt, wanted.max_new_tokens)
        found: dict[int, SampleSet] = {
            tokens: FileSamples(task.of_length(tokens).opened(wanted), wanted.samples) for tokens in lengths
        }
        return task.selection("option" if self.length else "length", found, wanted, self.max_new_tokens)

    def of_length(self, tokens: int) -> Self:
        """Return the task of the file with rows of a length.

        Raises:
            ValueError: If the benchmark has no such length.
        """
        name = next((name for name, size in LENGTHS.items() if size == tokens), None)
        if name is None:
            known = ", ".join(f"{size} ({name})" for name, size in LENGTHS.items() if size)
            raise ValueError(f"--lengths {tokens}: {self.name} has rows of {known}; give one of these")
        small = f"data/{self.task}/{name}.json"
        return replace(
            self,
            file=f"{self.task}_{name}.jsonl",
            hub_file=small if self.collection == "babilong" else f"{name}/{self.task}-00000-of-{_parts(name)}.parquet",
            repo=f"RMT-team/{self.collection}",
            revision=REVISIONS[self.collection],
            size=100 if self.collection == "babilong" else None,
        )

    def score(self, prediction: str, sample: Sample) -> float:
        """Return 1 for the right label alone."""
        return only_labels(prediction, sample.targets[0], "".join(sample.targets[1:]), LABELS[self.task])


def _parts(length: str) -> str:
    """Return into how many files the larger collection cuts its rows of a length."""
    return "00002" if length == "128k" else "00001"


TASKS: tuple[BabilongTask, ...] = tuple(
    BabilongTask(
        name=f"babilong/{task}",
        source="BABILong, arXiv 2406.10149",
        metric="the right label and no other",
        max_new_tokens=20,
        file="",
        max_row_bytes=64 << 20,  # rows of ten million tokens are the published data
        task=task,
    )
    for task in LABELS
)
