"""A conversation as text and as tokens: what the template writes of each message, and where that is.

Three templates:
    chat      the tokenizer's own chat template, which writes its special tokens itself
    original  the one-shot format the original heads were trained on, whatever the backbone (fastchat's `one_shot`)
    none      the texts as they are, one after the other

A document is part of the first user turn, in front of the first question, and is itself never held: a mark stands for
it. What a turn adds is what the template writes after that mark, or after the last answer, up to where the assistant
speaks. So template tokens are right whatever the template does between turns. Templates that write earlier turns
otherwise once a conversation goes on (they move the system message, or drop reasoning) contradict what has been read;
that is said once.
"""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from locret.base.fields import Refusal
from locret.base.warned import warn_user
from locret.cache.cache_file import CONTEXT_WRITERS, read_notes
from locret.conversation.document import TokenStream, as_text, encode, is_text, leading_special_ids, shared
from locret.conversation.protect import SYSTEM, TEMPLATES, Protection, protection_from

ORIGINAL_SYSTEM = (
    "A chat between a curious human and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the human's questions."
)
ORIGINAL_ROLES = {"user": "Human", "assistant": "Assistant"}
_NEXT = "\n### "
# Letters and digits only, so that no template trims, escapes or rewrites them.
MARK, ANSWER = "LocretDocument7f3a9c", "LocretAnswer7f3a9c"


class Message(NamedTuple):
    """One turn of a chat; `role` is user, assistant or system."""

    role: str
    content: str


def check_template(tokenizer: PreTrainedTokenizerBase, template: str) -> None:
    """Refuse a template that does not exist or that the tokenizer does not have."""
    if template not in TEMPLATES:
        raise Refusal("template", template, f"is unknown; choose one of {', '.join(TEMPLATES)}")
    if template == "chat" and not tokenizer.chat_template:
        raise Refusal("template", "chat", "is what the tokenizer does not have; use original or none")


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], template: str, answer: str | None = None
) -> str:
    """Render messages up to where the assistant answers, or with that answer and what ends its turn."""
    if template != "chat":
        begun = beginning(messages, template)
        if template == "none":
            return begun + (answer or "")
        opened = f"{begun}{_NEXT}Assistant:"
        return opened if answer is None else f"{opened} {answer}{_NEXT}"
    chat = [message._asdict() for message in messages]
    if answer is not None:
        chat.append({"role": "assistant", "content": answer})
    try:
        return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=answer is None))
    except Exception as error:  # whatever a stranger's template does
        roles = ", ".join(message.role for message in messages)
        raise Refusal("template", "chat", f"refuses turns of {roles} ({error}); use original or none") from None


def beginning(messages: Sequence[Message], template: str) -> str:
    """Return what the template "original" or "none" writes of the first messages of a conversation."""
    if template == "none":
        return "\n".join(message.content for message in messages)
    # `one_shot` of fastchat 0.2.36 without its example, as the original label script falls back to.
    system = "\n".join(message.content for message in messages if message.role == "system") or ORIGINAL_SYSTEM
    return _NEXT.join([system, *(f"{ORIGINAL_ROLES[m.role]}: {m.content}" for m in messages if m.role != "system")])


def vocabulary_fingerprint(tokenizer: PreTrainedTokenizerBase, *, filled: bool = False) -> str:
    """Return a CRC-32 of which text each token stands for: ids mean the same to tokenizers that share it.

    What llama.cpp fills a GGUF file's vocabulary with counts only if `filled`.
    """
    tokens = ((text, one) for text, one in tokenizer.get_vocab().items() if filled or text != f"[PAD{one}]")
    return f"{zlib.crc32(json.dumps(sorted(tokens, key=lambda entry: entry[::-1])).encode()):08x}"


def turns_fingerprint(tokenizer: PreTrainedTokenizerBase, template: str) -> str:
    """Return a CRC-32 of what a template writes between turns; what stands before the first is read, a date perhaps."""
    talk = (Message("user", MARK), Message("assistant", "an answer"), Message("user", "another"))
    text = ""
    for said in ((Message(SYSTEM, "a rule"), talk[0]), talk[:1], talk):  # what a template takes of them
        with suppress(Refusal):
            text = render(tokenizer, said, template)
    return f"{zlib.crc32(text.partition(MARK)[2].encode()):08x}"


@dataclass
class Transcript:
    """The turns about a document, and what each adds."""

    tokenizer: PreTrainedTokenizerBase
    """Gives the chat template."""
    template: str
    """One of `TEMPLATES`."""
    system: str | None = None
    """System message; the template's own default if None. Where a template has no such role, it opens the first user
    turn."""
    turns: tuple[Message, ...] = ()
    """What was said before: user and assistant in turns."""
    raw: bool = False
    """Whether what spells a special token becomes one, wherever it stands: then a document can end the user's turn and
    speak for the system."""

    def __post_init__(self) -> None:
        check_template(self.tokenizer, self.template)

    def text(self, words: str) -> str:
        """Return words of a message or a document as they are to be tokenised."""
        return words if self.raw else as_text(self.tokenizer, words)

    @property
    def special(self) -> list[int]:
        """The token ids before all text; a chat template writes its own."""
        return leading_special_ids(self.tokenizer) if self.template != "chat" else []

    def opening(self) -> str:
        """Return the text before the document."""
        return self.around(None)[0]

    def system_tokens(self) -> int:
        """Return how many tokens come before the document as the system turn; 0 where nothing is written of one."""
        if self.system is None:
            return 0
        opening, said, before = self.opening(), self.text(self.system), None
        with suppress(Exception):  # whatever a stranger's template does
            one = Message(SYSTEM, said)
            if self.template == "chat":
                before = str(self.tokenizer.apply_chat_template([one._asdict()], tokenize=False))
            else:
                before = beginning([one], self.template)
        if before is not None and opening.startswith(before):
            end = len(before) if said.strip() in before else 0
        elif (found := opening.find(said.strip())) >= 0 and said.strip():
            end = found + len(said.strip())
        else:  # the template writes nothing of it
            return 0
        # The document's first word may be joined with what is in front of it.
        ids = encode(self.tokenizer, opening + "A")
        return len(self.special) + shared(encode(self.tokenizer, opening[:end]), ids) if end else 0

    def around(self, question: str | None) -> tuple[str, str]:
        """Return the text before and after the document, up to where the assistant answers the question about it."""
        text = self._render((Message("user", MARK if question is None else f"{MARK}\n\n{question}"),))
        before, mark, after = text.partition(MARK)
        if not mark or after.count(MARK) != (question or "").count(MARK):
            rule = "writes the user's text twice or not at all, so no document can be streamed through it"
            raise Refusal("template", self.template, f"{rule}; use original or none")
        return before, after

    def ask(self, text: str | None) -> str:
        """Take a user's turn and return what it adds, up to where the assistant answers.

        Args:
            text: What is asked; None: the document is the whole first turn.
        """
        first = MARK if text is None else f"{MARK}\n\n{text}"
        turns = (*self.turns, Message("user", text or "" if self.turns else first))
        if not self.turns:
            before, added = self.around(text)
            agrees = before == self.opening()
        else:
            mark = ANSWER
            while any(mark in said.content for said in turns):
                mark += "0"
            before, _, added = self._render((*turns[:-2], Message("assistant", mark), turns[-1])).rpartition(mark)
            agrees = before.rstrip() == self._render(turns[:-2]).rstrip()
            agrees = agrees and self.text(turns[-2].content.strip()) in self._render(turns)
        if not agrees and self.template == "chat":
            warn_user(
                "the tokenizer's chat template writes earlier turns otherwise once a conversation goes on (it moves "
                "the system message, say, or drops reasoning); what has been read stays as it was read"
            )
        self.turns = turns
        return added

    def answered(self, text: str) -> None:
        """Take the assistant's turn; templates write white space around it themselves."""
        self.turns = (*self.turns, Message("assistant", text if self.template == "none" else text.strip()))

    def messages(self) -> list[dict[str, str]]:
        """Return the conversation as transformers takes it, without the document."""
        said = [turn._replace(content=turn.content.removeprefix(MARK).removeprefix("\n\n")) for turn in self.turns[:1]]
        system = [] if self.system is None else [Message("system", self.system)]
        return [message._asdict() for message in (*system, *said, *self.turns[1:])]

    def _render(self, turns: tuple[Message, ...]) -> str:
        turns = tuple(turn._replace(content=self.text(turn.content)) for turn in turns)
        if self.system is None:
            return render(self.tokenizer, turns, self.template)
        system = self.text(self.system)
        try:
            return render(self.tokenizer, (Message("system", system), *turns), self.template)
        except Refusal:
            first = turns[0]._replace(content=f"{system}\n\n{turns[0].content}")
            return render(self.tokenizer, (first, *turns[1:]), self.template)


@dataclass
class Talk:
    """How a text that has been read goes on: what waits, what was said, what it is called, what is protected."""

    stream: TokenStream
    transcript: Transcript
    name: str
    protection: Protection = Protection()
    unread: tuple[int, ...] = ()
    """Tokens of the last answer that the cache does not hold yet."""
    ids: array[int] | None = None
    """Tokens that the cache has read; None where a file, which holds a digest of them, does not say."""

    def read(self, ids: Iterable[int]) -> None:
        """Take down what has been read; copies are not changed."""
        if self.ids is not None:
            self.ids = self.ids + array("i", ids)

    def copy(self) -> Talk:
        """Return one that goes its own way."""
        return replace(self, stream=replace(self.stream), transcript=replace(self.transcript))

    def notes(self, **more: Any) -> dict[str, Any]:
        """Return what a file holds of it, for `saved_talk`."""
        script = self.transcript
        held: dict[str, Any] = {"name": self.name, "context": self.stream.context, "pending": self.stream.pending}
        held |= self.protection.data()
        held |= {"tokenizer": vocabulary_fingerprint(self.stream.tokenizer)}
        held |= {"between_turns": turns_fingerprint(self.stream.tokenizer, script.template)}
        held |= {"template": script.template, "system": script.system, "turns": [list(turn) for turn in script.turns]}
        return {"conversation": {**held, "unread": list(self.unread), **more}}


def saved_talk(path: str | Path, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> Talk:
    """Return how a saved context or conversation goes on, without its units."""
    if (notes := read_notes(path, CONTEXT_WRITERS).get("conversation")) is None:
        raise ValueError(f"{path} was not saved by a context or a chat; read it with locret.load_cache")
    protection = checked_notes(notes, path, vocabulary)
    # Files of earlier versions do not say, or count what fills the vocabulary.
    made = notes.get("tokenizer")
    if made is not None and all(made != vocabulary_fingerprint(tokenizer, filled=filled) for filled in (False, True)):
        raise ValueError(f"{path} was made with another tokenizer, to which its text is other tokens; use that one")
    turns = tuple(Message(role, content) for role, content in notes["turns"])
    transcript = Transcript(tokenizer, notes["template"], notes["system"], turns)
    if notes.get("between_turns", ours := turns_fingerprint(tokenizer, notes["template"])) != ours:
        raise ValueError(
            f"{path} was read with a chat template that writes other marks between turns than this tokenizer's; "
            "give the tokenizer that one (chat_template), or read the text again"
        )
    stream = TokenStream(tokenizer, context=notes["context"], pending=notes["pending"])
    return Talk(stream, transcript, notes["name"], protection, tuple(notes["unread"]))


def checked_notes(notes: Any, path: str | Path, vocabulary: int) -> Protection:
    """Return what notes say of protection; refuse what a context would not have written."""
    why: Any = "its conversation is none that was written"
    try:
        context, pending, turns, system = (notes[name] for name in ("context", "pending", "turns", "system"))
        said = [text for _, text in turns]
        texts = [notes["name"], notes["template"], context, pending, "" if system is None else system, *said]
        roles = ["user", "assistant"] * (len(turns) // 2)
        if (
            all(map(is_text, texts))
            and max(len(context), len(pending)) <= TokenStream.LONGEST_PENDING
            and [role for role, _ in turns] == roles
            and all(type(one) is int and 0 <= one < vocabulary for one in notes["unread"])
        ):
            return protection_from(notes)
    except KeyError as error:
        why = f"its conversation has no {error}"
    except (TypeError, ValueError) as error:
        why = error
    raise ValueError(f"{path} is damaged: {why}; save it again")


class Written(NamedTuple):
    """A conversation as a template writes it."""

    ids: list[int]
    """Its token ids, up to where the assistant answers."""


def written(
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    raw: bool = False,
) -> list[int]:
    """Return the token ids of a conversation as a template writes it, up to where the assistant answers."""
    if not messages or not all(isinstance(one, Mapping) and "role" in one for one in messages):
        raise ValueError("messages are no conversation; give a list of {'role': ..., 'content': ...}")

    def begun(tools: Any = None) -> str:
        if template == "chat":
            how: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
            return str(tokenizer.apply_chat_template(list(messages), tools=tools or None, **how))
        return render(tokenizer, [Message(one["role"], str(one.get("content") or "")) for one in messages], template)

    if tools and template != "chat":
        raise ValueError(f"tools have no effect with template={template}; leave them out, or use the chat template")
    try:
        if not raw:
            messages, tools = _as_text(tokenizer, list(messages)), _as_text(tokenizer, tools)
        whole, without = begun(tools), begun() if tools else None
    except Exception as error:  # whatever a stranger's template does
        raise ValueError(f"the tokenizer's chat template refuses these messages ({error}); change them") from error
    if whole == without:
        raise ValueError("tools have no effect, for this tokenizer's chat template does not write them; leave them out")
    return [*Transcript(tokenizer, template).special, *TokenStream(tokenizer).rest(whole)]


def _as_text(tokenizer: PreTrainedTokenizerBase, value: Any) -> Any:
    """Return what a template is given, in which no text spells a special token: the template alone writes those."""
    if isinstance(value, str):
        return as_text(tokenizer, value)
    if isinstance(value, Mapping):
        return {_as_text(tokenizer, name): _as_text(tokenizer, one) for name, one in value.items()}
    return [_as_text(tokenizer, one) for one in value] if isinstance(value, (list, tuple)) else value
