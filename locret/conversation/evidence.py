"""An answer that says how sure it is, and the re-reading of the passages that it looked at most.

Where units were evicted, an unsure answer may lack evidence. Where the text is at hand, passages are read again behind
what is held, in the room that a turn has; if the answer changes, the first one lacked something.
"""

# J segments of the text

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from locret.backbone.adapters import input_device
from locret.cache.watch import Watch
from locret.conversation.document import Document, open_document
from locret.conversation.templates import decode

if TYPE_CHECKING:
    from locret.conversation.context import Context

UNSURE = 0.9
"""Lead of an answer's least certain token over the runner-up, as probabilities, below which the answer is unsure."""
PASSAGES = 3
"""Passages that are named, and read again."""
_SEGMENTS = 3
"""Neighbouring segments of the text in a passage: a needle may lie across two."""


@dataclass(frozen=True, kw_only=True)
class Passage:
    """Tokens of the text around what the answer looked at."""

    start: int
    """First token, counted as they were read, those of the chat template in front included."""
    end: int
    """After the last one."""
    attention: float
    """Share of the answer's attention that what is held of it got."""


@dataclass(frozen=True, kw_only=True)
class Answered:
    """An answer, with what is known about the evidence for it."""

    text: str
    margin: float
    """Lead of the least certain token of the answer over the runner-up, as probabilities, 0 to 1."""
    passages: tuple[Passage, ...]
    """Where in the text the answer looked, the most attended first."""
    evicted: bool
    """Whether units of what was read are gone for good."""
    before: str | None = None
    """The answer that was given before passages were read again; None: none were."""

    @property
    def flagged(self) -> bool:
        """Whether evidence may be gone: the answer is unsure, and units were evicted."""
        return self.margin < UNSURE and self.evicted

    @property
    def changed(self) -> bool:
        """Whether reading passages again has changed the answer, so that the first one lacked something."""
        return self.before is not None and self.before.strip() != self.text.strip()

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return {**asdict(self), "flagged": self.flagged, "changed": self.changed}

    def __str__(self) -> str:
        """Return the answer's text."""
        return self.text


class Lead(LogitsProcessor):
    """Notes the least lead of a token over the runner-up, and changes nothing."""

    def __init__(self) -> None:
        self.least = 1.0

    def __call__(self, input_ids: Tensor, scores: Any) -> Any:
        """Look at the (1, V) scores of the next token."""
        best = scores[0].float().softmax(-1).topk(2).values
        self.least = min(self.least, float(best[0] - best[1]))
        return scores


def check_watchable(context: Context, settings: dict[str, Any]) -> None:
    """Refuse an answer that cannot be watched.

    Raises:
        ValueError: Saying why, and what to do instead.
    """
    if context.cache.policy.recalls_blocks:
        raise ValueError(
            f"evidence=True looks at the units that are held, but recall_by={context.cache.policy.recall_by} holds "
            "blocks; leave evidence out"
        )
    if settings.get("num_beams", 1) > 1:
        raise ValueError(
            f"evidence=True watches one answer, but num_beams={settings['num_beams']} are searched; leave one of them "
            "out"
        )


def answered(context: Context, question: str, max_new_tokens: int, options: dict[str, Any]) -> Answered:
    """Answer a question from a fork and say what the answer may lack; see `Context.ask`.

    Raises:
        ValueError: For an empty question, an option that does not exist, or a context that recalls blocks.
    """
    lead = Lead()
    processors = LogitsProcessorList([*(options.get("logits_processor") or ()), lead])
    settings = context.lm.settings(max_new_tokens, {**options, "logits_processor": processors})
    check_watchable(context, settings)
    chat = context.chat()
    chat.read_turn(question, max_new_tokens)
    watch = chat.cache.watch = Watch(len(chat.cache.governed), context.cache.text_end)
    chat.write_answer(settings, None)
    found, ranks = watch.found(), context.cache.ranks
    if ranks is not None:  # each has watched its own heads
        found = ranks.mean(found.to(input_device(context.lm.model))).cpu()
    held = [layer.fill + (0 if layer.tier is None else layer.tier.fill) for layer in chat.cache.governed]
    return Answered(
        text=str(chat.messages[-1]["content"]),
        margin=lead.least,
        passages=passages_of(found, watch.width, context.cache.text_end),
        evicted=min(held) < chat.cache.seen,
    )


def passages_of(shares_J: Tensor, width: int, tokens: int) -> tuple[Passage, ...]:
    """Return the passages, apart from each other, with the largest shares.

    Args:
        shares_J: Share of each segment.
        width: Tokens of a segment.
        tokens: Tokens of the text.
    """
    size = min(_SEGMENTS, len(shares_J))
    found: list[Passage] = []
    left = shares_J.clone()
    while len(found) < PASSAGES:
        sums = left.unfold(0, size, 1).sum(-1)
        best = int(sums.argmax())
        if sums[best] <= 0:
            break
        end = min((best + size) * width, tokens)
        found.append(Passage(start=best * width, end=end, attention=float(sums[best])))
        left[best : best + size] = -torch.inf
    return tuple(found)


def check_source(context: Context, source: Any) -> None:
    """Refuse another text before a question is asked, so that it does not pass where no answer is flagged.

    Raises:
        ValueError: If its digest is not that of what was read, or no turn of this context has room for passages.
    """
    if context.cache.turn_room < 1:
        raise _no_room(context)
    if len(context.sources) > 1:
        raise ValueError(
            f"{context.name!r} was joined from {len(context.sources)} texts, whose passages are not read again; ask "
            "the context of one text, or leave source out"
        )
    document, read = open_document(source), context.sources[0] if context.sources else None
    for _ in document.ids if document.pieces is None else document.pieces:  # type: ignore[union-attr]
        pass
    given = document.read(1)
    if read is None or (given.sha256, given.of) != (read.sha256, read.of):
        raise _another_text(context, given.name)


def reread(
    context: Context, question: str, source: Any, first: Answered, max_new_tokens: int, options: dict[str, Any]
) -> Answered:
    """Answer once more, with the passages of the first answer read again behind what is held.

    They take the room that a turn has, `chunk_size` tokens: the cache holds no more than it may for any turn. Passages
    that are too long for it are looked into first, as texts of their own and within the same budget.

    Args:
        context: What was asked; it does not change.
        question: What was asked.
        source: The text that was read, in any form that `LongContextModel.read` takes.
        first: The answer.
        max_new_tokens: As for `Context.ask`.
        options: As for `Context.ask`.

    Returns:
        The second answer, with the passages that were read for it; the first one, if it looked at none.

    Raises:
        ValueError: If the source is another text, or a turn has no room.
    """
    _check_passages(context, first)
    if not first.passages:
        return first
    most = context.cache.turn_room
    room = most - len(context.question_ids(f"\n{question}")[0])
    if room < 1:
        raise _no_room(context)
    texts = _tokens_of(context, source, first.passages)
    chosen: list[tuple[Passage, list[int]]] = []
    for passage, ids in zip(first.passages, texts, strict=True):
        if len(ids) > room and not chosen:
            passage, ids = _narrowed(context, question, passage, ids, room, options)
        while not chosen and ids and _tokens_asked(context, [(passage, ids)], question) > most:
            ids = ids[:-1]  # its words may have other tokens in a turn than they had in the text
            passage = replace(passage, end=passage.end - 1)
        if ids and _tokens_asked(context, [*chosen, (passage, ids)], question) <= most:
            chosen.append((passage, ids))
    if not chosen:
        raise _no_room(context)
    second = answered(context, _asked_behind(context, chosen, question), max_new_tokens, options)
    return replace(second, passages=tuple(passage for passage, _ in chosen), before=first.text)


def _no_room(context: Context) -> ValueError:
    return ValueError(
        f"passages are read again in the room of a turn, but turns={context.cache.policy.turns!r} and chunk_size="
        f"{context.cache.policy.chunk_size} leave none beside the question; read the text with "
        'turns="local" and a larger chunk_size'
    )


def _check_passages(context: Context, first: Any) -> None:
    """Refuse what is no answer with evidence, or speaks of passages that the text does not have.

    Raises:
        ValueError: Naming what is wrong.
    """
    if not isinstance(first, Answered):
        raise ValueError(f"first is a {type(first).__name__}; give what ask(..., evidence=True) has returned")
    for one in first.passages:
        places = (one.start, one.end) if isinstance(one, Passage) else ()
        if not places or not all(type(place) is int for place in places):
            raise ValueError(f"{one!r} is no passage of a text; give what ask(..., evidence=True) has returned")
        if not 0 <= one.start < one.end <= context.cache.text_end:
            raise ValueError(
                f"tokens {one.start} to {one.end} are no passage of {context.name!r}, which has "
                f"{context.cache.text_end:,} tokens; give places in it, ascending"
            )


def _asked_behind(context: Context, chosen: Sequence[tuple[Passage, list[int]]], question: str) -> str:
    """Return a turn of passages, in the order of the text, and a question."""
    decoded = [decode(context.lm.tokenizer, ids) for _, ids in sorted(chosen, key=lambda one: one[0].start)]
    return "\n".join([*decoded, question])


def _tokens_asked(context: Context, chosen: Sequence[tuple[Passage, list[int]]], question: str) -> int:
    return len(context.question_ids(_asked_behind(context, chosen, question))[0])


def _narrowed(
    context: Context, question: str, passage: Passage, ids: list[int], room: int, options: dict[str, Any]
) -> tuple[Passage, list[int]]:
    """Return the part of a passage, at most `room` tokens, that a reading of the passage alone finds likeliest."""
    template = context._transcript.template
    inner = context.lm.read_into(context.cache.fresh(), open_document(ids), template=template, progress=False)
    found = answered(inner, question, 16, options).passages
    before = inner.cache.seen - len(ids)  # of the template
    middle = (found[0].start + found[0].end) // 2 - before if found else len(ids) // 2
    start = max(0, min(middle - room // 2, len(ids) - room))
    part = ids[start : start + room]
    return replace(passage, start=passage.start + start, end=passage.start + start + len(part)), part


def _tokens_of(context: Context, source: Any, passages: Sequence[Passage]) -> list[list[int]]:
    """Return the tokens of passages of a text that is read through once more, without the backbone."""
    document, read = open_document(source), context.sources[0] if context.sources else None
    if document.pieces is None or context._stream.pending:
        found, at = _read_through(context, document, passages)
    else:  # either it is too short for its last words to wait, or it was counted before it was read: so many tokens say
        text = list(document.pieces)
        found, at = _read_through(context, Document(document.name, iter(text)), passages)
        if read is not None and at != read.tokens:
            counted = Document(document.name, iter(text))
            counted.count(context.lm.tokenizer)
            found, at = _read_through(context, counted, passages)
    given = document.read(at)
    if read is None or (given.sha256, given.of, given.tokens) != (read.sha256, read.of, read.tokens):
        raise _another_text(context, given.name)
    return found


def _read_through(context: Context, document: Document, passages: Sequence[Passage]) -> tuple[list[list[int]], int]:
    """Return the tokens of passages, and how many tokens there are, as a document is read in this context."""
    found: list[list[int]] = [[] for _ in passages]
    at = 0
    for block in context.lm.tokens(document, system=context.system, template=context._transcript.template):
        for tokens, passage in zip(found, passages, strict=True):
            tokens.extend(_part(block, passage.start - at, passage.end - at))
        at += len(block)
    return found, at


def _another_text(context: Context, name: str) -> ValueError:
    return ValueError(
        f"source {name!r} is not the text that {context.name!r} was read from, so its passages would be others; give "
        "that text"
    )


def _part(block: Sequence[int], start: int, end: int) -> Iterable[int]:
    return block[max(start, 0) : max(end, 0)]
