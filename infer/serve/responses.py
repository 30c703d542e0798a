"""The shapes in which OpenAI's clients expect answers: whole ones, and the chunks of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from locret.conversation.document import HALF_A_CHARACTER
from locret.infer.serve.answers import Piece, Token
from locret.infer.serve.prompts import Prompt


@dataclass
class Answer:
    """One of the answers to a request, as far as it is written."""

    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    finish: str | None = None
    count: int = 0
    """Tokens, those without a text of their own included."""

    def add(self, piece: Piece) -> None:
        """Take the next piece."""
        self.text += piece.text
        self.tokens += piece.tokens
        self.count, self.finish = piece.count, piece.finish


def usage(prompts: Sequence[Prompt], answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the tokens of a request, counted as if each prompt had been given whole.

    The details say how many tokens of the prompts had been read before, how many were read for this request, and how
    many units per KV head stand for them.
    """
    given, written = sum(one.tokens for one in prompts), sum(one.count for one in answers)
    details = {
        "cached_tokens": sum(one.cached for one in prompts),
        "read_tokens": sum(one.read for one in prompts),
        "units": sum(one.units for one in prompts),
    }
    counts = {"prompt_tokens": given, "completion_tokens": written, "total_tokens": given + written}
    return {**counts, "prompt_tokens_details": details}


class ChatForm:
    """Shapes of `/v1/chat/completions`."""

    name, chunk_name, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, model: str, logprobs: bool) -> None:
        self.logprobs = logprobs
        self.head = {"id": f"{self.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}

    def whole(self, answers: Sequence[Answer], counts: dict[str, Any]) -> dict[str, Any]:
        """Return the response with all answers."""
        choices = [self._choice(nth, answer) for nth, answer in enumerate(answers)]
        return {**self.head, "object": self.name, "choices": choices, "usage": counts}

    def opening(self, count: int) -> list[dict[str, Any]]:
        """Return the chunks before the first piece."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return [self.chunk([_shaped(nth, None, None, delta=delta)]) for nth in range(count)]

    def piece(self, piece: Piece) -> dict[str, Any]:
        """Return the chunk of a piece."""
        delta = {"content": piece.text} if piece.text or piece.finish is None else {}
        return self.chunk([_shaped(piece.choice, self._likely(piece.tokens), piece.finish, delta=delta)])

    def chunk(self, choices: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        """Return a chunk; without choices it is the last one, which counts tokens."""
        return {**self.head, "object": self.chunk_name, "choices": choices}

    def _choice(self, nth: int, answer: Answer) -> dict[str, Any]:
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        return _shaped(nth, self._likely(answer.tokens), answer.finish, message=message)

    def _likely(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        """Return the log-probabilities of tokens of an answer."""

        def other(text: str, logprob: float) -> dict[str, Any]:  # of a part of a character there are no bytes
            return {"token": text, "logprob": logprob, "bytes": None if HALF_A_CHARACTER in text else [*text.encode()]}

        if not self.logprobs:
            return None
        content = [
            {
                "token": one.text,
                "logprob": one.logprob,
                "bytes": [*one.text.encode()],
                "top_logprobs": [other(*each) for each in one.top],
            }
            for one in tokens
        ]
        return {"content": content, "refusal": None}


class CompletionForm(ChatForm):
    """Shapes of `/v1/completions`."""

    name, chunk_name, prefix = "text_completion", "text_completion", "cmpl"

    def opening(self, count: int) -> list[dict[str, Any]]:
        """Return no chunks."""
        return []

    def piece(self, piece: Piece) -> dict[str, Any]:
        """Return the chunk of a piece."""
        return self.chunk([self._choice(piece.choice, Answer(piece.text, list(piece.tokens), piece.finish))])

    def _choice(self, nth: int, answer: Answer) -> dict[str, Any]:
        return _shaped(nth, self._likely(answer.tokens), answer.finish, text=answer.text)

    def _likely(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        """Return log-probabilities as columns."""
        if not self.logprobs:
            return None
        return {
            "tokens": [one.text for one in tokens],
            "token_logprobs": [one.logprob for one in tokens],
            "top_logprobs": [dict(one.top) for one in tokens],
            "text_offset": [one.begins for one in tokens],
        }


def _shaped(nth: int, logprobs: Any, finish: str | None, **answer: Any) -> dict[str, Any]:
    return {"index": nth, **answer, "logprobs": logprobs, "finish_reason": finish}
