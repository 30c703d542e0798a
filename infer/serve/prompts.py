"""What a request asks, as token ids: the whole prompt, or what follows a context, and what of it has to be read first.

A prompt longer than a chunk is read into a context in bounded memory, all but its end, which is the question. Contexts
are found by the tokens they have read, so a conversation that goes on, or a long text that is asked again, is read
only where it is new.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from locret.base.fields import Refusal as SettingRefusal
from locret.base.fields import shown
from locret.cache.cache_file import check_header
from locret.conversation.protect import USER, Turn, kept_turns
from locret.conversation.text import TokenStream, leading_special_ids
from locret.conversation.turns import Talk, saved_talk, written
from locret.infer.serve.index import Entry
from locret.infer.serve.kept import positions_of
from locret.infer.serve.library import Library
from locret.infer.serve.refusal import Refusal, one_line
from locret.infer.serve.schemas import ChatRequest, CompletionRequest, Message
from locret.policy.protection import Span, clipped, spans_from
from locret.token_ids import vocabulary

if TYPE_CHECKING:
    from locret.conversation.model import LongContextModel

_ROLES = {"developer": "system"}
_REMEMBERED = 64
"""Conversations of contexts that are remembered; each is a few kilobytes."""


@dataclass(frozen=True)
class Prompt:
    """A prompt as token ids, and what of it has been read: first as it was asked, then as an engine is asked."""

    ids: list[int]
    """Those after the context that was named, if one was."""
    base: Entry | None
    """That context, or what holds fewer of its units."""
    holder: Entry | None
    """What has read the first of the ids. Its prefix is loaded only when an engine takes it: many prompts may wait."""
    known: int
    """How many of them it has read."""
    long: bool
    """Whether more has to be read before the prompt can be answered."""
    turns: tuple[Turn, ...] = ()
    """Where the messages are, where that is asked for."""
    spans: tuple[Span, ...] = ()
    """What of them is protected."""
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
        self._saved: OrderedDict[tuple[Path, int, int], Talk] = OrderedDict()

    def of_chat(self, request: ChatRequest, cancelled: Callable[[], bool] = lambda: False) -> list[Prompt]:
        """Return the prompt of a conversation; `cancelled` is asked while a smaller context is made for it."""
        named, base = self._base(request.context, request.budget, cancelled)
        if named is None:
            return [self._prompt(*self._written(request))]
        if request.protect:
            raise Refusal(
                400,
                f"protect comes too late for context {named.name}, which has been read; give it when the text is "
                "uploaded, or leave it out",
                param="protect",
            )
        turns = self._turns_of(named) if request.kept else ()
        return [self._prompt(self._ids_after(named, request), turns, base=base)]

    def of_completion(self, request: CompletionRequest, cancelled: Callable[[], bool] = lambda: False) -> list[Prompt]:
        """Return the prompts of a completion; as `of_chat`."""
        named, base = self._base(request.context, request.budget, cancelled)
        return [self._prompt(self._text_ids(prompt, named), base=base) for prompt in request.prompts]

    def shrinks(self, request: ChatRequest | CompletionRequest) -> bool:
        """Return whether a smaller context has to be made for a request, which takes long."""
        name, budget = request.context, request.budget
        return name is not None and budget is not None and not self.library.has_shrunk(name, budget)

    def settled(self, prompt: Prompt, cancelled: Callable[[], bool]) -> Prompt:
        """Return a prompt of which all but a question's length has been read; `cancelled` is asked between chunks."""
        if not prompt.long:
            return prompt
        end, known = self._end(prompt.ids), (prompt.holder, prompt.known)
        protected = clipped(prompt.spans, end)
        holder = self.library.read_on(prompt.ids[:end], known, prompt.base, cancelled, protected)
        return replace(prompt, holder=holder, known=end, read=end - prompt.known)

    def kept(self, prompt: Prompt) -> list[dict[str, Any]]:
        """Return what stayed of each message of a prompt that has been settled."""
        rest = torch.arange(prompt.tokens - len(prompt.rest), prompt.tokens)
        heads, spans = [rest], prompt.spans
        if prompt.holder is not None:
            try:
                if prompt.base is not None:
                    state = check_header(prompt.holder.path, self.lm.model, self.lm.scorer)
                    rows = spans_from(state.get("protected", []))
                    spans = clipped(rows[0] if rows else (), prompt.base.tokens)
                held = [head for layer in positions_of(prompt.holder.path) for head in layer]
            except (ValueError, OSError, SafetensorError) as error:
                raise Refusal(409, "the context was deleted meanwhile; ask again", param="context") from error
            heads = [torch.cat([head[head >= 0].long(), rest]) for head in held]
        return [asdict(one) for one in kept_turns(heads, prompt.turns, prompt.tokens, spans)]

    def _base(
        self, name: str | None, budget: int | None, cancelled: Callable[[], bool]
    ) -> tuple[Entry | None, Entry | None]:
        """Return the context that is named, and what holds its units or as many of them as the budget says."""
        if name is None:
            if budget is not None:
                raise Refusal(400, f"budget {budget} has no effect without a context; name one", param="budget")
            return None, None
        named = self.library.get(name)
        small = budget is not None and budget < named.units
        return named, self.library.shrunk(name, budget or 0, cancelled) if small else named

    def _prompt(
        self, ids: list[int], turns: tuple[Turn, ...] = (), spans: tuple[Span, ...] = (), base: Entry | None = None
    ) -> Prompt:
        holder, known = self.library.longest(ids[:-1], base, spans)
        prompt = Prompt(ids, base, holder, known, len(ids) - known > self.lm.policy.chunk_size, turns, spans)
        if prompt.long and spans:
            try:
                self.lm.new_cache().check_room((clipped(spans, self._end(ids)),))
            except ValueError as error:
                raise Refusal(400, str(error), param="protect") from None
        return prompt

    def _end(self, ids: Sequence[int]) -> int:
        """Return how many tokens of a long prompt are read; the others are the question."""
        return len(ids) - max(1, self.lm.policy.chunk_size // 2)

    # -- without a context --------------------------------------------------------------------------------------------

    def _written(self, request: ChatRequest) -> tuple[list[int], tuple[Turn, ...], tuple[Span, ...]]:
        """Return a conversation as the template writes it, and where its messages are if that is asked for."""
        plain, places = self.lm.template != "chat", bool(request.protect or request.kept)
        if plain:
            _check_plain(request)
        tools = (
            [] if request.tool_choice == "none" else [one.model_dump(exclude_none=True) for one in request.tools or ()]
        )
        messages = [_as_template_takes(one) for one in request.messages]
        try:
            prompt = written(self.lm.tokenizer, self.lm.template, messages, [] if plain else tools, places=places)
            spans = prompt.spans(*request.protect) if request.protect else []
        except ValueError as error:
            said = _said(error)
            places = places and not said.startswith(("tools ", "the tokenizer's chat template refuses"))
            param = "tools" if said.startswith("tools ") else "messages"
            raise Refusal(400, said, param=("protect" if request.protect else "kept") if places else param) from None
        return prompt.ids, prompt.turns, tuple(spans)

    # -- after a context ----------------------------------------------------------------------------------------------

    def _ids_after(self, named: Entry, request: ChatRequest) -> list[int]:
        """Return the ids of turns that follow a context, as `locret.Chat` would read and write them."""
        _check_plain(request)
        talk = self._conversation(named)
        stream, transcript, ids = talk.stream, talk.transcript, list(talk.unread)
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
                raise Refusal(400, _said(error), param="messages") from None
        return ids

    def _turns_of(self, named: Entry) -> tuple[Turn, ...]:
        """Return the turns of a context, and what follows it as one."""
        with _usable(named):
            before = saved_talk(named.path, self.lm.tokenizer, self._vocabulary).protection.turns
        if before is None:
            raise Refusal(
                409,
                f"context {named.name} was read by an earlier version, which did not say where its messages are; read "
                "it again, or leave kept out",
                param="kept",
            )
        ended = (turn if turn.end is not None else turn._replace(end=named.tokens) for turn in before)
        return (*ended, Turn(USER, named.tokens, None))

    def _conversation(self, named: Entry) -> Talk:
        """Return how a context goes on, for the caller to change."""
        with _usable(named):
            file = named.path.stat()
            key = (named.path, file.st_mtime_ns, file.st_size)
            if (saved := self._saved.pop(key, None)) is None:
                saved = saved_talk(named.path, self.lm.tokenizer, self._vocabulary)
        self._saved[key] = saved
        while len(self._saved) > _REMEMBERED:
            with suppress(KeyError):  # another thread was first
                self._saved.popitem(last=False)
        return saved.copy()

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
            ids = [*leading_special_ids(self.lm.tokenizer), *TokenStream(self.lm.tokenizer).rest(prompt)]
        else:
            talk = self._conversation(named)
            ids = [*talk.unread, *talk.stream.rest(prompt)]
        if not ids:
            raise Refusal(400, "prompt is empty; write what is to be continued", param="prompt")
        return ids


@contextmanager
def _usable(named: Entry) -> Iterator[None]:
    """Refuse what needs the file of a context if that cannot be read."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise Refusal(409, f"the context {shown(named.name)} cannot be used: {error}", param="context") from None


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
    """Return the system message and the turns after it: user and assistant in turns, a user's first and last."""
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


def _said(error: ValueError) -> str:
    """Return why a conversation cannot be written, without the options of commands that are no field here."""
    if isinstance(error, SettingRefusal) and error.setting == "template":
        return f"the tokenizer's chat template {one_line(error.rule).partition(';')[0]}; change messages"
    said = one_line(error)
    return f"{said.removesuffix('them')}messages" if said.endswith("; change them") else said
