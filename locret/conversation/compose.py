"""Contexts of texts that were read apart, joined so that they are asked together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from locret.base.fields import shown
from locret.cache.cache import RetentionCache
from locret.cache.compose import check_together, checked_budget, joined
from locret.chunked_prefill import feed_held_back, read_turn
from locret.conversation.context import Context
from locret.conversation.document import encode, is_text, shared
from locret.conversation.protect import Protection, Rule, Turn, rules_of

SEPARATOR = "\n\n"
"""What is between two documents in the user's turn, as between a document and a question."""


def compose(contexts: Sequence[Context], budget: int | None = None, *, name: str | None = None) -> Context:
    """Join contexts that were read apart, in their order, so that one can ask about all of them.

    The documents follow each other in the user's first turn, with an empty line between two of them. Of every context
    but the first, the units of what comes before its document (the begin of text, the user's tag, a system message)
    are dropped, and what waits at the end of every context but the last is read now; nothing else is read again. The
    contexts do not change. What was protected stays.

    Args:
        contexts: Contexts of one model, read with one policy but for how many units stay, and one system message.
        budget: Units per KV head of the whole, as many for each context, chosen by the scores that they have; what a
            short one does not need is for the others. None: all that are held. `context.shrink` before gives a context
            more than another, and afterwards keeps the best of all.
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
    lm = contexts[0].lm
    if name is not None and not is_text(name):
        raise ValueError(f"name={name!r} is no text; give a name, or leave it out")
    budget = None if budget is None else checked_budget(budget)
    check_together([context.cache for context in contexts])
    parts, turns, distance, read = [], list[Turn](), 0, contexts[0].talk.copy()
    for nth, context in enumerate(contexts):
        cache = context.cache.copy()
        feed_held_back(lm.model, cache)
        skip = opening_tokens(context) if nth else 0
        if nth:
            read.ids = None if read.ids is None or context.talk.ids is None else read.ids + context.talk.ids[skip:]
        if nth < len(contexts) - 1 and (ids := replace(context.talk.stream).rest(SEPARATOR)):
            read_turn(lm.model, torch.tensor([ids]), cache)
            read.read(ids)
        parts.append((cache, skip))
        distance -= skip
        for turn in context.protection.turns or ():
            start, end = max(turn.start, skip), cache.seen if turn.end is None else turn.end
            if end > start:
                turns.append(Turn(turn.role, start + distance, end + distance))
        distance += cache.seen
    whole = joined(parts, budget)
    known = all(context.protection.turns is not None for context in contexts)
    talk = replace(
        read,
        stream=replace(contexts[-1].talk.stream),
        name=" + ".join(context.name for context in contexts) if name is None else name,
        protection=_protection(whole, turns if known else []),
    )
    return Context(lm, whole, talk)


def _protection(cache: RetentionCache, turns: list[Turn]) -> Protection:
    """Return what is protected of a whole, by tokens.

    The last turn goes on until another begins, so what is protected of it is said by its number.
    """
    spans = cache.protected[0] if cache.protected else ()
    if not turns:
        return Protection(rules_of(spans), None)
    turns[-1], last = turns[-1]._replace(end=None), Rule("message", len(turns) - 1)
    goes_on = [one.end is None and one.name.endswith(f", {turns[-1].role}") for one in spans]
    rules = [replace(last, share=one.share) if on else Rule.of(one) for one, on in zip(spans, goes_on, strict=True)]
    return Protection(tuple(dict.fromkeys(rules)), tuple(turns))


def opening_tokens(context: Context) -> int:
    """Return how many tokens of a context come before its document."""
    tokenizer, transcript = context.lm.tokenizer, context.talk.transcript
    opening = transcript.opening()
    alone = encode(tokenizer, opening)
    # A tokenizer may join the end of the opening with the document's first word.
    followed = [encode(tokenizer, opening + word) for word in ("A", "1", "(")]
    return len(transcript.special) + min(shared(alone, ids) for ids in followed)


def _checked(contexts: Sequence[Context]) -> list[Context]:
    contexts = list(contexts) if isinstance(contexts, Sequence) and not isinstance(contexts, str) else []
    if len(contexts) < 2 or not all(isinstance(context, Context) for context in contexts):
        raise ValueError("compose joins two or more contexts; give them in a list, as lm.read and lm.load return them")
    first = contexts[0]
    for context in contexts[1:]:
        if context.lm is not first.lm:
            raise ValueError(f"{first.name!r} and {context.name!r} belong to two models; load both with one")
        for what in ("template", "system"):
            one, other = (getattr(part.talk.transcript, what) for part in (first, context))
            if one != other:
                raise ValueError(
                    f"{first.name!r} and {context.name!r} were read with {what}={shown(one)} and {what}="
                    f"{shown(other)}, but one conversation has one; read them with the same"
                )
    return contexts
