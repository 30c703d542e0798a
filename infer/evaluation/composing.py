"""What it costs to read documents apart and ask about them together: against one read of all, within the same memory.

    python -m locret.infer.evaluation.composing --model checkpoints/tiny --heads checkpoints/tiny-heads

Texts of generated tasks are cut into documents. Each question is asked with the full cache, after one read of all
within a budget, and about a composed context: of documents that were read whole, so that only reading apart differs;
with all units of documents read within the budget; and within that budget in total, divided fairly or by score. What
asks for several values is taken only where these are in different documents.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tqdm.auto import tqdm

from locret.cli.command import parse_options
from locret.data import tasks
from locret.data.tasks import Sample
from locret.data.tasks.generated.base import GeneratedTask
from locret.files import write_text
from locret.policy.policy import LEAST_CHUNK

ARMS = ("full cache", "one read", "apart, everything kept", "apart, all units", "apart, fair", "apart, by score")
_SENTENCE = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True, kw_only=True)
class ComposingOptions:
    """What is read, in how many documents, and within which budget."""

    model: str = "checkpoints/tiny"
    """Backbone."""
    heads: str = "checkpoints/tiny-heads"
    """Retaining heads for it."""
    tokens: list[int] = field(default_factory=lambda: [2048])
    """Lengths of the texts in tokens, all documents together."""
    documents: list[int] = field(default_factory=lambda: [2, 4])
    """How many documents each text is cut into."""
    tasks: list[str] = field(
        default_factory=lambda: ["multikey", "lookalikes/needles", "multivalue", "variable_tracking"]
    )
    """Generated tasks."""
    samples: int = 16
    """Questions per task, length and number of documents."""
    budget: int = 256
    """Units per KV head in total, local tokens included."""
    seed: int = 0
    """Of the samples."""
    output: str | None = None
    """Write PATH.json and PATH.md, cell by cell; without it the table goes to standard output."""

    def __post_init__(self) -> None:
        if self.samples < 1 or self.budget < 8:
            raise ValueError(f"--samples {self.samples} --budget {self.budget}: give at least 1 and 8")
        if any(documents < 2 for documents in self.documents):
            raise ValueError(f"--documents {self.documents}: a composed context has two documents or more")
        if not (self.documents and self.tokens and self.tasks):
            raise ValueError("--tokens, --documents and --tasks: one of them names nothing; give at least one of each")


def cut(text: str, documents: int) -> list[str]:
    """Cut a text into about equal parts where sentences end.

    Raises:
        ValueError: If it has too few sentences.
    """
    ends = [match.end() for match in _SENTENCE.finditer(text)]
    cuts = [0]
    for number in range(1, documents):
        wanted = number * len(text) // documents
        cuts.append(min((end for end in ends if end > cuts[-1]), key=lambda end: abs(end - wanted), default=len(text)))
    parts = [text[start:end].strip() for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True)]
    if not all(parts):
        raise ValueError(f"a text of {len(ends)} sentences cannot be cut into {documents} documents; give more tokens")
    return parts


def samples(
    options: ComposingOptions, task: GeneratedTask, tokens: int, documents: int, tokenizer: Any
) -> Iterator[Sample]:
    """Yield questions whose values, where there are several, are not all in one document."""
    found, number = 0, 0
    while found < options.samples:
        depth = random.Random(f"{options.seed}/{number}").random()
        sample = task.sample(tokenizer, tokens, depth=depth, seed=f"{options.seed}/{number}")
        number += 1
        if len(sample.targets) == 1 or len(documents_of(sample, documents)) > 1:
            found += 1
            yield sample


def generated(name: str) -> GeneratedTask:
    """Return a task whose texts are made here.

    Raises:
        ValueError: If there is none of that name.
    """
    task = tasks.get(name)
    if not isinstance(task, GeneratedTask):
        raise ValueError(
            f"--tasks {name} has texts of its own, which are not cut; take one of {', '.join(tasks.names())}"
        )
    return task


def made_samples(task: GeneratedTask, tokenizer: Any, tokens: int, count: int, seed: int) -> list[Sample]:
    """Return all samples of a length, so that what cannot be made is refused before the first is asked.

    Raises:
        ValueError: Naming the sample that cannot be made.
    """
    sample, found = task.sampler(tokenizer, tokens, samples=count, seed=seed), []
    for number in range(count):
        try:
            found.append(sample(number))
        except ValueError as error:
            raise ValueError(
                f"sample {number + 1} of {count} of {task.name} cannot be made of --tokens {tokens} ({error})"
            ) from error
    return found


def documents_of(sample: Sample, documents: int) -> list[int]:
    """Return the numbers of the documents that hold a value which is asked for."""
    parts = cut(sample.document, documents)
    return [number for number, part in enumerate(parts) if any(target in part for target in sample.targets)]


class Composing:
    """Asks one question in every way.

    Args:
        options: What to measure.
        loaded: The model, read within the budget.
        whole: The same model, which keeps everything.
    """

    def __init__(self, options: ComposingOptions, loaded: Any, whole: Any) -> None:
        self.options, self.bounded, self.whole = options, loaded, whole

    def ask(self, task: GeneratedTask, sample: Sample, documents: int) -> dict[str, float]:
        """Return the score of each way, and of fair shares with the documents in reversed order."""
        from locret import compose

        parts, question = cut(sample.document, documents), sample.question
        together = "\n\n".join(parts) + "\n"
        apart = [self.bounded.read(f"{part}\n", progress=False) for part in parts]
        budget = self.options.budget
        contexts = {
            "full cache": self.whole.read(together, progress=False),
            "one read": self.bounded.read(together, progress=False),
            "apart, everything kept": compose([self.whole.read(f"{part}\n", progress=False) for part in parts]),
            "apart, all units": compose(apart),
            "apart, fair": compose(apart, budget),
            "apart, by score": compose(apart, budget, "score"),
            "reversed": compose(apart[::-1], budget),
        }
        answers = {name: one.ask(question, max_new_tokens=task.max_new_tokens) for name, one in contexts.items()}
        return {name: task.score(answer, sample) for name, answer in answers.items()}


def measure(options: ComposingOptions) -> Iterator[dict[str, Any]]:
    """Yield the record after every task, length and number of documents, with the scores so far.

    Raises:
        ValueError: If something is missing or does not match.
    """
    import torch

    from locret import LongContextModel, RetentionPolicy

    torch.set_num_threads(1)
    local = options.budget // 4
    numbers: dict[str, Any] = {"chunk_size": LEAST_CHUNK, "stabilizers": options.budget // 4, "local_len": local}
    policy = RetentionPolicy(budget=options.budget - local, **numbers)
    bounded = LongContextModel.from_pretrained(options.model, heads=options.heads, policy=policy)
    everything = RetentionPolicy(budget=2 * max(options.tokens), **numbers)
    whole = LongContextModel(bounded.model, bounded.tokenizer, bounded.scorer, everything)
    # What the embedded backbone is for is what is asked here.
    bounded._knows_little = whole._knows_little = False
    asking = Composing(options, bounded, whole)
    rows = []
    cells = [(task, n, k) for n in options.tokens for k in options.documents for task in options.tasks]
    with tqdm(total=len(cells) * options.samples, desc="asking", disable=None) as bar:
        for name, tokens, documents in cells:
            task, scores, places = generated(name), list[dict[str, float]](), list[list[int]]()
            for sample in samples(options, task, tokens, documents, bounded.tokenizer):
                scores.append(asking.ask(task, sample, documents))
                places.append(documents_of(sample, documents))
                bar.update()
            rows.append({"task": name, "tokens": tokens, "documents": documents, **summary(scores, places, documents)})
            yield {"policy": policy.to_dict(), "samples": options.samples, "budget": options.budget, "rows": rows}


def summary(scores: Sequence[Mapping[str, float]], places: Sequence[Sequence[int]], documents: int) -> dict[str, Any]:
    """Return mean scores, and those of fair shares by where the one document that is asked about stands."""
    means = {name: _mean([one[name] for one in scores]) for name in (*ARMS, "reversed")}
    ends: dict[str, list[float]] = {"first": [], "last": []}
    for one, where in zip(scores, places, strict=True):
        for at, name in ((0, "apart, fair"), (documents - 1, "reversed")):
            if list(where) == [at]:
                ends["first"].append(one[name])
            if list(where) == [documents - 1 - at]:
                ends["last"].append(one[name])
    return {"scores": means, "asked": {name: _mean(found) for name, found in ends.items() if found}}


def _mean(numbers: Sequence[float]) -> float:
    return round(sum(numbers) / len(numbers), 4)


def table(record: Mapping[str, Any]) -> str:
    """Return the record as a table for people."""
    lines = ["| task | tokens | documents | " + " | ".join(ARMS) + " | asked first | asked last |"]
    lines.append("| --- " * 3 + "| ---: " * (len(ARMS) + 2) + "|")
    for row in record["rows"]:
        shown = [f"{100 * row['scores'][name]:.0f}" for name in ARMS]
        shown += [f"{100 * row['asked'][end]:.0f}" if end in row["asked"] else "" for end in ("first", "last")]
        lines.append(f"| {row['task']} | {row['tokens']:,} | {row['documents']} | " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"


def command(argv: Sequence[str] | None = None) -> int:
    """Measure, and write or print the record; return 0.

    Raises:
        ValueError: For what the user must change.
        OSError: If a file cannot be written.
    """
    title = "What it costs to read documents apart and ask about them together."
    (options,), _ = parse_options("locret.infer.evaluation.composing", title, [ComposingOptions], argv)
    for record in measure(options):
        if options.output is not None:
            write_text(f"{options.output}.json", json.dumps(record, indent=1) + "\n", parents=True)
            write_text(f"{options.output}.md", table(record), parents=True)
    if options.output is None:
        sys.stdout.write(table(record))
    return 0


if __name__ == "__main__":
    from locret.cli.command import run

    run(command, prog="locret.infer.evaluation.composing")
