"""BABILong: bAbI's facts about people, places and things, hidden in books; one answer of a few words.

Paper:     arXiv 2406.10149.
Source:    booydar/babilong (Apache-2.0): prompts.py, metrics.py and scripts/run_model_on_babilong.py; data set
           RMT-team/babilong, 100 rows for each task and length.
Fields:    input (the text), question, target.
Lengths:   0k, 1k, 2k, 4k ... 512k, 1M, 10M, in tokens of GPT-2, so that another tokenizer may count more or fewer. They
           are chosen by --lengths (4096 for 4k); 0k, the facts alone, by the suite babilong-0k.
Metrics:   metrics.py: the first sentence must name the right label and no other.
Deviates:  never. The official runs of some backbones have "You are a helpful assistant." as their system turn.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from typing_extensions import Self

from locret.data.tasks import rows
from locret.data.tasks.metrics.choice import only_labels
from locret.data.tasks.published.base import PublishedTask, prompts_of
from locret.data.tasks.rows import Row
from locret.data.tasks.task import Sample, SampleSet, Selection, Wanted

LENGTHS = {"0k": 0, **{f"{2**power}k": 1024 << power for power in range(10)}, "1M": 1 << 20, "10M": 10 << 20}
"""Tokens, as --lengths has them."""
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

    task: str
    """The task's name in the published set."""

    def read(self, row: Row) -> list[Sample]:
        document, question, target = row.text("input").strip(), row.text("question"), row.text("target")
        labels, own = LABELS[self.task], _PROMPTS[self.task]
        if not {label.lower() for label in labels} >= set(target.lower().split(",")):
            raise row.bad(f"holds {target!r} in field 'target' where {', '.join(labels)} are known")
        head = "\n\n".join([own["instruction"], own["examples"], own["post_prompt"], "<context>"]).lstrip() + "\n"
        asked = f"Question: {question}".rstrip()  # an example may ask the same, without that word
        tail, targets = f"\n</context>\n\n{asked}", (target, question)  # the metric looks into the question too
        return [self.sample_of(row, head, document, tail, targets, question=asked, choices=labels)]

    def select(self, wanted: Wanted) -> Selection:
        task, _ = self.fitted(wanted)
        found: dict[int, SampleSet] = {
            tokens: rows.open_rows(task.of_length(tokens), wanted.folders, wanted.samples) for tokens in wanted.lengths
        }
        return task.selection("length", found, wanted, self.max_new_tokens)

    def of_length(self, tokens: int) -> Self:
        """Return the task of the file with rows of a length."""
        name = next((name for name, size in LENGTHS.items() if size == tokens), None)
        if name is None:
            known = ", ".join(f"{size} ({name})" for name, size in LENGTHS.items() if size)
            raise ValueError(f"--lengths {tokens}: {self.name} has rows of {known}; give one of these")
        return replace(self, file=f"{self.task}_{name}.jsonl", hub_file=f"data/{self.task}/{name}.json")

    def score(self, prediction: str, sample: Sample) -> float:
        return only_labels(prediction, sample.targets[0], "".join(sample.targets[1:]), LABELS[self.task])


TASKS: tuple[BabilongTask, ...] = tuple(
    BabilongTask(
        name=f"babilong/{task}",
        source="BABILong, arXiv 2406.10149",
        metric="the right label and no other",
        max_new_tokens=20,
        file="",
        repo="RMT-team/babilong",
        revision="ee0d588794c7ac098062ee0d247c733d62e94fe2",
        size=100,
        task=task,
    )
    for task in LABELS
)
