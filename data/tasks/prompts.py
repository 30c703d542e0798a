"""From a sample to the tokens a model reads: truncation, then the chat template where the protocol has one.

Too long a prompt loses its middle, in tokens, or words of its document. Of a text with several questions the text alone
loses its middle, so that the longest question still fits: all questions find the same part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from locret.conversation.text import encode
from locret.conversation.turns import Message, check_template, render
from locret.data.tasks.task import Sample, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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

    @property
    def truncated(self) -> bool:
        """Whether anything was cut."""
        return self.tokens_after < self.tokens_before


def build_prompt(
    task: Task, sample: Sample, tokenizer: PreTrainedTokenizerBase, *, template: str = "chat"
) -> BuiltPrompt:
    """Return the tokens of one question, truncated and framed as the task's protocol says.

    Args:
        task: The task.
        sample: One of its samples.
        tokenizer: Any tokenizer; it needs a chat template for tasks that are chat turns, unless `template` says
            otherwise.
        template: "chat", "original" or "none", as in `locret.conversation.turns`; a task to complete gets none.

    Raises:
        ValueError: If the template is missing or refuses the turns, or the prompt cannot be cut to the limit.
    """

    def count(text: str) -> int:
        return len(_encoded(tokenizer, text))

    limit, tail, first = task.allowed(sample, count), None, sample
    if limit is not None and task.truncation == "middle" and len(sample.asked) > 1:
        tails = {count(f"{question.gap}{question.text}"): question for question in sample.asked}
        tail = max(tails)
        if task.bound is not None:
            first = sample.asking(tails[tail])
    built = _built(task, first, tokenizer, template, limit, count, tail)
    # A limit counts what the protocol cuts; what stands around that is part of the user's bound.
    while task.bound is not None and len(built.ids) > task.bound:
        limit = built.tokens_after - (len(built.ids) - task.bound)
        if limit < 2 or sample.plain:
            raise ValueError(
                f"--max-prompt {task.bound} has no room for what stands around the text of {task.name} {sample.id}; "
                f"raise it (this prompt has {len(built.ids):,} tokens)"
            )
        built = _built(task, first, tokenizer, template, limit, count, tail)
    return built if first is sample else _built(task, sample, tokenizer, template, limit, count, tail)


def _built(
    task: Task,
    sample: Sample,
    tokenizer: Any,
    template: str,
    limit: int | None,
    count: Callable[[str], int],
    tail: int | None = None,
) -> BuiltPrompt:
    """Return the prompt whose content or document is cut to `limit`; with a `tail` so that its tokens fit as well."""
    chat = task.chat and not sample.plain
    content, before, after = sample.content, None, None
    if limit is not None and task.truncation == "words" and not sample.plain:
        document = cut_words(sample.document, limit, count, from_start=task.cut_start)
        before, after = count(sample.document), count(document)
        content = sample.content[: sample.span[0]] + document + sample.content[sample.span[1] :]
    elif limit is not None and tail is not None:
        end = sample.span[1]
        ids, asked = _encoded(tokenizer, content[:end]), encode(tokenizer, content[end:])
        kept = cut_middle(ids, max(limit - tail, 0))
        before, after = len(ids) + len(asked), len(kept) + len(asked)
        if after < before:
            half = len(kept) // 2
            content = f"{_decoded(tokenizer, kept[:half])}{_decoded(tokenizer, kept[half:])}{content[end:]}"
    elif limit is not None and task.truncation == "middle":
        ids = _encoded(tokenizer, content)
        kept = cut_middle(ids, limit)
        before, after = len(ids), len(kept)
        if not chat and not task.reencode:
            kept += encode(tokenizer, sample.lead) if sample.lead else []
            return BuiltPrompt(kept, content + sample.lead if after == before else "", before, after)
        if after < before:
            half = after // 2
            content = _decoded(tokenizer, kept[:half]) + _decoded(tokenizer, kept[half:])
    if not chat:
        ids = _encoded(tokenizer, content + sample.lead)
        return BuiltPrompt(ids, content + sample.lead, before or len(ids), after or len(ids))
    text = task.framed(sample, content, tokenizer) if template == "chat" else None
    if text is None:
        text = _framed(tokenizer, sample, content, template)
        ids = encode(tokenizer, text) if template == "chat" else _encoded(tokenizer, text)
    else:
        ids = _encoded(tokenizer, text)
    return BuiltPrompt(ids, text, before or len(ids), after or len(ids))


def _framed(tokenizer: Any, sample: Sample, content: str, template: str) -> str:
    check_template(tokenizer, template)
    turns = [Message("user", content)]
    if sample.system:
        turns.insert(0, Message("system", sample.system))
    return render(tokenizer, turns, template) + sample.lead


def _encoded(tokenizer: Any, text: str) -> list[int]:
    """Token ids as the tokenizer gives them by default, with its bos."""
    return list(tokenizer(text, return_attention_mask=False, verbose=False)["input_ids"])


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def cut_middle(tokens: Sequence[Token], limit: int) -> list[Token]:
    """Return the first and the last `limit // 2` tokens of a longer prompt, or all of a shorter one.

    An odd limit loses one token, as in the official scripts of InfiniteBench and LongBench.

    Args:
        tokens: Token ids, special ones included.
        limit: Tokens allowed, 2 or more.

    Raises:
        ValueError: For a limit that keeps nothing.
    """
    if limit < 2:
        raise ValueError(f"limit={limit} leaves no tokens of the prompt; raise it to 2 or more")
    if len(tokens) <= limit:
        return list(tokens)
    half = limit // 2
    return [*tokens[:half], *tokens[-half:]]


def cut_words(document: str, limit: int, count: Callable[[str], int], *, from_start: bool = False) -> str:
    """Return a document with so few words that it has at most `limit` tokens: L-Eval's rule.

    It keeps the first `limit` words, then 250 fewer each time until the tokens fit (from 500 words on half as many,
    so that small limits work too; the published ones never get there). Words are what single spaces separate, so line
    breaks stay inside words.

    Args:
        document: The text.
        limit: Tokens allowed.
        count: Tokens of a text as the tokenizer counts by default, special ones included.
        from_start: Keep the last words instead, as for code.

    Raises:
        ValueError: If even the last words left are too long, as in a text without spaces.
    """
    words = document.split(" ")
    keep = limit
    cut = document
    while count(cut) > limit:
        if keep == 0:
            raise ValueError(
                f"a document of {len(document):,} characters has too few spaces to be cut by words to limit={limit:,} "
                "tokens; raise limit or leave the row out"
            )
        cut = " ".join(words[-keep:] if from_start else words[:keep])
        keep = max(keep - WORD_STEP, keep // 2)
    return cut
