"""From an item to the tokens a model reads: truncation, then the chat template where the protocol has one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from locret.data.tasks.published.base import Item, PublishedTask
from locret.data.tasks.published.truncation import cut_middle, cut_words
from locret.data.training.chat import check_template, encode, render
from locret.data.training.rows import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    task: PublishedTask, item: Item, tokenizer: PreTrainedTokenizerBase, *, template: str = "chat"
) -> BuiltPrompt:
    """Return the tokens of one question, truncated and framed as the task's protocol says.

    Args:
        task: The task.
        item: One of its items.
        tokenizer: Any tokenizer; it needs a chat template for tasks that are chat turns, unless `template` says
            otherwise.
        template: "chat", "original" or "none", as in `locret.data.training.chat`; a task to complete never gets one.

    Raises:
        ValueError: If the template is missing or refuses the turns, or the prompt cannot be cut to the limit.
    """
    chat = task.chat and not item.plain

    def count(text: str) -> int:
        return len(_encoded(tokenizer, text))

    limit = task.allowed(item, count)
    content, before, after = item.content, None, None
    if limit is not None and task.truncation == "words" and not item.plain:
        document = cut_words(item.document, limit, count, from_start=task.cut_start)
        before, after = count(item.document), count(document)
        content = item.content[: item.span[0]] + document + item.content[item.span[1] :]
    elif limit is not None and task.truncation == "middle":
        ids = _encoded(tokenizer, content)
        kept = cut_middle(ids, limit)
        before, after = len(ids), len(kept)
        if not chat and not task.reencode:
            kept += encode(tokenizer, item.lead) if item.lead else []
            return BuiltPrompt(kept, content + item.lead if after == before else "", before, after)
        if after < before:
            half = after // 2
            content = _decoded(tokenizer, kept[:half]) + _decoded(tokenizer, kept[half:])
    if not chat:
        ids = _encoded(tokenizer, content + item.lead)
        return BuiltPrompt(ids, content + item.lead, before or len(ids), after or len(ids))
    text = task.framed(item, content, tokenizer) if template == "chat" else None
    if text is None:
        text = _framed(tokenizer, item, content, template)
        ids = encode(tokenizer, text) if template == "chat" else _encoded(tokenizer, text)
    else:
        ids = _encoded(tokenizer, text)
    return BuiltPrompt(ids, text, before or len(ids), after or len(ids))


def _framed(tokenizer: Any, item: Item, content: str, template: str) -> str:
    check_template(tokenizer, template)
    turns = [Message("user", content)]
    if item.system:
        turns.insert(0, Message("system", item.system))
    return render(tokenizer, turns, template) + item.lead


def _encoded(tokenizer: Any, text: str) -> list[int]:
    """Token ids as the tokenizer gives them by default, with its bos."""
    return list(tokenizer(text, return_attention_mask=False, verbose=False)["input_ids"])


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
