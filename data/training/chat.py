"""Rows of training data as tokens: the prompt as inference reads it, and the answers to it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from locret.conversation.document import encode, leading_special_ids
from locret.conversation.turns import render
from locret.data.training.rows import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
