"""Contexts of texts that were read apart, joined so that they are asked together; and what two chats added to one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from locret.base.fields import shown
from locret.cache.compose import (
    FAIR,
    Part,
    Shares,
    check_together,
    checked_budget,
    checked_shares,
    holds_units_of,
    joined,
)
from locret.chunked_prefill import feed_held_back, read_turn
from locret.conversation.chat import Chat
from locret.conversation.context import Context
from locret.conversation.document import is_text
from locret.conversation.rules import ASSISTANT, EACH, QUESTION, TOOL, USER, Rule, rules_of
from locret.conversation.templates import encode, leading_special_ids
from locret.conversation.transcript import DOCUMENT
from locret.conversation.turns import Protection, Turn, moved_turns

if TYPE_CHECKING:
    from locret.cache.cache import RetentionCache
    from locret.conversation.long_context_model import LongContextModel

SEPARATOR = "\n\n"
"""What is between two documents in the user's turn, as between a document and a question."""
_NEXT = "LocretNext7f3a9c"


def compose(
    contexts: Sequence[Context], budget: int | None = None, shares: Shares = FAIR, *, name: str | None = None
) -> Context:
    """Join contexts that were read apart, in their order, so that one can ask about all of them.

    The documents follow each other in the user's first turn, with an empty line between two of them. Of every context
    but the first, the units of what comes before its document (the begin of text, the user's tag, a system message)
    are dropped, and what waits at the end of every context but the last is read now; nothing else is read again. The
    contexts do not change.

    Args:
        contexts: Contexts of one model, read with one policy but for how many units stay, and one system message.
        budget: Units per KV head of the whole, chosen by the scores that they have; None: all that are held.
        shares: Within a budget: "fair", as many for each context, and what a short one does not need is for the others;
            "score", the best of all; or a number for each context, in proportion to which it is divided.
        name: What to call it; else the names of the contexts.

    Raises:
        ValueError: If they do not go together, or a number makes no sense.

    Examples:
        >>> lm = LongContextModel(model, tokenizer, heads, policy)
        >>> fact = "The pass key is 71432. Remember it. "
        >>> first, second = lm.read(["The grass is green. " * 40, fact + "The sky is blue. " * 40])
        >>> compose([first, second], budget=100).ask("What is the pass key?")
        'The pass key is 71432.'
    """
    contexts = _checked(contexts)
    lm, last = contexts[0].lm, contexts[-1]
    if name is not None and not is_text(name):
        raise ValueError(f"name={name!r} is no text; give a name, or leave it out")
    budget = None if budget is None else checked_budget(budget)
    check_together([context.cache for context in contexts])
    checked_shares(shares, len(contexts), budget)
    parts, turns, distance = [], list[Turn](), 0
    for nth, context in enumerate(contexts):
        cache = context.cache.copy()
        feed_held_back(lm.model, cache)
        if nth < len(contexts) - 1:
            _add(lm, cache, context._stream.copy().rest(SEPARATOR))
        parts.append(Part(cache, opening_tokens(context) if nth else 0))
        distance -= parts[-1].skip
        turns += moved_turns(context.protection.turns or (), distance, parts[-1].skip, cache.seen)
        distance += cache.seen
    whole = joined(parts, budget, shares)
    called = " + ".join(context.name for context in contexts) if name is None else name
    sources = tuple(source for context in contexts for source in context.sources)
    protection = _fixed(whole, turns, [context.protection for context in contexts])
    return Context(lm, whole, last._stream.copy(), contexts[0]._transcript.copy(), called, sources, protection)


def merge(context: Context, chats: Sequence[Chat]) -> Chat:
    """Put what several chats added to a context one after another onto it; see `Context.merge`."""
    chats = list(chats)
    _check_chats(context, chats)
    lm, parts, turns, distance = context.lm, list[Part](), list[Turn](), 0
    for nth, chat in enumerate(chats):
        fork = chat.fork()
        if fork.protection.turns is not None:
            fork.protection.apply(fork.cache)  # its last answer has been written since
        feed_held_back(lm.model, fork.cache)
        if nth < len(chats) - 1:
            between = fork._transcript.copy().ask(_NEXT).partition(_NEXT)[0]
            _add(lm, fork.cache, [*fork._unread, *fork._stream.rest(between)])
        parts.append(Part(fork.cache, context.cache.seen + _until_question(context, chat) if nth else 0))
        distance -= parts[-1].skip
        turns += moved_turns(chat.protection.turns or (), distance, parts[-1].skip, fork.cache.seen)
        distance += fork.cache.seen
    cache = joined(parts, grows=False)
    cache.text_end = context.cache.text_end
    first, *others = (chat._transcript.copy() for chat in chats)
    for other in others:
        asked = other.turns[0]
        first.turns += (asked._replace(content=asked.content.removeprefix(f"{DOCUMENT}{SEPARATOR}")), *other.turns[1:])
    last = chats[-1]
    protection = _fixed(cache, turns, [chat.protection for chat in chats])
    return Chat(lm, cache, last._stream.copy(), first, context.name, last._unread, context.sources, protection)


def _fixed(cache: RetentionCache, turns: list[Turn], parts: Sequence[Protection]) -> Protection:
    """Return what is protected of a whole: what was of its parts, by tokens, and what they say of turns that follow.

    The last turn goes on until another begins, so what is protected of it is said by its number.
    """
    spans = cache.protected[0] if cache.protected else ()
    if not turns or any(part.turns is None for part in parts):
        return Protection(rules_of(spans), None)
    turns[-1] = turns[-1]._replace(end=None)
    last = Rule("message", len(turns) - 1)
    own = [
        replace(last, share=one.share) if one.end is None and one.name.endswith(f", {turns[-1].role}") else one
        for one in spans
    ]
    rules = (*map(Rule.of, own), *_following(parts, len(turns)))
    return Protection(tuple(dict.fromkeys(rules)), tuple(turns), len(turns))


def _following(parts: Sequence[Protection], turns: int) -> list[Rule]:
    """Return the rules of parts about turns that follow a whole of so many.

    Raises:
        ValueError: If two parts say something else of the same turns.
    """
    found = dict[tuple[str, int | None], Rule]()
    for part in parts:
        for rule in part.rules:
            number, own = rule.start, len(part.turns or ())
            if rule.what == "message" and number is not None:
                if 0 <= number < own:
                    continue
                rule = rule if number < 0 else replace(rule, start=number + turns - own)
            elif rule.what not in (QUESTION, EACH, USER, ASSISTANT, TOOL):
                continue
            other = found.setdefault((rule.what, rule.start), rule)
            if other != rule:
                raise ValueError(
                    f"protect={other} and protect={rule} are both about the turns that follow, of which there is one "
                    "conversation; give all parts the same rule for them"
                )
    return list(found.values())


def _check_chats(context: Context, chats: Sequence[Chat]) -> None:
    if len(chats) < 2 or not all(isinstance(chat, Chat) for chat in chats):
        raise ValueError("merge joins what two or more chats about a context added; give chats of context.chat()")
    for chat in chats:
        chat._check()
        if chat.lm is not context.lm:
            raise ValueError(f"{chat!r} belongs to another model; load context and chats with one")
        if not chat.messages:
            raise ValueError(f"{chat!r} has said nothing yet, so there is nothing to merge; leave it out")
        if chat.cache.seen <= context.cache.seen or not holds_units_of(chat.cache, context.cache):
            raise ValueError(f"{chat!r} does not go on from this context: it holds other units; give chats of this one")
    check_together([context.cache, *(chat.cache for chat in chats)])


def _until_question(context: Context, chat: Chat) -> int:
    """Return the tokens of a chat's first turn that come before its question: the document's last words."""
    waiting, asked = context._stream.copy(), chat._transcript.turns[0].content.removeprefix(f"{DOCUMENT}{SEPARATOR}")
    return _shared(waiting.rest(SEPARATOR), context.question_ids(asked)[0].tolist())


def opening_tokens(context: Context) -> int:
    """Return how many tokens of a context come before its document."""
    tokenizer, opening = context.lm.tokenizer, context._transcript.opening()
    special = len(leading_special_ids(tokenizer)) if context._transcript.template != "chat" else 0
    alone = encode(tokenizer, opening)
    # A tokenizer may join the end of the opening with the document's first word.
    followed = [encode(tokenizer, opening + word) for word in ("A", "1", "(")]
    return special + min(_shared(alone, ids) for ids in followed)


def _shared(ids: Sequence[int], others: Sequence[int]) -> int:
    agree = [one == other for one, other in zip(ids, others, strict=False)]
    return (*agree, False).index(False)


def _checked(contexts: Sequence[Context]) -> list[Context]:
    contexts = list(contexts) if isinstance(contexts, Sequence) and not isinstance(contexts, str) else []
    if len(contexts) < 2 or not all(isinstance(context, Context) for context in contexts):
        raise ValueError("compose joins two or more contexts; give them in a list, as lm.read and lm.load return them")
    first = contexts[0]
    for context in contexts[1:]:
        if context.lm is not first.lm:
            raise ValueError(f"{first.name!r} and {context.name!r} belong to two models; load both with one")
        ours, theirs = first._transcript, context._transcript
        for what, one, other in (("template", ours.template, theirs.template), ("system", ours.system, theirs.system)):
            if one != other:
                raise ValueError(
                    f"{first.name!r} and {context.name!r} were read with {what}={shown(one)} and {what}="
                    f"{shown(other)}, but one conversation has one; read them with the same"
                )
    return contexts


def _add(lm: LongContextModel, cache: RetentionCache, ids: list[int]) -> None:
    if ids:
        read_turn(lm.model, torch.tensor([ids]), cache)
