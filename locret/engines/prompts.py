"""Prompts for an engine that holds a saved context: made from its file and a tokenizer, without backbone or engine."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from locret.conversation.chat import check_question
from locret.conversation.turns import saved_talk
from locret.engines.prefix import Prefix


class SavedPrompts:
    """What to send to an engine that holds the context of a file, or the conversation.

    Args:
        path: File written by `context.save` or `chat.save`.
        tokenizer: The backbone's.

    Raises:
        ValueError: If the file is none, would be no ordinary prefix, or was made with another tokenizer.
        OSError: If the file cannot be read.

    Examples:
        >>> prompts = SavedPrompts("book.ctx", tokenizer)
        >>> body = {"prompt": prompts.ids("What is the pass key?"), "max_tokens": 64, "temperature": 0}
        >>> requests.post("http://127.0.0.1:8000/v1/completions", json={"model": "tiny", **body})
    """

    def __init__(self, path: str | Path, tokenizer: PreTrainedTokenizerBase) -> None:
        self.prefix = Prefix.from_file(path)
        self._talk = saved_talk(path, tokenizer, self.prefix.vocab_size)
        self.name = self._talk.name

    def question_ids(self, question: str) -> list[int]:
        """Return the token ids that follow the prefix: the question, up to where its answer begins.

        Raises:
            ValueError: For an empty question.
        """
        check_question(question)
        talk = self._talk.copy()
        return [*talk.unread, *talk.stream.rest(talk.transcript.ask(question))]

    def ids(self, question: str) -> list[int]:
        """Return the whole prompt: the ids that stand for the context, and the question's.

        Raises:
            ValueError: For an empty question.
        """
        return [*self.prefix.placeholders, *self.question_ids(question)]
