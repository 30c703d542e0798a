"""Published tasks in `locret-eval`: which rows are asked, how they become prompts, and what makes them reproducible."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from locret.data.tasks.published import Item, PublishedTask
from locret.data.tasks.published.generated import GeneratedTask
from locret.data.tasks.published.loading import TaskRows, open_task, places
from locret.data.tasks.published.prompts import BuiltPrompt, build_prompt
from locret.data.tasks.published.sirllm import GameTask
from locret.infer.evaluation.item_rows import FileRows, GeneratedRows, source_of
from locret.infer.evaluation.options import SAMPLES, EvalOptions
from locret.infer.evaluation.summary import PublishedSet

AnyRows = FileRows | GeneratedRows

_TEMPLATE_ROOM, _QUESTION_ROOM = 128, 1024
"""Tokens left for turns around a prompt, and for turns and question around a document that alone is counted."""


def fitted(
    task: PublishedTask, positions: int | None, max_prompt: int | None, max_new_tokens: int | None
) -> tuple[PublishedTask, str]:
    """Return a task whose prompts fit the backbone, or what the user asked for, and where its limit comes from.

    Args:
        task: The task with its protocol's limit.
        positions: Positions of the backbone, where it says.
        max_prompt: The user's limit in tokens; replaces both others.
        max_new_tokens: The user's longest answer; the protocol's holds where it is shorter.

    Raises:
        ValueError: If the backbone has no room for a prompt beside the answer.
    """
    if max_new_tokens is not None:
        task = replace(task, max_new_tokens=min(task.max_new_tokens, max_new_tokens))
    if max_prompt is not None:
        # A protocol that cuts nothing leaves it to the user where.
        cut = "middle" if task.truncation == "none" else task.truncation
        return replace(task, limit=max_prompt, truncation=cut), "--max-prompt"
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
    return replace(task, limit=fits), "backbone" if task.limit else "backbone, as the protocol leaves it to the model"


def is_missing(task: PublishedTask, folders: Sequence[str] | None) -> bool:
    """Return whether no local copy has the task's rows; without folders the Hub has them."""
    if folders is None:
        return not task.repo
    spots = [spot.partition("!")[0] for spot in places(task)]
    return not any((Path(folder).expanduser() / spot).is_file() for folder in folders for spot in spots)


@dataclass(frozen=True)
class ItemPlace:
    """One item of a published task; it stands where `runner.Place` stands for generated samples."""

    task: PublishedTask
    rows: AnyRows = field(compare=False, repr=False)
    row: int
    index: int
    tokens: int
    """Most tokens of a prompt, or of prompt and answer together where rows have a length; 0 where nothing limits it."""
    seed: int
    template: str

    @property
    def new_tokens(self) -> int:
        """Most tokens of an answer."""
        return self.task.max_new_tokens

    @property
    def axes(self) -> dict[str, Any]:
        """What tells the item from others, as it stands in a record."""
        return {
            "task": self.task.name,
            "version": self.task.version,
            "tokens": self.tokens,
            "index": self.index,
            "seed": self.seed,
        }

    def sample(self, tokenizer: Any) -> Item:
        """Return the item."""
        return self.rows.item(self.row, tokenizer)

    def built(self, tokenizer: Any, item: Item) -> BuiltPrompt:
        """Return the item's prompt, truncated and framed as the protocol says.

        Raises:
            ValueError: If the tokenizer has no chat template, or the prompt cannot be cut.
        """
        return build_prompt(self.task, item, tokenizer, template=self.template)


@dataclass
class PublishedPlan:
    """What is asked of the published tasks of an evaluation."""

    tasks: list[PublishedTask]
    """Those whose rows there are, with their limits."""
    places: list[ItemPlace]
    facts: dict[str, dict[str, Any]]
    """By task: everything its results depend on besides the backbone."""
    missing: dict[str, str]
    """Tasks of the suite whose rows there are not, and why."""

    def sets(self) -> dict[tuple[str, int], PublishedSet]:
        """Return what the cells of each task and length have to say besides."""
        return {(place.task.name, place.tokens): PublishedSet(place.task, *place.rows.size()) for place in self.places}

    def check(self, tokenizer: Any) -> None:
        """Refuse a tokenizer without the template that is needed, and a metric whose library is missing.

        Raises:
            ValueError: Saying what to change.
        """
        for task in self.tasks:
            # The shortest text may have no room for what the task hides.
            place = min((place for place in self.places if place.task is task), key=lambda place: place.tokens)
            item = place.sample(tokenizer)
            place.built(tokenizer, item)
            task.score(item.reply, item)


def plan(
    tasks: Sequence[PublishedTask], options: EvalOptions, positions: int | None, tokenizer: Callable[[], Any]
) -> PublishedPlan:
    """Find the rows of published tasks and choose those to ask.

    Args:
        tasks: In the order of the table.
        options: Where rows lie, how many are asked, and limits.
        positions: Of the backbone, where it says.
        tokenizer: Loads the backbone's, for tasks that make their rows.

    Raises:
        ValueError: If rows are missing (of a suite only if all are), bad, or leave no room.
        OSError: If the Hub or a file cannot be read.
    """
    found = PublishedPlan([], [], {}, {})
    for task in tasks:
        longest = task.max_new_tokens
        if isinstance(task, GeneratedTask):
            try:
                task, limit_from, asked = _by_length(task, options, tokenizer())
            except ValueError as error:
                if options.suite is None:
                    raise
                found.missing[task.name] = str(error)
                continue
        elif options.suite is not None and is_missing(task, options.data_folders()):
            found.missing[task.name] = "no rows found"
            continue
        else:
            task, limit_from, asked = _by_file(task, options, positions)
        found.tasks.append(task)
        found.facts[task.name] = describe(task, limit_from, longest, options, asked)
        found.places += [
            ItemPlace(task, rows, row, index, tokens, options.seed, options.template)
            for tokens, rows in asked.items()
            for index, row in enumerate(rows.chosen)
        ]
    if found.missing and not found.places:
        folders = options.data_folders()
        where = "the Hub" if folders is None else f"--data-dir {', '.join(folders)}"
        name, reason = next(iter(found.missing.items()))
        raise ValueError(
            f"{where} has no rows of any task of --suite {options.suite} ({name}: {reason}); give the folder of a "
            "local copy in its published layout"
        )
    return found


def _by_file(
    task: PublishedTask, options: EvalOptions, positions: int | None
) -> tuple[PublishedTask, str, dict[int, AnyRows]]:
    task, limit_from = fitted(task, positions, options.max_prompt, options.max_new_tokens)
    return task, limit_from, {task.limit or 0: FileRows(_opened(task, options), options.samples)}


def _by_length(
    task: GeneratedTask, options: EvalOptions, tokenizer: Any
) -> tuple[GeneratedTask, str, dict[int, AnyRows]]:
    """Take rows from a local file, of each length where files have lengths, or make them."""
    if options.max_new_tokens is not None:
        task = replace(task, max_new_tokens=min(task.max_new_tokens, options.max_new_tokens))
    folders, asked = options.data_folders(), dict[int, AnyRows]()
    if not task.file.split("/")[0].isdigit() and folders is not None and not is_missing(task, folders):
        return task, "file", {0: FileRows(_opened(task, options), options.samples)}
    if isinstance(task, GameTask):
        return task, "turns", {0: GeneratedRows(task, 0, 1, options.seed, None)}
    short = task.name.partition("/")[2]
    for tokens in options.token_lengths():
        # RULER's older and newer layouts.
        spots = [replace(task, file=f"{tokens}/{short}{end}") for end in (".jsonl", "/validation.jsonl")]
        there = [] if folders is None else [spot for spot in spots if not is_missing(spot, folders)]
        if there:
            asked[tokens] = FileRows(_opened(there[0], options), options.samples)
        else:
            source = source_of(task, tokenizer, tokens, folders)
            asked[tokens] = GeneratedRows(task, tokens, options.samples or SAMPLES, options.seed, source)
    return task, "length", asked


def _opened(task: PublishedTask, options: EvalOptions) -> TaskRows:
    return open_task(
        task,
        data_dir=options.data_folders(),
        revision=options.data_revision,
        skip_bad_rows=options.skip_bad_rows,
    )


def describe(
    task: PublishedTask, limit_from: str, longest: int, options: EvalOptions, asked: dict[int, AnyRows]
) -> dict[str, Any]:
    """Return everything that a published task's results depend on besides the backbone."""
    data = [rows.facts() for rows in asked.values()]
    return {
        "version": task.version,
        **task.options(),
        "source": task.source,
        "metric": task.metric,
        "prompt": {
            "form": options.template if task.chat else "completion",
            "limit": task.limit,
            "limit_from": limit_from,
            "truncation": task.truncation,
        },
        "generation": {
            "decoding": "greedy",
            "max_new_tokens": task.max_new_tokens,
            "shortened": task.max_new_tokens < longest,
            "min_new_tokens": task.min_new_tokens,
            "stop": list(task.stop),
        },
        "data": data,
        "asked": {str(tokens): len(rows.chosen) for tokens, rows in asked.items()},
        "of": task.size,
    }


def tokenizer_facts(tokenizer: Any) -> dict[str, Any]:
    """Return what tells a tokenizer and its chat template from others."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items())).encode()
    template = tokenizer.chat_template
    text = json.dumps(template, sort_keys=True) if isinstance(template, dict) else template
    return {
        "class": type(tokenizer).__name__,
        "vocabulary_sha256": hashlib.sha256(vocabulary).hexdigest(),
        "template_sha256": None if text is None else hashlib.sha256(text.encode()).hexdigest(),
    }


def cut_at(prediction: str, stop: Sequence[str]) -> str:
    """Return an answer up to where the first of the texts that end it begins."""
    ends = [prediction.find(text) for text in stop if text in prediction]
    return prediction[: min(ends, default=len(prediction))]
