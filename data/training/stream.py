"""The stream of training examples: rows in a seeded order, tokenised when their turn comes, resumable, shareable.

The order is a function of seed and epoch alone, so a run that is resumed needs only the number of rows it has read.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from locret.conversation.document import encode, leading_special_ids
from locret.conversation.turns import check_template, render
from locret.data.training.rows import Row, detect_schema, read_row
from locret.data.training.sources import BadRow, Rows, columns_of, load_rows, record_of

__all__ = ["TrainingExample", "TrainingStream", "load_rows"]

PLACES = 20
"""Rows named for each reason to leave one out; a filter may leave out most of a large data set."""
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
    asked: tuple[tuple[Tensor, Tensor], ...] = ()
    """(1, m) ids of each question, as what follows the prompt, and of its answer, where each is asked by itself; the
    prompt is the document then, and the answer that of the last question."""


@dataclass
class DropReport:
    """Rows left out in the first epoch, which meets every row once; later epochs leave out the same ones."""

    read: int = 0
    """Rows read, those left out included."""
    dropped: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By reason, their `count` and the `first_rows`, each with what is wrong with it."""

    @property
    def counts(self) -> dict[str, int]:
        """Rows left out, by reason."""
        return {reason: found["count"] for reason, found in self.dropped.items()}

    def add(self, reason: str, row: str) -> None:
        """Note a row that is left out."""
        found = self.dropped.setdefault(reason, {"count": 0, "first_rows": []})
        found["count"] += 1
        found["first_rows"] = [*found["first_rows"], row][:PLACES]

    def to_dict(self) -> dict[str, Any]:
        """Return the report in plain JSON types: rows read and used, and for each reason its count and first rows."""
        used = self.read - sum(self.counts.values())
        return {"read": self.read, "used": used, "dropped": deepcopy(self.dropped)}

    def __str__(self) -> str:
        """List the reasons: "2 no answer, 1 invalid UTF-8"."""
        return ", ".join(f"{count} {reason}" for reason, count in self.counts.items())


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
        max_tokens: Longer rows are left out.
        template: One of `locret.conversation.turns.TEMPLATES`.
        answers: `last`, or `each` for rows whose questions are each asked by themselves.
        source: The data set as the user named it, for messages.
        rank: Index of this process.
        world: Number of processes.

    Raises:
        ValueError: For columns of no known schema, a template the tokenizer does not have, or an unknown setting; while
            iterating, if a whole epoch has no row that can be trained on.
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
        template: str = "chat",
        answers: str = "last",
        source: str = "(rows)",
        rank: int = 0,
        world: int = 1,
    ):
        check_template(tokenizer, template)
        self.size = len(rows)
        """Rows of the data set."""
        if not rows:
            raise ValueError(f"--dataset {source}: there are no rows; it needs at least one")
        self.tokenizer, self._rows, self._source, self._template = tokenizer, rows, source, template
        self._max_length, self._min_tokens, self._max_tokens = max_length, min_tokens, max_tokens
        self._seed, self._rank, self._world = seed, rank, world
        self._answers = answers
        try:
            self.schema = detect_schema(columns_of(rows), source)
        except BadRow as error:
            raise ValueError(f"--dataset {source}: no row can be read; row 0 {error}") from None
        if answers == "each" and self.schema.asked is None:
            raise ValueError(
                f"--answers each asks every question of a document by itself, but the rows of --dataset {source} are "
                f"in the {self.schema.name} schema, with one answer each; write document and questions (such as python "
                "-m locret.data.training.text_rows does), or use --answers last"
            )
        self._first_row = self._first_row_digest()
        self.report = DropReport()
        self._held_out: frozenset[int] = frozenset()
        self._go_to(0, 0, 0)

    @property
    def epochs(self) -> float:
        """How often the rows have been read."""
        return self._epoch + self._cursor / self.size

    def hold_out(self, count: int, among: int | None = None) -> list[TrainingExample]:
        """Set rows aside that are never given out from now on: those that training would meet last.

        Rows that cannot be trained on do not count; of `among` rows (None: all) fewer may be found.
        """
        found: list[TrainingExample] = []
        for index in islice(reversed(self._order(0)) if count else (), among):
            try:
                found.append(self._tokenise(index))
            except BadRow:
                continue
            if len(found) == count:
                break
        self._held_out = frozenset(example.row for example in found)
        return found

    def check_first(self) -> None:
        """Tokenise the first row that can be trained on, and leave the stream where it is."""
        place = self.state()
        next(self)
        self.restore(place)

    def __next__(self) -> TrainingExample:
        """Give this process its next example; the others' are tokenised too, so all agree on which rows are bad."""
        group = [self._next_valid() for _ in range(self._world)]
        return group[self._rank]

    def state(self) -> dict[str, Any]:
        """What `restore` needs to go on after the last example, the same on every process; plain JSON types."""
        place = zip(_PLACE, (self._epoch, self._cursor, self._used_in_epoch), strict=True)
        return {**dict(place), "report": self.report.to_dict(), **self._identity()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; the number of processes may differ."""
        for name, ours in {"held_out": None, **self._identity()}.items():
            # States of earlier versions have no first row.
            if (theirs := state.get(name, ours if name == "first_row" else None)) != ours:
                raise ValueError(
                    f"--resume: the checkpoint's stream was made with {name}={theirs!r}, this run has {ours!r}; use "
                    "the same setting and rows, or start without --resume"
                )
        self.report = DropReport(state["report"]["read"], deepcopy(state["report"]["dropped"]))
        self._go_to(*(state[name] for name in _PLACE))

    def _identity(self) -> dict[str, Any]:
        """The settings that decide which examples come in which order."""
        return {
            "rows": self.size,
            "seed": self._seed,
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
        for index in range(self.size):
            try:
                text = json.dumps(record_of(self._rows, index), sort_keys=True, default=str)
            except BadRow:
                continue
            return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        return ""

    def _order(self, epoch: int) -> list[int]:
        order = list(range(self.size))
        # Seeding by text is hashed with SHA-512: the same everywhere, and epochs of near seeds do not coincide.
        random.Random(f"{self._seed}:{epoch}").shuffle(order)
        return order

    def _go_to(self, epoch: int, cursor: int, used_in_epoch: int) -> None:
        self._epoch, self._cursor, self._used_in_epoch = epoch, cursor, used_in_epoch
        self._ahead = iter(self._order(epoch)[cursor:])

    def _next_valid(self) -> TrainingExample:
        while True:
            while (index := next(self._ahead, None)) is None:
                self._start_epoch()
            self._cursor += 1
            if index in self._held_out:
                continue
            self.report.read += self._epoch == 0
            try:
                example = self._tokenise(index)
            except BadRow as error:
                if self._epoch == 0:
                    self.report.add(error.reason, f"row {index} (counted from 0) {error}")
            else:
                self._used_in_epoch += 1
                return example

    def _start_epoch(self) -> None:
        if not self._used_in_epoch:
            first = next((f"; {row}" for found in self.report.dropped.values() for row in found["first_rows"]), "")
            raise ValueError(
                f"--dataset {self._source}: no row can be trained on ({self.report}{first}); choose another data set"
            )
        self._go_to(self._epoch + 1, 0, 0)

    def _tokenise(self, index: int) -> TrainingExample:
        row = read_row(record_of(self._rows, index), self.schema)
        pairs: list[tuple[list[int], list[int]]] = []
        try:
            if self._answers == "each":
                prompt, pairs = tokenise_questions(self.tokenizer, row, self._template)
                question, answer = max(pairs, key=lambda pair: len(pair[0]) + len(pair[1]))
            else:
                question, (prompt, answer) = [], tokenise_row(self.tokenizer, row, self._template)
        except ValueError as error:
            raise BadRow("refused by template", f"has turns that do not fit ({error})") from None
        self._check_lengths(len(prompt) + len(question), len(answer))
        asked = tuple((torch.tensor([question]), torch.tensor([answer])) for question, answer in pairs)
        answer_ids = asked[-1][1] if asked else torch.tensor([answer])
        return TrainingExample(torch.tensor([prompt]), answer_ids, index, asked)

    def _check_lengths(self, prompt: int, answer: int) -> None:
        has = f"has {prompt} prompt and {answer} answer tokens"
        if not prompt:
            raise BadRow("empty prompt", "has a prompt without any token")
        if not answer:
            raise BadRow("no answer", "has an answer without any token")
        if self._min_tokens is not None and prompt + answer < self._min_tokens:
            raise BadRow(f"shorter than --min-tokens {self._min_tokens}", has)
        if self._max_tokens is not None and prompt + answer > self._max_tokens:
            raise BadRow(f"longer than --max-tokens {self._max_tokens}", has)
        if self._max_length is not None and prompt + answer > self._max_length:
            too_long = "answer longer than the context" if answer >= self._max_length else "longer than the context"
            raise BadRow(too_long, f"{has}, together longer than the context of {self._max_length} tokens")


def tokenise_row(tokenizer: PreTrainedTokenizerBase, row: Row, template: str) -> tuple[list[int], list[int]]:
    """Token ids of the prompt as inference reads it, and of all that the answer adds, end of turn included.

    Where the whole conversation's tokens begin with the prompt's, the answer is the rest of them. Where a token spans
    the boundary, what follows the prompt's text is tokenised by itself; where the template writes the prompt otherwise
    once it is answered (a thinking block, say), the answer's own text and eos are. No token is lost or counted twice.

    Raises:
        ValueError: If the chat template refuses the messages.
    """
    prompt_text = render(tokenizer, row.messages, template)
    full_text = render(tokenizer, row.messages, template, row.answer)
    special = [] if template == "chat" else leading_special_ids(tokenizer)
    prompt_ids = special + encode(tokenizer, prompt_text)
    full_ids = special + encode(tokenizer, full_text)
    eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if full_ids[: len(prompt_ids)] == prompt_ids:
        answer_ids = full_ids[len(prompt_ids) :]
    elif full_text.startswith(prompt_text):
        answer_ids = encode(tokenizer, full_text[len(prompt_text) :])
    else:
        return prompt_ids, encode(tokenizer, row.answer) + eos
    # `none` has no end of turn but eos; `original` ends its turn with "###", as the original labels do.
    return prompt_ids, answer_ids + (eos if template == "none" else [])


def tokenise_questions(
    tokenizer: PreTrainedTokenizerBase, row: Row, template: str
) -> tuple[list[int], list[tuple[list[int], list[int]]]]:
    """Token ids of a row's document, and of each question as what follows it, with the question's answer.

    The document ends before the first token that any of the prompts has otherwise: a token that joins its end with a
    question counts to the question.

    Raises:
        ValueError: If the chat template refuses the messages, or puts nothing of the document first.
    """
    last = row.messages[-1]
    document = last.content[: len(last.content) - len(row.asked[-1][0])]
    special = [] if template == "chat" else leading_special_ids(tokenizer)
    length, pairs = None, []
    for question, answer in row.asked:
        messages = (*row.messages[:-1], last._replace(content=document + question))
        prompt_ids, answer_ids = tokenise_row(tokenizer, Row(messages, answer), template)
        text = render(tokenizer, messages, template)
        own = special + encode(tokenizer, text[: text.rfind(question.strip())].rstrip())
        common = len(os.path.commonprefix([own, prompt_ids]))
        length = common if length is None else min(length, common)
        pairs.append((prompt_ids, answer_ids))
    if not length:
        raise ValueError("the template writes the question before the document, so it cannot be asked by itself")
    return pairs[0][0][:length], [(prompt_ids[length:], answer_ids) for prompt_ids, answer_ids in pairs]
