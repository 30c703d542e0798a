"""From a sample to the tokens a model reads: truncation, then the chat template where the protocol has one.

Too long a prompt loses its middle, in tokens, or words of its document. Of a text with several questions the text alone
loses its middle, so that the longest question still fits: all questions find the same part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from locret.data.tasks.task import Sample, Task

Token = TypeVar("Token")
WORD_STEP = 250
"""L-Eval keeps this many words fewer each time a document is still too long."""


@dataclass(frozen=True)
class BuiltPrompt:
    """The tokens of a prompt, and what its truncation did."""

    ids: list[int]
    """Token ids, special ones included."""
    text: str
    """What was encoded, with the chat template; empty where tokens were cut and not decoded again."""
    tokens_before: int
    """Tokens before truncation, of what the protocol counts: the content, or the document alone."""
    tokens_after: int
    """The same after truncation."""


def build_prompt(task: Task, sample: Sample, tokenizer: Any, *, template: str = "chat") -> BuiltPrompt:
    """Return the tokens of one question, truncated and framed as the task's protocol says."""

    def count(text: str) -> int:
        return len(_encoded(tokenizer, text))

    limit, tail, first = task.allowed(sample, count), None, sample
    if limit is not None and task.truncation == "middle" and len(sample.asked) > 1:
        tails = {count(f"{question.gap}{question.text}"): question for question in sample.asked}
        tail = max(tails)
        if task.bound is not None:
            first = sample.asking(tails[tail])
    built = _built(task, first, tokenizer, template, limit, tail)
    # A limit counts what the protocol cuts; what stands around that is part of the user's bound.
    while task.bound is not None and len(built.ids) > task.bound:
        limit = built.tokens_after - (len(built.ids) - task.bound)
        if limit < 2 or sample.plain:
            raise ValueError(
                f"--max-prompt {task.bound} has no room for what stands around the text of {task.name} {sample.id}; "
                f"raise it (this prompt has {len(built.ids):,} tokens)"
            )
        built = _built(task, first, tokenizer, template, limit, tail)
    return built if first is sample else _built(task, sample, tokenizer, template, limit, tail)


def _built(
    task: Task, sample: Sample, tokenizer: Any, template: str, limit: int | None, tail: int | None
) -> BuiltPrompt:
    """Return the prompt whose content or document is cut to `limit`; with a `tail` so that its tokens fit as well."""
    # They need torch, which the refusals of locret-eval do without.
    from locret.conversation.document import decode, encode
    from locret.conversation.turns import Message, check_template, render

    chat, content = task.chat and not sample.plain, sample.content
    before = after = None
    if limit is not None and task.truncation == "words" and not sample.plain:
        own = partial(_encoded, tokenizer)
        document = cut_words(sample.document, limit, lambda text: len(own(text)), from_start=task.cut_start)
        before, after = len(own(sample.document)), len(own(document))
        content = content[: sample.span[0]] + document + content[sample.span[1] :]
    elif limit is not None and (tail is not None or task.truncation == "middle"):
        # A question that is one of several stays whole; else it is part of what is cut.
        end = len(content) if tail is None else sample.span[1]
        ids, asked = _encoded(tokenizer, content[:end]), encode(tokenizer, content[end:])
        kept = cut_middle(ids, limit if tail is None else max(limit - tail, 0))
        before, after = len(ids) + len(asked), len(kept) + len(asked)
        if tail is None and not chat and not task.reencode:
            kept += encode(tokenizer, sample.lead) if sample.lead else []
            return BuiltPrompt(kept, content + sample.lead if after == before else "", before, after)
        if after < before:
            half = len(kept) // 2
            content = decode(tokenizer, kept[:half]) + decode(tokenizer, kept[half:]) + content[end:]
    if not chat:
        text, ids = content + sample.lead, _encoded(tokenizer, content + sample.lead)
    elif template == "chat" and (framed := task.framed(sample, content, tokenizer)) is not None:
        text, ids = framed, _encoded(tokenizer, framed)
    else:
        check_template(tokenizer, template)
        system = [Message("system", sample.system)] if sample.system else []
        text = render(tokenizer, [*system, Message("user", content)], template) + sample.lead
        ids = encode(tokenizer, text) if template == "chat" else _encoded(tokenizer, text)
    return BuiltPrompt(ids, text, before or len(ids), after or len(ids))


def _encoded(tokenizer: Any, text: str) -> list[int]:
    """Token ids as the tokenizer gives them by default, with its bos."""
    return list(tokenizer(text, return_attention_mask=False, verbose=False)["input_ids"])


def cut_middle(tokens: Sequence[Token], limit: int) -> list[Token]:
    """Return the first and the last `limit // 2` tokens of a longer prompt, or all of a shorter one.

    An odd limit loses one token, as in the official scripts of InfiniteBench and LongBench.
    """
    if limit < 2:
        raise ValueError(f"limit={limit} leaves no tokens of the prompt; raise it to 2 or more")
    half = limit // 2
    return list(tokens) if len(tokens) <= limit else [*tokens[:half], *tokens[-half:]]


def cut_words(document: str, limit: int, count: Callable[[str], int], *, from_start: bool = False) -> str:
    """Return a document with so few words that it has at most `limit` tokens: L-Eval's rule.

    It keeps the first `limit` words, then 250 fewer each time until the tokens fit (from 500 words on half as many,
    so that small limits work too; the published ones never get there). Words are what single spaces separate, so line
    breaks stay inside words.
    """
    words, keep, cut = document.split(" "), limit, document
    while count(cut) > limit:
        if keep == 0:
            raise ValueError(
                f"a document of {len(document):,} characters has too few spaces to be cut by words to limit={limit:,} "
                "tokens; raise limit or leave the row out"
            )
        cut = " ".join(words[-keep:] if from_start else words[:keep])
        keep = max(keep - WORD_STEP, keep // 2)
    return cut
