"""The stream of training examples: rows in a seeded order, tokenised when their turn comes, resumable, shareable."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from locret.data.chat import check_template, tokenise_row
from locret.data.reconstruction import reconstruction
from locret.data.rows import Row, RowError, detect_schema, read_row
from locret.data.sources import load_rows

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

__all__ = ["TrainingExample", "TrainingStream", "load_rows"]

ON_BAD_ROW = ("raise", "skip")


@dataclass(frozen=True)
class TrainingExample:
    """One tokenised row."""

    prompt_ids: Tensor
    """(1, n) int64: what the model reads, generation prompt included."""
    answer_ids: Tensor
    """(1, m) int64, m >= 1: what the model should write, end of turn included."""
    row: int
    """Index of the row in the data set, from 0."""


class TrainingStream(Iterator[TrainingExample]):
    """Endless tokenised examples: a new seeded permutation of the rows in every epoch.

    All processes see the same sequence of valid examples and each takes its own of every `world`, so that k processes
    with one example each read what one process reads with k accumulated. Rows are tokenised only when their turn comes.

    Args:
        rows: A `datasets.Dataset` or a list of records in a schema of `locret.data.rows`.
        tokenizer: The backbone's.
        seed: Decides the order; the same seed gives the same stream.
        max_length: Tokens of prompt and answer together that the backbone can read; None for no limit.
        on_bad_row: `raise` stops at a row that cannot be trained on, `skip` counts it in `dropped`.
        template: One of `locret.data.chat.TEMPLATES`.
        source: The data set as the user named it, for messages.
        reconstruct: Take the text itself for the answer, see `locret.data.reconstruction`; rows need none then.
        rank: Index of this process.
        world: Number of processes.

    Raises:
        ValueError: For columns of no known schema, a template the tokenizer does not have, or an unknown setting; while
            iterating, for a bad row, or if a whole epoch has no good one.
    """

    def __init__(
        self,
        rows: Dataset | Sequence[Mapping[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
        *,
        seed: int,
        max_length: int | None,
        on_bad_row: str = "raise",
        template: str = "chat",
        source: str = "(rows)",
        reconstruct: bool = False,
        rank: int = 0,
        world: int = 1,
    ):
        if on_bad_row not in ON_BAD_ROW:
            raise ValueError(f"--on-bad-row {on_bad_row}: no such choice; use one of {', '.join(ON_BAD_ROW)}")
        if not 0 <= rank < world:
            raise ValueError(f"rank={rank} is not a process of world={world}; use 0 <= rank < world")
        if not len(rows):
            raise ValueError(f"--dataset {source}: there are no rows; it needs at least one")
        check_template(tokenizer, template)
        columns = rows[0].keys() if isinstance(rows, Sequence) else rows.column_names
        self.schema = detect_schema(columns, source)
        self.dropped: dict[str, int] = {}
        self._rows, self._tokenizer, self._source = rows, tokenizer, source
        self._seed, self._max_length, self._template = seed, max_length, template
        self._skip, self._rank, self._world = on_bad_row == "skip", rank, world
        self._reconstruct = reconstruct
        self._epoch, self._cursor, self._good_in_epoch = 0, 0, 0
        self._order = self._permutation(0)

    def __next__(self) -> TrainingExample:
        """Give this process its next example; the others' are tokenised too, so all agree on which rows are bad."""
        group = [self._next_valid() for _ in range(self._world)]
        return group[self._rank]

    def state(self) -> dict[str, Any]:
        """What `restore` needs to go on after the last example, the same on every process; plain JSON types."""
        return {
            "epoch": self._epoch,
            "cursor": self._cursor,
            "good_in_epoch": self._good_in_epoch,
            "dropped": dict(self.dropped),
            **self._identity(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; the number of processes may differ.

        Raises:
            ValueError: If the state is of other rows, another seed, template or context: the stream would differ.
        """
        for name, ours in self._identity().items():
            if state[name] != ours:
                raise ValueError(
                    f"--resume: the checkpoint's stream was made with {name}={state[name]!r}, this run has {ours!r}; "
                    "use the same setting, or start without --resume"
                )
        self._epoch, self._cursor = int(state["epoch"]), int(state["cursor"])
        self._good_in_epoch = int(state["good_in_epoch"])
        self.dropped = dict(state["dropped"])
        self._order = self._permutation(self._epoch)

    def _identity(self) -> dict[str, Any]:
        """The settings that decide which examples come in which order."""
        return {
            "rows": len(self._rows),
            "seed": self._seed,
            "template": self._template,
            "max_length": self._max_length,
        }

    def _permutation(self, epoch: int) -> list[int]:
        # Seeding by text is hashed with SHA-512: the same on every platform, and epochs of near seeds do not coincide.
        order = list(range(len(self._rows)))
        random.Random(f"{self._seed}:{epoch}").shuffle(order)
        return order

    def _next_valid(self) -> TrainingExample:
        while True:
            if self._cursor == len(self._order):
                self._start_epoch()
            row = self._order[self._cursor]
            self._cursor += 1
            try:
                example = self._tokenise(row)
            except RowError as error:
                if not self._skip:
                    raise
                self.dropped[error.reason] = self.dropped.get(error.reason, 0) + 1
                continue
            self._good_in_epoch += 1
            return example

    def _start_epoch(self) -> None:
        if not self._good_in_epoch:
            counts = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items())
            raise ValueError(f"--dataset {self._source}: no row can be trained on ({counts}); choose another data set")
        self._epoch, self._cursor, self._good_in_epoch = self._epoch + 1, 0, 0
        self._order = self._permutation(self._epoch)

    def check_rows(self) -> None:
        """Read every row without tokenising it, so that a bad one is refused before anything is written.

        Raises:
            ValueError: For the first row without prompt or answer; the message names it.
        """
        for row in range(len(self._rows)):
            self._read(row)

    def _read(self, row: int) -> Row:
        given = read_row(
            self._rows[row], self.schema, source=self._source, row=row, answer_needed=not self._reconstruct
        )
        return reconstruction(given) if self._reconstruct else given

    def _tokenise(self, row: int) -> TrainingExample:
        parsed = self._read(row)
        try:
            prompt_ids, answer_ids = tokenise_row(self._tokenizer, parsed, self._template)
        except ValueError as error:
            raise RowError(self._source, row, "refused by template", f"turns that do not fit ({error})") from None
        self._check_lengths(len(prompt_ids), len(answer_ids), row)
        return TrainingExample(torch.tensor([prompt_ids]), torch.tensor([answer_ids]), row)

    def _check_lengths(self, prompt: int, answer: int, row: int) -> None:
        if not prompt:
            raise RowError(self._source, row, "empty prompt", "a prompt without any token")
        if not answer:
            raise RowError(self._source, row, "no answer", "an answer without any token")
        limit = self._max_length
        if limit is None or prompt + answer <= limit:
            return
        remedy = "shorten the row or use a backbone with a longer context"
        if answer >= limit:
            detail = f"an answer of {answer} tokens, longer than the context of {limit} tokens"
            raise RowError(self._source, row, "answer longer than the context", detail, remedy)
        detail = f"{prompt} prompt and {answer} answer tokens, together longer than the context of {limit} tokens"
        raise RowError(self._source, row, "longer than the context", detail, remedy)
