"""The stream of training examples: rows in a seeded order, tokenised when their turn comes, resumable, shareable."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from locret.conversation.templates import check_template
from locret.data.training.chat import earlier_answers, tokenise_questions, tokenise_row
from locret.data.training.dropped import DropReport
from locret.data.training.json_rows import BadRow, Entry
from locret.data.training.reconstruction import reconstruction
from locret.data.training.row_order import SHUFFLE_BUFFER, Rows, order_of
from locret.data.training.rows import Row, detect_schema, read_row
from locret.data.training.sources import load_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["TrainingExample", "TrainingStream", "load_rows"]


_PLACE = ("epoch", "cursor", "used_in_epoch")


@dataclass(frozen=True)
class TrainingExample:
    """One tokenised row."""

    prompt_ids: Tensor
    """(1, n) int64: what the model reads, generation prompt included."""
    answer_ids: Tensor
    """(1, m) int64, m >= 1: what the model should write, end of turn included."""
    row: int
    """Index of the row in the data set, from 0."""
    earlier_answers: tuple[tuple[int, int], ...] = ()
    """First and past-the-end prompt position of each answer before the last one; () where only the last one counts."""
    asked: tuple[tuple[Tensor, Tensor], ...] = ()
    """(1, m) ids of each question, as what follows the prompt, and of its answer, where each is asked by itself; the
    prompt is the document then, and the answer that of the last question."""


class _FilteredError(Exception):
    """A row that is fine but not wanted; the argument is the reason. It never leaves this module."""


class TrainingStream(Iterator[TrainingExample]):
    """Endless tokenised examples: the rows in another seeded order in every epoch.

    All processes see the same sequence of valid examples and each takes its own of every `world`, so that k processes
    with one example each read what one process reads with k accumulated. Rows are tokenised only when their turn comes.

    Args:
        rows: What `load_rows` returns, or a list of records in a schema of `locret.data.training.rows`.
        tokenizer: The backbone's.
        seed: Decides the order; the same seed gives the same stream.
        max_length: Tokens of prompt and answer together that the backbone can read; None for no limit.
        min_tokens: Shorter rows are left out.
        max_tokens: Longer rows are left out; they are not bad rows.
        skip_bad_rows: Leave out rows that cannot be trained on instead of stopping at the first.
        template: One of `locret.conversation.templates.TEMPLATES`.
        answers: `last`; `all` to note where a row's earlier answers lie too; or `each` for rows whose questions are
            each asked by themselves.
        source: The data set as the user named it, for messages.
        reconstruct: Take the text itself for the answer, see `reconstruction`; rows need none then.
        shuffle_buffer: Streamed rows among which the next one is drawn.
        rank: Index of this process.
        world: Number of processes.

    Raises:
        ValueError: For columns of no known schema, a template the tokenizer does not have, or an unknown setting; while
            iterating, for a bad row, or if a whole epoch has no good one.
    """

    def __init__(
        self,
        rows: Rows,
        tokenizer: PreTrainedTokenizerBase,
        *,
        seed: int,
        max_length: int | None,
        min_tokens: int | None = None,
        max_tokens: int | None = None,
        skip_bad_rows: bool = False,
        template: str = "chat",
        answers: str = "last",
        source: str = "(rows)",
        reconstruct: bool = False,
        shuffle_buffer: int = SHUFFLE_BUFFER,
        rank: int = 0,
        world: int = 1,
    ):
        if not 0 <= rank < world:
            raise ValueError(f"rank={rank} is not a process of world={world}; use 0 <= rank < world")
        check_template(tokenizer, template)
        self._order = order_of(rows, seed=seed, shuffle_buffer=shuffle_buffer)
        self.size = self._order.size
        """Rows of the data set; None if they are streamed."""
        if self.size == 0:
            raise ValueError(f"--dataset {source}: there are no rows; it needs at least one")
        self.tokenizer, self._source, self._template = tokenizer, source, template
        self._max_length, self._min_tokens, self._max_tokens = max_length, min_tokens, max_tokens
        self._skip, self._rank, self._world = skip_bad_rows, rank, world
        self._reconstruct, self._answers = reconstruct, answers
        self.schema = detect_schema(self._columns(), source)
        self._first_row = self._first_row_digest()
        self._check_answers()
        self.report = DropReport()
        self._held_out: frozenset[int] = frozenset()
        self._go_to(epoch=0, cursor=0, used_in_epoch=0)

    @property
    def dropped(self) -> dict[str, int]:
        """Rows left out so far, by reason; each is counted once."""
        return dict(self.report.counts)

    @property
    def epochs(self) -> float:
        """How often the rows have been read, in whole epochs where their number is not known."""
        return self._epoch + (self._cursor / self.size if self.size else 0.0)

    def hold_out(self, count: int, among: int | None = None) -> tuple[list[TrainingExample], int]:
        """Set rows aside that are never given out from now on, see `RowOrder.last_first`.

        Args:
            count: How many; rows that cannot be trained on do not count.
            among: Rows to look at; None for all.

        Returns:
            The rows that were found, which may be fewer, and how many were looked at.
        """
        found: list[TrainingExample] = []
        looked = 0
        for entry in islice(self._order.last_first() if count else (), among):
            looked += 1
            try:
                found.append(self._tokenise(entry))
            except (_FilteredError, BadRow):
                continue
            if len(found) == count:
                break
        self._held_out = frozenset(example.row for example in found)
        return found, looked

    def has_more(self) -> bool:
        """Return whether there is a row to train on; the stream stays where it is."""
        place = self.state()
        try:
            next(self)
        except ValueError:
            return False
        self.restore(place)
        return True

    def __next__(self) -> TrainingExample:
        """Give this process its next example; the others' are tokenised too, so all agree on which rows are bad."""
        group = [self._next_valid() for _ in range(self._world)]
        return group[self._rank]

    def state(self) -> dict[str, Any]:
        """What `restore` needs to go on after the last example, the same on every process; plain JSON types."""
        return {
            **dict(zip(_PLACE, (self._epoch, self._cursor, self._used_in_epoch), strict=True)),
            "report": self.report.to_dict(),
            **self._identity(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; the number of processes may differ.

        Raises:
            ValueError: If the state is of other rows, another seed, template or length: the stream would differ.
        """
        damage = "--resume: the checkpoint's place in the data is damaged"
        if not isinstance(state, Mapping):
            raise ValueError(f"{damage} (it is a {type(state).__name__}); resume from another checkpoint")
        if state.get("first_row", self._first_row) != self._first_row:  # states of earlier versions have none
            raise ValueError(
                f"--resume: the first row of --dataset {self._source} is another than the checkpoint's; give the same "
                "rows, or start without --resume"
            )
        for name, ours in {"held_out": None, **self._identity()}.items():
            if name != "first_row" and state.get(name) != ours:
                raise ValueError(
                    f"--resume: the checkpoint's stream was made with {name}={state.get(name)!r}, this run has "
                    f"{ours!r}; use the same setting, or start without --resume"
                )
        try:
            report, place = DropReport.from_dict(state["report"]), [state[name] for name in _PLACE]
            if not all(type(number) is int and number >= 0 for number in place):
                raise ValueError(f"{', '.join(_PLACE)} are {place}")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{damage} ({error!r}); resume from another checkpoint") from None
        self.report = report
        self._go_to(*place)

    def check_rows(self) -> None:
        """Read every row without tokenising it, so that a bad one is refused before anything is written.

        Raises:
            ValueError: For the first row without prompt or answer; the message names it.
        """
        for entry in self._order.in_file_order():
            self._read(entry)

    def _identity(self) -> dict[str, Any]:
        """The settings that decide which examples come in which order."""
        return {
            **self._order.identity(),
            "first_row": self._first_row,
            "template": self._template,
            "answers": self._answers,
            "max_length": self._max_length,
            "min_tokens": self._min_tokens,
            "max_tokens": self._max_tokens,
            **({"held_out": sorted(self._held_out)} if self._held_out else {}),
        }

    def _first_row_digest(self) -> str:
        """Return what tells the rows from others of the same number."""
        for entry in self._order.in_file_order():
            try:
                text = json.dumps(entry.load(), sort_keys=True, default=str)
            except BadRow:
                continue
            return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        return ""

    def _check_answers(self) -> None:
        apart = self.schema.asked is not None
        if self._answers == "each" and not apart:
            raise ValueError(
                f"--answers each asks every question of a document by itself, but the rows of --dataset {self._source} "
                f"are in the {self.schema.name} schema, with one answer each; write document and questions (such as "
                "python -m locret.data.training.text_rows does), or use --answers last"
            )
        if self._answers == "all" and apart:
            raise ValueError(
                f"--answers all is for turns that follow each other, and the questions of --dataset {self._source} are "
                "asked apart; use --answers each"
            )

    def _columns(self) -> list[str]:
        try:
            return self._order.columns()
        except BadRow as error:
            raise ValueError(f"--dataset {self._source}: no row can be read; {error.where} {error.detail}") from None

    def _go_to(self, epoch: int, cursor: int, used_in_epoch: int) -> None:
        self._epoch, self._cursor, self._used_in_epoch = epoch, cursor, used_in_epoch
        self._entries = self._order.epoch(epoch, cursor)

    def _next_valid(self) -> TrainingExample:
        while True:
            entry = next(self._entries, None)
            if entry is None:
                self._start_epoch()
                continue
            self._cursor += 1
            if entry.number in self._held_out:
                continue
            self.report.read += self._epoch == 0
            try:
                example = self._tokenise(entry)
            except _FilteredError as error:
                self._drop(str(error), entry)
            except BadRow as error:
                if not self._skip:
                    raise
                self._drop(error.reason, entry)
            else:
                self._used_in_epoch += 1
                return example

    def _drop(self, reason: str, entry: Entry) -> None:
        if self._epoch == 0:
            self.report.add(reason, entry.where)

    def _start_epoch(self) -> None:
        if not self._used_in_epoch:
            raise ValueError(
                f"--dataset {self._source}: no row can be trained on ({self.report}); choose another data set"
            )
        self._go_to(self._epoch + 1, cursor=0, used_in_epoch=0)

    def _read(self, entry: Entry) -> Row:
        try:
            record = entry.load()
        except BadRow as error:
            raise BadRow(self._where(entry), error.reason, error.detail) from None
        given = read_row(record, self.schema, where=self._where(entry), answer_needed=not self._reconstruct)
        return reconstruction(given) if self._reconstruct else given

    def _where(self, entry: Entry) -> str:
        return f"--dataset {self._source}: {entry.where}"

    def _tokenise(self, entry: Entry) -> TrainingExample:
        row = self._read(entry)
        if self._answers == "each":
            return self._tokenise_apart(row, entry)
        try:
            prompt_ids, answer_ids = tokenise_row(self.tokenizer, row, self._template)
            self._check_lengths(len(prompt_ids), len(answer_ids), entry)
            earlier: tuple[tuple[int, int], ...] = ()
            if self._answers == "all":
                earlier = earlier_answers(self.tokenizer, row, self._template, prompt_ids)
        except BadRow:
            raise
        except ValueError as error:
            detail = f"has turns that do not fit ({error})"
            raise BadRow(self._where(entry), "refused by template", detail) from None
        return TrainingExample(torch.tensor([prompt_ids]), torch.tensor([answer_ids]), entry.number, earlier)

    def _tokenise_apart(self, row: Row, entry: Entry) -> TrainingExample:
        try:
            document, pairs = tokenise_questions(self.tokenizer, row, self._template)
        except ValueError as error:
            detail = f"has questions that do not fit ({error})"
            raise BadRow(self._where(entry), "refused by template", detail) from None
        question, answer = max(pairs, key=lambda pair: len(pair[0]) + len(pair[1]))
        self._check_lengths(len(document) + len(question), len(answer), entry)
        asked = tuple((torch.tensor([question]), torch.tensor([answer])) for question, answer in pairs)
        return TrainingExample(torch.tensor([document]), asked[-1][1], entry.number, asked=asked)

    def _check_lengths(self, prompt: int, answer: int, entry: Entry) -> None:
        if not prompt:
            raise BadRow(self._where(entry), "empty prompt", "has a prompt without any token")
        if not answer:
            raise BadRow(self._where(entry), "no answer", "has an answer without any token")
        if self._min_tokens is not None and prompt + answer < self._min_tokens:
            raise _FilteredError(f"shorter than --min-tokens {self._min_tokens}")
        if self._max_tokens is not None and prompt + answer > self._max_tokens:
            raise _FilteredError(f"longer than --max-tokens {self._max_tokens}")
        limit = self._max_length
        if limit is None or prompt + answer <= limit:
            return
        remedy = f"shorten the row, leave out longer ones with --max-tokens {limit}"
        if answer >= limit:
            reason, detail = "answer longer than the context", f"has an answer of {answer} tokens, longer"
        else:
            reason = "longer than the context"
            detail = f"has {prompt} prompt and {answer} answer tokens, together longer"
        raise BadRow(self._where(entry), reason, f"{detail} than the context of {limit} tokens", remedy)
