"""Training rows for retaining heads: texts that hide facts of several tasks, and questions about all of them.

Heads learn from what answers look at. With one short question per text most facts would be labelled as not needed, so a
row asks for every fact of its text. Names and variables of the rows are those of the split "train", which no evaluation
sample uses, whatever the seeds.

    python -m locret.data.training.question_rows --rows 2000 --tokens 1024 --seed 1 --output rows.json

With `--texts tasks` each row is a text of one task, in the task's own filler with all its look-alikes, and its
questions stand apart from it, for `locret-train --answers each`: what a text must keep for whatever will be asked.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from locret.data import tasks
from locret.data.tasks.generated.base import GeneratedTask
from locret.data.tasks.generated.mixture import mixture
from locret.data.text.filler import FillerOptions
from locret.files import write_text

_SHARES = 4
"""Shares of look-alikes that take turns, from none to the largest."""


def question_rows(
    tokenizer: Any,
    rows: int,
    tokens: Sequence[int],
    *,
    names: Sequence[str] = (),
    seed: int = 0,
    density: float = 0.3,
    questions: int | None = None,
    lookalikes: float = 0.0,
) -> Iterator[dict[str, Any]]:
    """Yield rows in the LongAlpaca schema.

    Args:
        tokenizer: Any tokenizer with a chat template.
        rows: How many.
        tokens: Lengths of the chat prompts; row i has the length i modulo their number.
        names: Tasks to draw facts from; all if empty.
        seed: Same seed, same rows.
        density: Share of a prompt that facts and questions take, see `mixture`.
        questions: Facts asked for in a row; all of them if None.
        lookalikes: Largest share of filler sentences with a fact's own marks that nobody asks about; rows take turns.

    Yields:
        Dicts with the keys `instruction` (text and questions), `input` (empty), `output` (the replies) and `file`.

    Raises:
        ValueError: For an unknown task, or too few tokens for one task.
    """
    chosen = names or tasks.names()
    for index in range(rows):
        sample = mixture(
            tokenizer,
            chosen,
            tokens[index % len(tokens)],
            seed=f"{seed}/{index}",
            split="train",
            density=density,
            questions=questions,
            filler=_filler(index, lookalikes, len(tokens)),
        )
        yield {"instruction": sample.content, "input": "", "output": sample.reply, "file": ""}


def _filler(index: int, lookalikes: float, lengths: int) -> FillerOptions:
    """Return what surrounds the facts of row `index`, of so many lengths that take turns."""
    return FillerOptions(
        # A third of the texts hold the classic noise line too, which heads would not know otherwise.
        noise_share=(0.0, 0.0, 1.0)[index % 3],
        # Each share at each length.
        lookalike_share=lookalikes * (index // lengths % _SHARES) / (_SHARES - 1),
        digits=(4, 5, 7, 10) if lookalikes else (5, 7, 10),
    )


def task_rows(
    tokenizer: Any,
    rows: int,
    tokens: Sequence[int],
    *,
    names: Sequence[str] = (),
    seed: int = 0,
    lookalikes: float = 0.0,
) -> Iterator[dict[str, Any]]:
    """Yield rows in the shared-document schema, of one task's text each; the tasks take turns, at every length.

    Args:
        tokenizer: Any tokenizer with a chat template.
        rows: How many.
        tokens: Lengths of the chat prompts.
        names: Tasks, or families of tasks; the usual generated ones if empty.
        seed: Same seed, same rows.
        lookalikes: As for `question_rows`.

    Yields:
        Dicts with the keys `document`, `system` and `questions`, a list of `question` and `answer`.

    Raises:
        ValueError: For a task without texts of its own making, or too few tokens for one.
    """
    found = _made_here(names or tasks.names())
    for index in range(rows):
        task, length = found[index % len(found)], tokens[index // len(found) % len(tokens)]
        filler = _filler(index // len(found), lookalikes, len(tokens))
        sample = task.sample(tokenizer, length, seed=f"{seed}/{index}", split="train", filler=filler)
        questions = [{"question": one.text, "answer": one.reply} for one in sample.asked]
        yield {"document": sample.content[: sample.span[1]], "system": sample.system, "questions": questions}


def _made_here(names: Sequence[str]) -> list[GeneratedTask]:
    families = tasks.families()
    found = []
    for name in [one for given in names for one in (tasks.names(given) if given in families else [given])]:
        task = tasks.get(name)
        if not isinstance(task, GeneratedTask):
            raise ValueError(
                f"--texts tasks makes texts, and task {name} has texts of its own; leave it out of --tasks"
            )
        found.append(task)
    return found


@dataclass(frozen=True, kw_only=True)
class QuestionRowsOptions:
    """Options of `python -m locret.data.training.question_rows`."""

    output: str
    """File to write: .json (one list) or .jsonl (one row a line); an existing one is replaced."""
    rows: int = 2000
    """Rows to write."""
    tokens: str | int | list[int] = 1024
    """Length of each row's chat prompt in tokens, or several, such as 512,1024,2048, that take turns."""
    tasks: str | list[str] = ""
    """Tasks whose facts are hidden and asked for, such as passkey,multikey; all that are generated if empty."""
    texts: Literal["mixed", "tasks"] = "mixed"
    """What a row is: facts of several tasks in one text, with questions about all of them in one turn (mixed); or a
    text of one task, the tasks in turns, its questions apart from it, for locret-train --answers each (tasks)."""
    density: float = 0.3
    """Share of each mixed prompt that facts and questions take, from 0 to 1; a text has the facts of one task at
    least."""
    questions: int | None = None
    """Facts asked for in each mixed row, drawn at random; all of them if none."""
    lookalikes: float = 0.0
    """Largest share of filler sentences that look like a fact that nobody asks about, from 0 to 1."""
    seed: int = 0
    """Seed of the texts; evaluation texts differ from these whatever the seed."""
    tokenizer: str = "checkpoints/tiny"
    """Folder or hub id of the tokenizer that counts; the embedded backbone's."""

    def __post_init__(self) -> None:
        for name, value in [("rows", self.rows), ("questions", self.questions)]:
            if value is not None and value < 1:
                raise ValueError(f"--{name} {value} leaves nothing to write; give 1 or more")
        for name in ("density", "lookalikes"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"--{name} {getattr(self, name)} is not a share; give a number from 0 to 1")
        if Path(self.output).suffix not in (".json", ".jsonl"):
            raise ValueError(f"--output {self.output} has another ending than .json and .jsonl; rename it")
        folder = next(path for path in Path(os.path.expanduser(self.output)).absolute().parents if path.exists())
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            raise ValueError(f"--output {self.output} cannot be written in {folder}; choose another folder")
        if self.texts == "tasks" and self.density != 0.3:
            raise ValueError(f"--density {self.density} changes nothing with --texts tasks; leave it out")
        if self.texts == "tasks" and self.questions is not None:
            raise ValueError(f"--questions {self.questions} changes nothing with --texts tasks; leave it out")
        if self.texts == "mixed":
            for name in self.task_names():
                tasks.get(name)
        self._check_turns()

    def _check_turns(self) -> None:
        """Refuse fewer rows than tasks, lengths and shares of look-alikes that take turns."""
        turns = {"lengths of --tokens": len(self.lengths())}
        if self.texts == "tasks":
            turns["tasks"] = len(_made_here(self.task_names() or tasks.names()))
        if self.lookalikes:
            turns["shares of --lookalikes"] = _SHARES
        least = math.prod(turns.values())
        if self.rows < least:
            named = ", ".join(f"{count} {what}" for what, count in turns.items())
            raise ValueError(
                f"--rows {self.rows} is less than one row of each ({named}), which take turns; give {least} or more"
            )

    def lengths(self) -> list[int]:
        """Return the prompt lengths.

        Raises:
            ValueError: If one is not a number of at least 1.
        """
        given = self.tokens if isinstance(self.tokens, list) else str(self.tokens).split(",")
        lengths = [str(length).strip() for length in given]
        if not lengths or not all(length.isdigit() and int(length) for length in lengths):
            raise ValueError(f"--tokens {self.tokens} is not a length; give a number, or several such as 512,1024")
        return [int(length) for length in lengths]

    def task_names(self) -> list[str]:
        """Return the names of the tasks, a family's being those of its tasks; none means the family generated."""
        given = self.tasks.split(",") if isinstance(self.tasks, str) else self.tasks
        named = [name.strip() for name in given if name.strip()]
        return [task for name in named for task in (tasks.names(name) if name in tasks.families() else [name])]


def write_rows(rows: Sequence[dict[str, Any]], output: str | Path) -> None:
    """Write rows as one JSON list, or one a line for `.jsonl`; the file appears whole or not at all.

    Raises:
        OSError: Where the folder is not writable; one that is missing is made.
    """
    if Path(output).suffix == ".jsonl":
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    else:
        text = json.dumps(rows, ensure_ascii=False, indent=1) + "\n"
    write_text(output, text, parents=True)


def command(argv: Sequence[str] | None = None) -> int:
    """Write training rows; return 0.

    Raises:
        ValueError: For what the user must change.
        OSError: If the file cannot be written.
    """
    from tqdm import tqdm

    from locret.cli.command import parse_options

    (options,), _ = parse_options(
        "locret rows",
        "Write texts that hide facts, with questions.",
        [QuestionRowsOptions],
        argv,
    )
    from locret.loading import tokenizer_of

    tokenizer = tokenizer_of(options.tokenizer)
    if options.texts == "tasks":
        made: Iterator[dict[str, Any]] = task_rows(
            tokenizer,
            options.rows,
            options.lengths(),
            names=options.task_names(),
            seed=options.seed,
            lookalikes=options.lookalikes,
        )
    else:
        made = question_rows(
            tokenizer,
            options.rows,
            options.lengths(),
            names=options.task_names(),
            seed=options.seed,
            density=options.density,
            questions=options.questions,
            lookalikes=options.lookalikes,
        )
    write_rows(list(tqdm(made, total=options.rows, unit="row", disable=None)), options.output)
    sys.stderr.write(f"{options.rows} rows written to {options.output}\n")
    return 0


if __name__ == "__main__":
    from locret.cli.command import run

    run(command, prog="locret rows")
