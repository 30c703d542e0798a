"""The shapes in which OpenAI's clients expect answers: whole ones, and the chunks of a stream."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from itertools import count
from typing import Any

from locret.conversation.document import HALF_A_CHARACTER, is_text
from locret.infer.serve.answers import Piece, Token
from locret.infer.serve.prompts import Prompt
from locret.infer.serve.schemas import Body, ChatRequest

_OPENS, _CLOSES = "<tool_call>", "</tool_call>"


class CallText:
    """Parts the text of an answer, as it is written, into words and whole calls; what is no call stays in the words."""

    def __init__(self) -> None:
        self.made = 0
        """Calls so far."""
        self._held = ""

    def add(self, text: str, *, last: bool) -> tuple[str, list[dict[str, Any]]]:
        """Take more of the text, and return what is certain now; at the end of the answer a call needs no end."""
        self._held += text
        words, calls = "", list[dict[str, Any]]()
        while (at := self._held.find(_OPENS)) >= 0 and (last or _CLOSES in self._held[at:]):
            inside, _, after = self._held[at + len(_OPENS) :].partition(_CLOSES)
            found = _called(inside)
            words += self._held[:at].rstrip() if found else self._held[: len(self._held) - len(after)]
            calls, self._held = calls + found, after
        self.made += len(calls)
        if at < 0:
            size = next(size for size in range(len(_OPENS), -1, -1) if self._held.endswith(_OPENS[:size]))
            at = len(self._held) - size
        certain = self._held if last else self._held[:at].rstrip()  # white space before a call goes with it
        self._held = self._held[len(certain) :]
        return words + (certain if certain.strip() or not self.made else ""), calls


def _called(text: str) -> list[dict[str, Any]]:
    """Return the calls that a text between tags makes, one object or a list of them; none if it is something else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return []
    calls = list[dict[str, Any]]()
    for one in found if isinstance(found, list) else [found]:
        if not isinstance(one, dict) or not is_text(name := one.get("name")):
            return []
        given = one.get("arguments") or {}
        function = {"name": name, "arguments": given if is_text(given) else json.dumps(given)}
        calls.append({"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function})
    return calls


def usage(prompts: Sequence[Prompt], answers: Sequence[Piece]) -> dict[str, Any]:
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
    ending = "data: [DONE]\n\n"
    """What a stream ends with."""

    def __init__(self, model: str, body: Body) -> None:
        self.logprobs, self.options = body.top is not None, body.stream_options
        parted = isinstance(body, ChatRequest) and body.callable
        self.calls = [CallText() for _ in range(body.choices)] if parted else []
        self.head = {"id": f"{self.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}

    def whole(self, answers: Sequence[Piece], counts: dict[str, Any]) -> dict[str, Any]:
        choices = [self._choice(answer) for answer in answers]
        return {**self.head, "object": self.name, "choices": choices, "usage": counts}

    def opening(self, answers: int) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": "", "refusal": None}
        return [self._chunk([_shaped(nth, None, None, delta=delta)]) for nth in range(answers)]

    def piece(self, piece: Piece) -> list[dict[str, Any]]:
        words, calls, finish = self._parted(piece)
        delta: dict[str, Any] = {"content": words} if words or not (calls or finish) else {}
        if calls:
            first = self.calls[piece.choice].made - len(calls)
            delta["tool_calls"] = [{"index": first + nth, **call} for nth, call in enumerate(calls)]
        return [self._chunk([_shaped(piece.choice, self._likely(piece.tokens), finish, delta=delta)])]

    def closing(self, answers: Sequence[Piece], counts: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the chunks after the last piece: that which counts tokens, if it is asked for."""
        counted = self.options is not None and self.options.include_usage
        return [{**self._chunk([]), "usage": counts}] if counted else []

    def _chunk(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {**self.head, "object": self.chunk_name, "choices": choices}

    def _choice(self, answer: Piece) -> dict[str, Any]:
        words, calls, finish = self._parted(answer)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": words if words or not calls else None,
            "refusal": None,
        }
        if calls:
            message["tool_calls"] = calls
        return _shaped(answer.choice, self._likely(answer.tokens), finish, message=message)

    def _parted(self, more: Piece) -> tuple[str, list[dict[str, Any]], str | None]:
        """Return the words and the calls in more of an answer's text, and why it ends, if it does."""
        if not self.calls:
            return more.text, [], more.finish
        parts = self.calls[more.choice]
        words, calls = parts.add(more.text, last=more.finish is not None)
        return words, calls, "tool_calls" if more.finish == "stop" and parts.made else more.finish

    def _likely(self, tokens: Sequence[Token]) -> dict[str, Any] | None:

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

    def opening(self, answers: int) -> list[dict[str, Any]]:
        return []

    def piece(self, piece: Piece) -> list[dict[str, Any]]:
        return [self._chunk([self._choice(piece)])]

    def _choice(self, answer: Piece) -> dict[str, Any]:
        return _shaped(answer.choice, self._likely(answer.tokens), answer.finish, text=answer.text)

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


class ResponsesForm:
    """Shapes of `/v1/responses`: one message with one text, whole or as events."""

    ending = ""

    def __init__(self, model: str, body: Any) -> None:
        said = {name: getattr(body, name) for name in ("instructions", "max_output_tokens", "temperature", "top_p")}
        fixed = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "error": None}
        head = {"id": f"resp_{secrets.token_hex(12)}", "object": "response", "created_at": int(time.time())}
        self.head = {**head, "model": model, **said, **fixed}
        self._place = {"item_id": f"msg_{secrets.token_hex(12)}", "output_index": 0, "content_index": 0}
        self._events = count()

    def whole(self, answers: Sequence[Piece], counts: dict[str, Any]) -> dict[str, Any]:
        cut = answers[0].finish == "length"
        status, why = ("incomplete", {"reason": "max_output_tokens"}) if cut else ("completed", None)
        used = {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": counts["prompt_tokens_details"],
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counts["total_tokens"],
        }
        output = [self._message(status, _output(answers[0].text))]
        return {**self.head, "status": status, "incomplete_details": why, "output": output, "usage": used}

    def opening(self, answers: int) -> list[dict[str, Any]]:
        return [
            self._event("created", response={**self.head, "status": "in_progress", "output": []}),
            self._event("output_item.added", output_index=0, item=self._message("in_progress")),
            self._event("content_part.added", **self._place, part=_output("")),
        ]

    def piece(self, piece: Piece) -> list[dict[str, Any]]:
        return [self._event("output_text.delta", **self._place, delta=piece.text, logprobs=[])]

    def closing(self, answers: Sequence[Piece], counts: dict[str, Any]) -> list[dict[str, Any]]:
        whole, text = self.whole(answers, counts), answers[0].text
        return [
            self._event("output_text.done", **self._place, text=text, logprobs=[]),
            self._event("content_part.done", **self._place, part=_output(text)),
            self._event("output_item.done", output_index=0, item=whole["output"][0]),
            self._event(whole["status"], response=whole),
        ]

    def _message(self, status: str, *content: dict[str, Any]) -> dict[str, Any]:
        about = {"id": self._place["item_id"], "type": "message", "role": "assistant"}
        return {**about, "status": status, "content": list(content)}

    def _event(self, name: str, **fields: Any) -> dict[str, Any]:
        return {"type": f"response.{name}", "sequence_number": next(self._events), **fields}


def _output(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
