"""What a request asks, as token ids: the whole prompt, or what follows a context, and what of it has to be read first.

A prompt longer than a chunk is read into a context in bounded memory, all but its end, which is the question. Contexts
are found by the tokens they have read, so a conversation that goes on, or a long text that is asked again, is read
only where it is new.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from locret.cache.cache_file import check_header
from locret.conversation import templates
from locret.conversation.prompt import Prompt as MessagePrompt
from locret.conversation.prompt import prompt_of
from locret.conversation.rules import USER
from locret.conversation.saved_turns import saved_protection, saved_turns
from locret.conversation.templates import leading_special_ids, render
from locret.conversation.text_stream import TokenStream, token_stream
from locret.conversation.transcript import Transcript
from locret.conversation.turns import Turn, kept_turns
from locret.field_values import shown
from locret.infer.serve.kept import positions_of
from locret.infer.serve.refusal import Refusal
from locret.infer.serve.schemas import ChatRequest, CompletionRequest, Message
from locret.policy.protection import Span, clipped, spans_from
from locret.token_ids import vocabulary

if TYPE_CHECKING:
    from locret.conversation.long_context_model import LongContextModel
    from locret.infer.serve.entry import Entry
    from locret.infer.serve.library import Library

_ROLES = {"developer": "system"}
_REMEMBERED = 64
"""Conversations of contexts that are remembered; each is a few kilobytes."""
_Conversation = tuple[TokenStream, Transcript, tuple[int, ...]]
"""How a context goes on: its last words without tokens, what was said, and tokens that its units do not hold."""
_FLAGS = re.compile(r"^--template \w+: |; use --template.*$", re.DOTALL)


@dataclass(frozen=True)
class Draft:
    """A prompt as token ids, and what of it has been read."""

    ids: list[int]
    """Those after the context that was named, if one was."""
    base: Entry | None
    """That context."""
    found: Entry | None
    """What has read a beginning of the ids."""
    known: int
    """How many of them it has read."""
    long: bool
    """Whether more has to be read before the prompt can be answered."""
    turns: tuple[Turn, ...] = ()
    """Where the messages are, where that is asked for."""
    spans: tuple[Span, ...] = ()
    """What of them is protected."""

    def protected(self, tokens: int) -> tuple[Span, ...]:
        """Return what is protected of the first tokens."""
        return clipped(self.spans, tokens)


@dataclass(frozen=True)
class Prompt:
    """What an engine is asked, and what it took to get there."""

    ids: tuple[int, ...]
    """Token ids that follow the prefix."""
    holder: Entry | None
    """What has read all before them. Its prefix is loaded only when an engine takes it: many prompts may wait."""
    tokens: int
    """Tokens of the whole prompt."""
    read: int
    """Tokens of it that were read for this request."""
    cached: int
    """Tokens of it that had been read before."""

    @property
    def units(self) -> int:
        """Units per KV head of the prefix."""
        return 0 if self.holder is None else self.holder.units


class Prompts:
    """Makes prompts of requests. Its methods block and may be called from any thread.

    Args:
        lm: Gives the tokenizer, the template and the size of a chunk.
        contexts: What has been read.
    """

    def __init__(self, lm: LongContextModel, contexts: Library) -> None:
        self.lm, self.contexts = lm, contexts
        self._special = leading_special_ids(lm.tokenizer)
        self._vocabulary = vocabulary(lm.model) or len(lm.tokenizer)
        self._saved: OrderedDict[tuple[Path, int, int], _Conversation] = OrderedDict()

    def of_chat(self, request: ChatRequest, cancelled: Callable[[], bool] = lambda: False) -> list[Draft]:
        """Return the prompt of a conversation.

        Args:
            request: The conversation.
            cancelled: Asked while a smaller context is made for it, which ends if it returns True.

        Raises:
            Refusal: If there is no such context, or the template cannot write the conversation.
        """
        named, base = self._base(request.context, request.budget, cancelled)
        if named is not None:
            if request.protect:
                raise Refusal(
                    400,
                    f"protect comes too late for context {named.name}, which has been read; give it when the text is "
                    "uploaded, or leave it out",
                    param="protect",
                )
            turns = self._turns_of(named) if request.kept else ()
            return [self._draft(self._ids_after(named, request), base, turns)]
        if not request.protect and not request.kept:
            return [self._draft(self._chat_ids(request), base)]
        try:
            prompt = self._prompt(request)
            spans = prompt.spans(*(request.protect or ()))
        except ValueError as error:
            raise Refusal(400, str(error), param="protect" if request.protect else "kept") from None
        turns = (*prompt.turns, *([] if prompt.tools is None else [prompt.tools]))
        return [self._draft(prompt.ids, base, turns, tuple(spans))]

    def of_completion(self, request: CompletionRequest, cancelled: Callable[[], bool] = lambda: False) -> list[Draft]:
        """Return the prompts of a completion; arguments as for `of_chat`.

        Raises:
            Refusal: If there is no such context, or a prompt is none.
        """
        named, base = self._base(request.context, request.budget, cancelled)
        return [self._draft(self._text_ids(prompt, named), base) for prompt in request.prompts]

    def shrinks(self, request: ChatRequest | CompletionRequest) -> bool:
        """Return whether a smaller context has to be made for a request, which takes long.

        Raises:
            Refusal: If there is no such context.
        """
        name, budget = request.context, request.budget
        return name is not None and budget is not None and not self.contexts.has_shrunk(name, budget)

    def _base(
        self, name: str | None, budget: int | None, cancelled: Callable[[], bool]
    ) -> tuple[Entry | None, Entry | None]:
        """Return the context that is named, and what holds its units or as many of them as the budget says."""
        if name is None:
            if budget is not None:
                raise Refusal(400, f"budget {budget} has no effect without a context; name one", param="budget")
            return None, None
        named = self.contexts.get(name)
        if budget is None or budget >= named.units:
            return named, named
        return named, self.contexts.shrunk(name, budget, cancelled)

    def _draft(
        self, ids: list[int], base: Entry | None, turns: tuple[Turn, ...] = (), spans: tuple[Span, ...] = ()
    ) -> Draft:
        found, known = self.contexts.longest(ids[:-1], base, spans)
        draft = Draft(ids, base, found, known, len(ids) - known > self.lm.policy.chunk_size, turns, spans)
        if draft.long and spans:
            try:
                self.lm.new_cache().check_room((draft.protected(self._end(draft)),))
            except ValueError as error:
                raise Refusal(400, str(error), param="protect") from None
        return draft

    def _end(self, draft: Draft) -> int:
        """Return how many tokens of a long prompt are read; the others are the question."""
        return len(draft.ids) - max(1, self.lm.policy.chunk_size // 2)

    def kept(self, draft: Draft, prompt: Prompt) -> list[dict[str, Any]]:
        """Return what stayed of each message of a prompt that has been settled; blocks.

        Raises:
            Refusal: If the file of what was read is gone.
        """
        rest = torch.arange(prompt.tokens - len(prompt.ids), prompt.tokens)
        heads, spans = [rest], draft.spans
        if prompt.holder is not None:
            try:
                if draft.base is not None:
                    rows = spans_from(self._header(prompt.holder).get("protected", []))
                    spans = clipped(rows[0] if rows else (), draft.base.tokens)
                held = [head for layer in positions_of(prompt.holder.path) for head in layer]
            except (ValueError, OSError, SafetensorError) as error:
                raise Refusal(409, "the context was deleted meanwhile; ask again", param="context") from error
            heads = [torch.cat([head[head >= 0].long(), rest]) for head in held]
        return [asdict(one) for one in kept_turns(heads, draft.turns, prompt.tokens, spans)]

    def _header(self, entry: Entry) -> dict[str, Any]:
        return check_header(entry.path, self.lm.model, self.lm.scorer)

    def settled(self, draft: Draft, cancelled: Callable[[], bool]) -> Prompt:
        """Return what an engine is asked, once all but a question's length of the prompt has been read.

        Args:
            draft: The prompt.
            cancelled: Asked between chunks; reading ends if it returns True.

        Raises:
            Refusal: If the text cannot be read now.
        """
        ids, base, found, known, read = draft.ids, draft.base, draft.found, draft.known, 0
        if draft.long:
            end = self._end(draft)
            found = self.contexts.read_on(ids[:end], (found, known), base, cancelled, draft.protected(end))
            known, read = end, end - known
        before = 0 if base is None else base.tokens
        return Prompt(
            ids=tuple(ids[known:]),
            holder=found or base,
            tokens=before + len(ids),
            read=read,
            cached=before + known - read,
        )

    # -- without a context --------------------------------------------------------------------------------------------

    def _chat_ids(self, request: ChatRequest) -> list[int]:
        text = self._rendered(request)
        special = [] if self.lm.template == "chat" else self._special
        return [*special, *_encoded(self.lm.tokenizer, text)]

    def _prompt(self, request: ChatRequest) -> MessagePrompt:
        """Return the prompt of a conversation, with the places of its messages.

        Raises:
            ValueError: If they cannot be found.
            Refusal: If the template cannot write the conversation.
        """
        text, plain = self._rendered(request), self.lm.template != "chat"
        messages = [_as_template_takes(one) for one in request.messages]
        tools = (
            []
            if plain or request.tool_choice == "none"
            else [one.model_dump(exclude_none=True) for one in request.tools or ()]
        )

        def beginning(count: int) -> str | None:
            if plain:
                return templates.beginning(_plain_turns(request)[:count], self.lm.template)
            with suppress(Exception):  # whatever a stranger's template does
                return str(
                    self.lm.tokenizer.apply_chat_template(
                        messages[:count], tools=tools or None, tokenize=False, add_generation_prompt=False
                    )
                )
            return None

        return prompt_of(
            self.lm.tokenizer,
            text,
            messages,
            beginning,
            special=self._special if plain else (),
            without_tools=self._templated(messages, None) if tools else None,
        )

    def _rendered(self, request: ChatRequest) -> str:
        if self.lm.template != "chat":
            _check_plain(request)
            return render(self.lm.tokenizer, _plain_turns(request), self.lm.template)
        messages = [_as_template_takes(one) for one in request.messages]
        text = self._templated(messages, None)
        if not request.tools or request.tool_choice == "none":
            return text
        with_tools = self._templated(messages, [tool.model_dump(exclude_none=True) for tool in request.tools])
        if with_tools == text:
            raise Refusal(
                400,
                "tools have no effect, for this backbone's chat template does not write them; leave them out",
                param="tools",
            )
        return with_tools

    def _templated(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        try:
            text = self.lm.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # whatever a stranger's template does
            roles = ", ".join(message["role"] for message in messages[:8])
            raise _refused_by_template(f"turns of {roles}", error) from None
        return str(text)

    # -- after a context ----------------------------------------------------------------------------------------------

    def _ids_after(self, named: Entry, request: ChatRequest) -> list[int]:
        """Return the ids of turns that follow a context, as `locret.Chat` would read and write them."""
        _check_plain(request)
        stream, transcript, unread = self._conversation(named)
        ids = list(unread)
        system, turns = _opened(request.messages)
        if system and system != transcript.system:
            # What the context was read with stays as it was read, so the message comes first in what follows.
            turns[0] = (turns[0][0], f"{system}\n\n{turns[0][1]}")
        for role, text in turns:
            if role == "assistant":
                ids += stream.rest(text)
                transcript.answered(text)
                stream.context = text[-stream.margin :]
                continue
            if not text.strip():
                raise Refusal(400, "messages has a user's turn without text; write a question", param="messages")
            try:
                ids += stream.rest(transcript.ask(text))
            except ValueError as error:
                raise _refused_by_template("the turns", error) from None
        return ids

    def _turns_of(self, named: Entry) -> tuple[Turn, ...]:
        """Return the turns of a context, and what follows it as one."""
        try:
            before = saved_protection(named.path).turns
        except (ValueError, OSError) as error:
            raise Refusal(409, f"the context {shown(named.name)} cannot be used: {error}", param="context") from None
        if before is None:
            raise Refusal(
                409,
                f"context {named.name} was read by an earlier version, which did not say where its messages are; read "
                "it again, or leave kept out",
                param="kept",
            )
        ended = (turn if turn.end is not None else turn._replace(end=named.tokens) for turn in before)
        return (*ended, Turn(USER, named.tokens, None))

    def _conversation(self, named: Entry) -> _Conversation:
        """Return how a context goes on, for the caller to change."""
        try:
            file = named.path.stat()
            key = (named.path, file.st_mtime_ns, file.st_size)
            if (saved := self._saved.pop(key, None)) is None:
                stream, transcript, _, unread = saved_turns(named.path, self.lm.tokenizer, self._vocabulary)
                saved = stream, transcript, unread
        except (ValueError, OSError) as error:
            raise Refusal(409, f"the context {shown(named.name)} cannot be used: {error}", param="context") from None
        self._saved[key] = saved
        while len(self._saved) > _REMEMBERED:
            with suppress(KeyError):  # another thread was first
                self._saved.popitem(last=False)
        stream, transcript, unread = saved
        return stream.copy(), transcript.copy(), unread

    def _text_ids(self, prompt: str | list[int], named: Entry | None) -> list[int]:
        """Return the ids of a prompt as it is, or of what follows a context."""
        if not isinstance(prompt, str):
            if max(prompt) >= self._vocabulary:
                raise Refusal(
                    400,
                    f"prompt has the token id {max(prompt)}, which is not among the {self._vocabulary} of this "
                    "backbone; use its own tokenizer",
                    param="prompt",
                )
            return prompt
        if named is None:
            ids = [*self._special, *_encoded(self.lm.tokenizer, prompt)]
        else:
            stream, _, unread = self._conversation(named)
            ids = [*unread, *stream.rest(prompt)]
        if not ids:
            raise Refusal(400, "prompt is empty; write what is to be continued", param="prompt")
        return ids


def _encoded(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text of any size, window by window."""
    return [one for block in token_stream(tokenizer, [text], add_special_tokens=False) for one in block]


def _role(message: Message) -> str:
    return _ROLES.get(message.role, message.role)


def _check_plain(request: ChatRequest) -> None:
    """Refuse what only a tokenizer's own chat template could write, in front of the conversation."""
    if request.tools and request.tool_choice != "none":
        raise Refusal(
            400,
            "tools have no effect here: the first turn has been read with the context, or the server has no chat "
            "template; leave them out",
            param="tools",
        )
    for nth, message in enumerate(request.messages):
        if message.role == "tool" or message.tool_calls:
            raise Refusal(
                400,
                f"messages[{nth}] is about a tool, which only a backbone's chat template without a context can write; "
                "leave it out",
                param="messages",
            )


def _opened(messages: Sequence[Message]) -> tuple[str, list[tuple[str, str]]]:
    """Return the system message and the turns after it: user and assistant in turns, a user's first and last.

    Raises:
        Refusal: If they are in another order.
    """
    system = [one.text for one in messages if _role(one) == "system"]
    turns = [(_role(one), one.text) for one in messages if _role(one) != "system"]
    opens = [_role(one) == "system" for one in messages]
    expected = [("user", "assistant")[nth % 2] for nth in range(len(turns))]
    if [role for role, _ in turns] != expected or len(turns) % 2 == 0 or opens != sorted(opens, reverse=True):
        raise Refusal(
            400,
            "messages about a context are an optional system message and then user and assistant in turns, the last "
            "one a user's; put them in that order",
            param="messages",
        )
    return "\n\n".join(system), turns


def _plain_turns(request: ChatRequest) -> list[templates.Message]:
    return [templates.Message(_role(one), one.text) for one in request.messages]


def _as_template_takes(message: Message) -> dict[str, Any]:
    """Return a message as chat templates expect it: texts as texts, the arguments of calls as objects."""
    taken: dict[str, Any] = {"role": _role(message), "content": message.text}
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            taken[name] = value
    if message.tool_calls:
        taken["tool_calls"] = [call.model_dump() for call in message.tool_calls]
        for call in taken["tool_calls"]:
            with suppress(ValueError, RecursionError):  # stays the text that it is
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return taken


def _refused_by_template(what: str, error: Exception) -> Refusal:
    reason = shown(_FLAGS.sub("", str(error)))
    return Refusal(400, f"this backbone's chat template refuses {what}: {reason}; change messages", param="messages")
