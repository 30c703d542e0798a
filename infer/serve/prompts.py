"""What a request asks, as token ids: the whole prompt, or what follows a context, and what of it has to be read first.

A prompt longer than a chunk is read into a context in bounded memory, all but its end, which is the question. Contexts
are found by the tokens they have read, so a conversation that goes on, or a long text that is asked again, is read
only where it is new.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from locret.conversation.chat import LONGEST_ANSWER
from locret.conversation.document import TokenStream, leading_special_ids
from locret.conversation.model import LongContextModel
from locret.conversation.turns import Talk
from locret.infer.serve.index import Entry
from locret.infer.serve.library import Library
from locret.infer.serve.refusal import Refusal, one_line
from locret.infer.serve.schemas import Body, CompletionRequest, Conversation, Message
from locret.token_ids import vocabulary


@dataclass(frozen=True)
class Prompt:
    """A prompt as token ids, and what of it has been read: first as it was asked, then as an engine is asked."""

    ids: list[int]
    """Those after the context that was named, if one was."""
    base: Entry | None
    """That context."""
    holder: Entry | None
    """What has read the first of the ids. Its prefix is loaded only when an engine takes it: many prompts may wait."""
    known: int
    """How many of them it has read."""
    long: bool
    """Whether more has to be read before the prompt can be answered."""
    read: int = 0
    """Tokens that were read for this request."""

    @property
    def rest(self) -> list[int]:
        """The ids that follow the holder's prefix."""
        return self.ids[self.known :]

    @property
    def tokens(self) -> int:
        """Tokens of the whole prompt."""
        return len(self.ids) + (0 if self.base is None else self.base.tokens)

    @property
    def cached(self) -> int:
        """Tokens that had been read before."""
        return self.tokens - len(self.ids) + self.known - self.read

    @property
    def units(self) -> int:
        """Units per KV head of the prefix."""
        return 0 if self.holder is None else self.holder.units


class Prompts:
    """Makes prompts of requests. Its methods block and may be called from any thread; they raise `Refusal`."""

    def __init__(self, lm: LongContextModel, library: Library) -> None:
        self.lm, self.library = lm, library
        self._vocabulary = vocabulary(lm.model) or len(lm.tokenizer)

    def of(self, request: Body) -> list[Prompt]:
        """Return the prompts of a completion, or the one of a conversation."""
        base = None if request.context is None else self.library.get(request.context)
        if isinstance(request, CompletionRequest):
            return [self._prompt(self._text_ids(prompt, base), base) for prompt in request.prompts]
        return [self._prompt(self._written(request) if base is None else self._ids_after(base, request), base)]

    def settled(self, prompt: Prompt, cancelled: Callable[[], bool]) -> Prompt:
        """Return a prompt of which all but a question's length has been read; `cancelled` is asked between chunks."""
        if not prompt.long:
            return prompt
        # The others are the question.
        end, known = len(prompt.ids) - max(1, self.lm.policy.chunk_size // 2), (prompt.holder, prompt.known)
        holder = self.library.read_on(prompt.ids[:end], known, prompt.base, cancelled)
        return replace(prompt, holder=holder, known=end, read=end - prompt.known)

    def _prompt(self, ids: list[int], base: Entry | None) -> Prompt:
        if not ids:
            raise Refusal(400, "prompt is empty; write what is to be continued", param="prompt")
        holder, known = self.library.longest(ids[:-1], base)
        # What follows units that lie apart, up to a chunk before the last position, leaves an answer its place.
        chunk, end = self.lm.policy.chunk_size, 0 if holder is None else holder.end
        most = min(chunk, max(self.lm.backbone.max_positions - end - LONGEST_ANSWER, chunk // 2))
        return Prompt(ids, base, holder, known, len(ids) - known > most)

    def _written(self, request: Conversation) -> list[int]:
        """Return a conversation as the template writes it."""
        if self.lm.template != "chat":
            _check_plain(request)
        with _refused("messages"):
            messages = [_as_template_takes(one) for one in request.messages]
            given = [one.model_dump(exclude_none=True) for one in request.callable]
            return self.lm.prompt(messages, given).ids

    def _ids_after(self, named: Entry, request: Conversation) -> list[int]:
        """Return the ids of turns that follow a context, as `locret.Chat` would read and write them."""
        _check_plain(request)
        talk = _conversation(named)
        stream, transcript, ids = talk.stream, talk.transcript, list(talk.unread)
        system, turns = _opened(request.messages)
        if system and system != transcript.system:
            # What the context was read with stays as it was read, so the message comes first in what follows.
            turns[0] = (turns[0][0], f"{system}\n\n{turns[0][1]}")
        for role, text in turns:
            if role == "assistant":
                ids += stream.rest(transcript.text(text))
                transcript.answered(text)
                stream.context = text[-stream.margin :]
                continue
            if not text.strip():
                raise Refusal(400, "messages has a user's turn without text; write a question", param="messages")
            with _refused("messages"):
                ids += stream.rest(transcript.ask(text))
        return ids

    def _text_ids(self, prompt: str | list[int], named: Entry | None) -> list[int]:
        """Return the ids of a prompt as it is, or of what follows a context."""
        if not isinstance(prompt, str):
            if (worst := max(prompt)) >= self._vocabulary:
                why = (
                    f"prompt has the token id {worst}, and this backbone has {self._vocabulary}; use its own tokenizer"
                )
                raise Refusal(400, why, param="prompt")
            return prompt
        if named is None:
            return [*leading_special_ids(self.lm.tokenizer), *TokenStream(self.lm.tokenizer).rest(prompt)]
        talk = _conversation(named)
        return [*talk.unread, *talk.stream.rest(prompt)]


@contextmanager
def _refused(param: str) -> Iterator[None]:
    """Refuse what a field says, in the words of the library."""
    try:
        yield
    except ValueError as error:
        raise Refusal(400, one_line(error), param=param) from None


def _conversation(named: Entry) -> Talk:
    """Return how a context goes on, for the caller to change."""
    assert named.talk is not None
    return named.talk.copy()


def _role(message: Message) -> str:
    return "system" if message.role == "developer" else message.role


def _check_plain(request: Conversation) -> None:
    """Refuse what only a tokenizer's own chat template could write, in front of the conversation."""
    tools = bool(request.callable)
    if tools or any(one.role == "tool" or one.tool_calls for one in request.messages):
        why = "the first turn has been read with the context, or the server has no chat template; leave them out"
        raise Refusal(400, f"tools have no effect here: {why}", param="tools" if tools else "messages")


def _opened(messages: Sequence[Message]) -> tuple[str, list[tuple[str, str]]]:
    """Return the system message and the turns after it: user and assistant in turns, a user's first and last."""
    opens = [_role(one) == "system" for one in messages]
    turns = [(_role(one), one.text) for one in messages[sum(opens) :]]
    expected = [("user", "assistant")[nth % 2] for nth in range(len(turns))]
    if [role for role, _ in turns] != expected or len(turns) % 2 == 0 or opens != sorted(opens, reverse=True):
        why = "are an optional system message and then user and assistant in turns, the last one a user's"
        raise Refusal(400, f"messages about a context {why}; put them in that order", param="messages")
    return "\n\n".join(one.text for one in messages[: sum(opens)]), turns


def _as_template_takes(message: Message) -> dict[str, Any]:
    """Return a message as chat templates expect it: texts as texts, the arguments of calls as objects."""
    taken = {**message.model_dump(exclude_none=True), "role": _role(message), "content": message.text}
    for call in taken.get("tool_calls", ()):
        with suppress(ValueError, RecursionError):  # stays the text that it is
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return taken
