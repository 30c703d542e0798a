"""A conversation with what has been read: each turn is added to one bounded cache and answered from it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from locret.base.fields import shown
from locret.cache.cache import RetentionCache
from locret.cache.cache_file import save_cache
from locret.cache.memory import CacheMemory
from locret.chunked_prefill import read_turn
from locret.conversation.document import Source, is_text
from locret.conversation.rules import ASSISTANT, USER, check_rules, rules_of
from locret.conversation.templates import decode, vocabulary_fingerprint
from locret.conversation.text_stream import TokenStream
from locret.conversation.transcript import Transcript
from locret.conversation.turns import NOTHING, KeptTurn, Protection
from locret.generation import generate
from locret.policy.protection import Span

if TYPE_CHECKING:
    from locret.conversation.long_context_model import LongContextModel

_SPEAKING = "this chat is answering; go on when that answer has ended, or with another chat of the same context"
LONGEST_ANSWER = 256
"""Tokens of an answer, unless the caller says otherwise."""


class AnswerStreamer(BaseStreamer):
    """Hands out an answer word by word as it is written, exactly as it would be decoded whole.

    transformers' TextStreamer starts afresh after every line, and tokenizers that write no space before a text's first
    word then drop the line's first space. Here the line's end stays as context.

    Args:
        tokenizer: The backbone's.
        write: Takes each new part of the text.
    """

    def __init__(self, tokenizer: Any, write: Callable[[str], object]) -> None:
        self.tokenizer, self.write = tokenizer, write
        self.ids: list[int] = []
        """Tokens of the current line, and the one that ended the line before."""
        self.written = 0
        """Characters of their text that have been handed out."""
        self.prompt_seen = False

    def put(self, value: Tensor) -> None:
        """Receive new token ids, (1,), after the prompt's, (1, n), which are skipped."""
        if not self.prompt_seen:
            self.prompt_seen = True
            return
        self.ids.extend(value.flatten().tolist())
        text = decode(self.tokenizer, self.ids)
        # What follows the last space may be half a word, or half a character; scripts without spaces have whole ones.
        whole = text.endswith("\n") or _writes_no_spaces(text[-1:])
        self._hand_out(text, len(text) if whole else text.rfind(" ") + 1)
        if text.endswith("\n"):
            self.ids = self.ids[-1:]
            self.written = len(decode(self.tokenizer, self.ids))

    def end(self) -> None:
        """Hand out what is left."""
        text = decode(self.tokenizer, self.ids)
        self._hand_out(text, len(text))
        self.ids, self.written, self.prompt_seen = [], 0, False

    def _hand_out(self, text: str, end: int) -> None:
        if end > self.written:
            self.write(text[self.written : end])
            self.written = end


def _writes_no_spaces(character: str) -> bool:
    return "\u3000" <= character <= "\u9fff" or "\uf900" <= character <= "\ufaff" or character >= "\U00020000"


class _Stop(StoppingCriteria):
    """Ends an answer after the token that is being written, so that the cache stays whole."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """Return (B,) whether each row is done."""
        return torch.full((input_ids.shape[0],), self.asked.is_set(), device=input_ids.device)


class Chat:
    """A conversation about a context; `LongContextModel.chat`, `Context.chat` and `load_chat` make them.

    It goes on in a cache of its own, which holds document, questions and answers within the budget.

    Args:
        lm: The model.
        cache: What has been read; used up by the conversation.
        stream: How its text goes on.
        transcript: What has been said.
        name: What the document is called.
        unread: Tokens of the last answer that the cache does not hold yet.
        sources: What the document was read from.
        protection: What is protected, and where the turns are.
    """

    def __init__(
        self,
        lm: LongContextModel,
        cache: RetentionCache,
        stream: TokenStream,
        transcript: Transcript,
        name: str,
        unread: tuple[int, ...] = (),
        sources: tuple[Source, ...] = (),
        protection: Protection = NOTHING,
    ) -> None:
        self.lm, self.cache, self.name, self.sources = lm, cache, name, sources
        self.protection = protection
        """What is protected, and where the turns are."""
        self._stream, self._transcript, self._unread = stream, transcript, unread
        self._torn, self._speaking = False, threading.Lock()
        self.asked: str | None = None
        """A turn that has been read and not answered: its options failed, or it was read with the document."""

    def say(self, text: str, *, max_new_tokens: int = LONGEST_ANSWER, **options: Any) -> str:
        """Say something and return the answer. Ctrl-C ends the answer there, and the conversation can go on.

        Args:
            text: The user's turn.
            max_new_tokens: Longest answer in tokens.
            **options: Whatever `model.generate` takes: temperature, top_p, num_beams, stop_strings, ... An answer is
                greedy unless they ask for sampling.

        Raises:
            ValueError: For an empty text, an option that does not exist, or a conversation that broke off.
        """
        for _ in self.stream(text, max_new_tokens=max_new_tokens, **options):
            pass
        return self._transcript.turns[-1].content

    def stream(self, text: str, *, max_new_tokens: int = LONGEST_ANSWER, **options: Any) -> Iterator[str]:
        """Say something and yield the answer word by word; to leave the loop ends the answer. Arguments as for `say`.

        Raises:
            ValueError: As `say`, at once.
        """
        settings = self.lm.settings(max_new_tokens, options)
        self._check(text)
        self.lm.say_what_it_knows(self.name)  # here, because the turn is read in another thread
        return self._streamed(text, settings)

    def _streamed(self, text: str, settings: dict[str, Any]) -> Iterator[str]:
        stop, parts, failed = _Stop(), SimpleQueue[str | None](), list[BaseException]()
        settings["stopping_criteria"] = StoppingCriteriaList([*(settings.get("stopping_criteria") or ()), stop])

        def write() -> None:
            try:
                if settings.get("num_beams", 1) > 1:  # known only when all is written
                    parts.put(self._turn(text, settings, None))
                else:
                    self._turn(text, settings, AnswerStreamer(self.lm.tokenizer, parts.put))
            except BaseException as error:
                failed.append(error)
            finally:
                parts.put(None)

        writer = threading.Thread(target=write, name="locret-answer", daemon=True)
        writer.start()
        try:
            while (part := parts.get()) is not None:
                yield part
        finally:
            stop.asked.set()
            writer.join()
        if failed:
            raise failed[0]

    def _turn(self, text: str, settings: dict[str, Any], streamer: BaseStreamer | None) -> str:
        if not self._speaking.acquire(blocking=False):
            raise ValueError(_SPEAKING)
        try:
            self.read_turn(text, settings["max_new_tokens"])
            self.write_answer(settings, streamer)
            return self._transcript.turns[-1].content
        finally:
            self._speaking.release()

    def read_turn(self, text: str | None, new_tokens: int) -> None:
        """Read a user's turn up to where the answer begins, which has to follow; `say` does both.

        Args:
            text: The turn; None: the document is all of it.
            new_tokens: Longest answer in tokens.

        Raises:
            ValueError: For an empty text, or a conversation that broke off.
        """
        self._check_whole(*([] if text is None and not self._transcript.turns else [text]))
        if self.asked is not None:
            return
        self.lm.say_what_it_knows(self.name)
        transcript, stream = self._transcript.copy(), self._stream.copy()
        seen = self.cache.seen + self.cache.held_back
        layout = self.protection.asked(stream, seen + len(self._unread))
        ids, protection = [*self._unread, *stream.rest(transcript.ask(text))], self.protection
        if layout is not None:
            protection = replace(protection, turns=tuple(layout.turns(None)))
            protection.check_answer(self.cache, seen + len(ids), new_tokens)
            protection.apply(self.cache, seen + len(ids))
        self._torn = True
        if ids:  # a plain text without a question is all there
            read_turn(self.lm.model, torch.tensor([ids]), self.cache, new_tokens=new_tokens)
        self._transcript, self._stream, self.asked, self.protection = transcript, stream, text or "", protection

    def write_answer(self, settings: dict[str, Any], streamer: BaseStreamer | None) -> list[int]:
        """Write the answer to the turn that has been read, and return its tokens.

        Args:
            settings: What `LongContextModel.settings` returned.
            streamer: Receives tokens as they are written.
        """
        tokenizer, read = self.lm.tokenizer, self.cache.seen
        protection = self.protection.began(ASSISTANT, read)
        if self.cache.policy.decode_budget is not None:  # else nothing is evicted meanwhile
            protection.apply(self.cache)
        try:
            ids = generate(self.lm.model, cache=self.cache, tokenizer=tokenizer, streamer=streamer, **settings)
        except Exception:
            # Nothing was written if the prompt's last token is still the newest: the turn can be answered once more.
            with suppress(ValueError):
                self.cache.check_whole()
                self._torn = self.cache.last_tokens is None
            raise
        new: list[int] = ids[0].tolist()
        unread = new[self.cache.seen - read :]  # the last token is never fed, with beams none is
        if unread and unread[-1] in self.lm.end_ids:  # the template writes its own end of a turn
            unread.pop()
        answer = decode(tokenizer, new)
        self._transcript.answered(answer)
        self._stream.context = answer[-self._stream.margin :]
        self._unread, self._torn, self.asked, self.protection = tuple(unread), False, None, protection
        return new

    def _check(self, *texts: Any) -> None:
        if self._speaking.locked():
            raise ValueError(_SPEAKING)
        self._check_whole(*texts)

    def _check_whole(self, *texts: Any) -> None:
        if self.asked is not None and not self._torn and texts != (self.asked,):
            raise ValueError(
                f"{shown(self.asked)} has been read but not answered, because its options failed; say it once more, "
                "with others"
            )
        if self._torn:
            raise ValueError(
                "the last turn of this chat broke off in the middle; go on with a fork made before it, or begin again "
                "with context.chat()"
            )
        self.cache.check_whole()
        for text in texts:
            if not (is_text(text) and text.strip()):
                raise ValueError(f"{text!r} is nothing to answer; give a question as text")

    @property
    def messages(self) -> list[dict[str, str]]:
        """What was said, as transformers' chat templates take it; the document is not repeated."""
        return self._transcript.messages()

    def fork(self) -> Chat:
        """Return a copy that goes its own way."""
        self._check()
        parts = (self.cache.copy(), self._stream.copy(), self._transcript.copy())
        return Chat(self.lm, *parts, self.name, self._unread, self.sources, self.protection)

    def memory(self) -> CacheMemory:
        """Return planned and counted bytes of the cache."""
        return self.cache.memory()

    def protect(self, *what: str | Span) -> None:
        """Say what stays from now on, instead of what was said before; see `LongContextModel.read`.

        Raises:
            ValueError: If the budget cannot hold it, it is gone already, or it names nothing.
        """
        self._check()
        rules, read = rules_of(what), self.cache.seen + self.cache.held_back + len(self._unread)
        for rule in rules:
            if rule.what == "chars":
                raise ValueError(f"protect={rule} names characters of a text that has been read; name tokens instead")
            if rule.what == "tokens" and max(rule.start or 0, (rule.end or 0) - 1) >= read:
                raise ValueError(
                    f"protect={rule} names tokens that have not been read, for the conversation has {read:,}; name "
                    "some of those, or message:N for a turn that is to come"
                )
        if self.protection.turns is not None:
            roles = {*(turn.role for turn in self.protection.turns), USER, ASSISTANT}
            check_rules(rules, roles)
        protection = replace(self.protection, rules=rules, fixed=0)
        if not rules:
            self.cache.protect()
        protection.apply(self.cache, read)
        self.protection = protection

    def kept_by_message(self) -> list[KeptTurn]:
        """Return what has stayed of each turn: the system message, the document, what was asked and answered.

        Raises:
            ValueError: If the conversation was saved by an earlier version, which did not say where they are.
        """
        return self.protection.kept(self.cache)

    def save(self, path: str | Path) -> None:
        """Write the conversation to one file, for `LongContextModel.load_chat`.

        Raises:
            ValueError: If the conversation broke off.
            OSError: If the file cannot be written; nothing half-written stays.
        """
        self._check()
        turns = [[turn.role, turn.content] for turn in self._transcript.turns]
        more = {"turns": turns, "unread": list(self._unread)}
        save(path, self.cache, self.name, self._stream, self._transcript, self.sources, self.protection, **more)

    def __repr__(self) -> str:
        return described("Chat", self, f"{len(self._transcript.turns)} turns, ")


def save(
    path: str | Path,
    cache: RetentionCache,
    name: str,
    stream: TokenStream,
    transcript: Transcript,
    sources: tuple[Source, ...],
    protection: Protection,
    **more: Any,
) -> None:
    """Write a cache with what a conversation needs to go on."""
    held: dict[str, Any] = {"name": name, "context": stream.context, "pending": stream.pending}
    held["sources"] = [asdict(source) for source in sources]
    script = {"template": transcript.template, "system": transcript.system}
    held |= protection.data()
    held["tokenizer"] = vocabulary_fingerprint(stream.tokenizer)
    save_cache(cache, path, notes={"conversation": {**held, **script, "turns": [], "unread": [], **more}})


def described(kind: str, read: Any, what: str = "") -> str:
    """Return the line that a context or a chat shows of itself."""
    cache, memory = read.cache, read.memory()
    return (
        f"{kind}({read.name!r}: {what}{cache.seen:,} tokens read, {memory.units:,} units per KV head, "
        f"{memory.actual:,} bytes{second_tier(memory)}, scorer {cache.scorer.name}, budget {cache.policy.budget:,})"
    )


def second_tier(memory: CacheMemory) -> str:
    """Return what the second tier holds and takes, as the end of a sentence about the first; empty without one."""
    held = {"in host memory": memory.host, "on disk": memory.disk}
    shown = [f"{size:,} bytes {where}" for where, size in held.items() if size]
    return f", beside {memory.host_units:,} units in {' and '.join(shown)}" if shown else ""
