"""A conversation with what has been read: each turn is added to one bounded cache and answered from it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    LogitsProcessor,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from locret.backbone.adapters import input_device, unwrap
from locret.base import interrupts
from locret.base.fields import Refusal, check_sampling, shown
from locret.base.openmp import hand_back_cores
from locret.cache.cache import RetentionCache
from locret.cache.cache_file import save_cache
from locret.cache.layer import HOST
from locret.cache.limits import CacheMemory
from locret.chunked_prefill import read_turn
from locret.conversation.document import Decoder, decode, is_text
from locret.conversation.protect import ASSISTANT, USER, KeptTurn, Protection, kept_turns
from locret.conversation.turns import Talk
from locret.generation import checked_options, generate
from locret.pictures import retention_of
from locret.policy.planned_bytes import full_bytes
from locret.scorers.chosen import told

if TYPE_CHECKING:
    from locret.conversation.model import LongContextModel

_SPEAKING = "this chat is answering; go on when that answer has ended, or with another chat of the same context"
LONGEST_ANSWER = 256
"""Tokens of an answer, unless the caller says otherwise."""
_NOT_HERE = {
    "max_length": "say how long an answer may be with max_new_tokens",
    "num_return_sequences": "there is one answer; ask again, or fork",
    **dict.fromkeys(
        ("return_dict_in_generate", "output_scores", "output_logits", "output_hidden_states"),
        "there is only the answer's text; use locret.generate with context.cache",
    ),
    "source": "passages are not read again; read the text with a larger budget, and ask that context",
    **dict.fromkeys(("stream", "streamer"), "use context.stream or chat.stream"),
    "use_cache": "the context is the cache",
    "generation_config": "give what it holds by name",
    **dict.fromkeys(("tokenizer", "synced_gpus"), "the model's own is used"),
}
_LOOKING_BACK: dict[str, tuple[float, Callable[[Any, Tensor], LogitsProcessor]]] = {
    "encoder_repetition_penalty": (1.0, EncoderRepetitionPenaltyLogitsProcessor),
    "repetition_penalty": (1.0, lambda value, ids: RepetitionPenaltyLogitsProcessor(value)),
    "no_repeat_ngram_size": (0, lambda value, ids: NoRepeatNGramLogitsProcessor(value)),
    "encoder_no_repeat_ngram_size": (0, EncoderNoRepeatNGramLogitsProcessor),
}
"""Options that look at tokens before the answer, which transformers is not given: neutral value, and what does it."""
GREEDY = {"temperature": 1.0, "top_p": 1.0, "top_k": 50}
"""What shapes no answer: without it a backbone's own sampling would be filled in."""
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")


def answer_settings(lm: LongContextModel, max_new_tokens: int, options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `locret.generate` for one answer, from the options of `model.generate`."""
    for name in _NOT_HERE.keys() & options:
        raise Refusal(name, shown(options[name]), f"has no effect here; {_NOT_HERE[name]}")
    options = {name: value for name, value in options.items() if value is not None}
    for name in ("temperature", "repetition_penalty"):
        if isinstance(value := options.get(name), (int, float)) and not (name == "temperature" and value == 0):
            check_sampling(name, value)
    sampling = any(name in options for name in _SAMPLING) and options.get("temperature") != 0
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": sampling, **options}
    if not settings["do_sample"]:  # what a backbone recommends for sampling shapes no greedy answer
        for name in _SAMPLING:
            if "do_sample" in options and options.get(name, 0) not in (0, GREEDY.get(name)):
                raise Refusal(name, repr(options[name]), "has no effect with do_sample=False; leave one of them out")
        settings |= GREEDY
    checked_options(unwrap(lm.model), dict(settings))
    pad = lm.tokenizer.pad_token_id
    settings.setdefault("pad_token_id", pad if pad is not None else next(iter(lm.end_ids), None))
    return settings


@dataclass(frozen=True, kw_only=True)
class Measured:
    """An answer, and what it took: units per KV head, bytes of the whole cache, seconds."""

    answer: str
    prompt_tokens: int
    new_tokens: int
    kept_units: int
    """Units per KV head when the prompt had been read."""
    planned_cache_bytes: int
    peak_cache_bytes: int
    """Counted from the cache's tensors; in a beam search with the beams' copy."""
    full_cache_bytes: int
    """What the units of all tokens of the prompt would take."""
    host_bytes: int
    """Of the second tier in host memory, with its indexes; 0 without one."""
    moved_bytes: int
    """Fetched from the second tier, for the prompt's last tokens and the answer."""
    prefill_seconds: float
    """Of the text, where it was read for this answer, and of the question; tokenising included."""
    decode_seconds: float
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    finished: bool
    """Whether the answer ended by itself, rather than at max_new_tokens."""


class AnswerStreamer(BaseStreamer):
    """Hands out an answer as it is written, exactly as it would be decoded whole.

    Args:
        tokenizer: The backbone's.
        write: Takes each new part of the text.
    """

    def __init__(self, tokenizer: Any, write: Callable[[str], object]) -> None:
        self.decoder, self.write, self.prompt_seen = Decoder(tokenizer), write, False

    def put(self, value: Tensor) -> None:
        """Receive new token ids, (1,), after the prompt's, (1, n), which are skipped."""
        if self.prompt_seen and (text := self.decoder.add(value.flatten().tolist())):
            self.write(text)
        self.prompt_seen = True

    def end(self) -> None:
        """Hand out what is left."""
        if text := self.decoder.add((), last=True):
            self.write(text)


def _behind(ids_N: Tensor, inner: LogitsProcessor) -> Callable[[Tensor, Any], Any]:
    """Let a processor see the tokens that were read before those it is given, (N,), too."""

    def process(input_ids: Tensor, scores: Any) -> Any:
        before = ids_N.to(input_ids.device).expand(len(input_ids), -1)
        return inner(torch.cat([before, input_ids], dim=1), scores)

    return process


class Reading:
    """What contexts and chats have in common: a cache that has read a text, and how that goes on."""

    def __init__(self, lm: LongContextModel, cache: RetentionCache, talk: Talk) -> None:
        self.lm, self.cache, self.talk = lm, cache, talk

    @property
    def name(self) -> str:
        """What the document is called."""
        return self.talk.name

    @property
    def protection(self) -> Protection:
        """What is protected, and where the turns are."""
        return self.talk.protection

    @property
    def kept_bytes(self) -> int:
        """Bytes that are kept, of which a file is made: without second tier, workspace, and room for what comes."""
        kept = (holder.state() for _, prefix, holder in self.cache.holders() if not prefix.endswith(HOST))
        return sum(tensor.nbytes for state in kept for tensor in state.values())

    def memory(self) -> CacheMemory:
        """Return planned and counted bytes of the cache."""
        return self.cache.memory()

    def kept_by_message(self) -> list[KeptTurn]:
        """Return what has stayed of each turn: the system message, the document, what was asked and answered.

        Raises:
            ValueError: If it was saved by an earlier version, which did not say where they are.

        Examples:
            >>> lm = LongContextModel(model, tokenizer, heads, policy)
            >>> text = "The grass is green. " * 40 + "The pass key is 71432. " + "The sky is blue. " * 40
            >>> context = lm.read(text, system="Answer in one word.", protect="system")
            >>> [one.role for one in context.kept_by_message()]
            ['system', 'document']
            >>> context.kept_by_message()[0].protected
            'all'
        """
        known, spans = self.protection.known, self.cache.protected[0] if self.cache.protected else ()
        return kept_turns(retention_of(self.cache), known, spans)

    def save(self, path: str | Path) -> None:
        """Write it to one file, for `LongContextModel.load`, or `load_chat` if something was said.

        Raises:
            ValueError: If a conversation broke off.
            OSError: If the file cannot be written; nothing half-written stays.
        """
        save_cache(self.cache, path, notes=self.talk.notes(backbone=self.lm.name))

    def __repr__(self) -> str:
        memory, said = self.memory(), len(self.talk.transcript.turns)
        return (
            f"{type(self).__name__}({self.name!r}: {f'{said} turns, ' if isinstance(self, Chat) else ''}"
            f"{self.cache.seen:,} tokens read, {memory.units:,} units per KV head, {self.kept_bytes:,} bytes kept"
            f"{second_tier(memory)}, {told(self.cache.scorer, self.cache.policy)})"
        )


class Chat(Reading):
    """A conversation about a context; `LongContextModel.converse`, `Context.chat` and `load_chat` make them.

    It goes on in a cache of its own, which holds document, questions and answers within the budget.
    """

    def __init__(self, lm: LongContextModel, cache: RetentionCache, talk: Talk) -> None:
        super().__init__(lm, cache, talk)
        self._torn, self._speaking = False, threading.Lock()
        self.asked: str | None = None
        """A turn that has been read and not answered: its options failed, or it was read with the document."""

    def say(
        self,
        text: str,
        *,
        max_new_tokens: int = LONGEST_ANSWER,
        write: Callable[[str], object] | None = None,
        **options: Any,
    ) -> str:
        """Say something and return the answer. Ctrl-C ends the answer there, and the conversation can go on.

        Args:
            text: The user's turn.
            max_new_tokens: Longest answer in tokens.
            write: Takes the answer as it is written.
            **options: Whatever `model.generate` takes: temperature, top_p, num_beams, stop_strings, ... An answer is
                greedy unless they ask for sampling.

        Raises:
            ValueError: For an empty text, an option that does not exist, or a conversation that broke off.
        """
        if write is not None and not callable(write):
            raise Refusal("write", shown(write), "cannot be called; give a function of one text, such as print")
        settings = self._ready(text, max_new_tokens, options)
        with interrupts.noted(signal.SIGINT) as received:
            try:
                # Not in another thread, for which OpenMP would make more threads than there are cores.
                self._write(text, settings, write, lambda: bool(received))
            finally:
                if received:
                    raise KeyboardInterrupt
        return self.talk.transcript.turns[-1].content

    def stream(self, text: str, *, max_new_tokens: int = LONGEST_ANSWER, **options: Any) -> Iterator[str]:
        """Say something and yield the answer as it is written; to leave the loop ends it. Arguments as for `say`.

        Raises:
            ValueError: As `say`, at once.
        """
        return self._streamed(text, self._ready(text, max_new_tokens, options))

    def _ready(self, text: str, max_new_tokens: int, options: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of an answer, after all checks that need no reading."""
        settings = self.lm.settings(max_new_tokens, options)
        self._looking_back(dict(settings))
        self._check(text)
        check_question(text)
        return settings

    def _looking_back(self, settings: dict[str, Any]) -> list[Callable[[Tensor, Any], Any]]:
        """Take options that look back out of settings, and return what does it with all that was read."""
        found = list[Callable[[Tensor, Any], Any]]()
        for name, (neutral, make) in _LOOKING_BACK.items():
            if (value := settings.pop(name, None)) in (None, neutral):
                continue
            if self.talk.ids is None:
                raise Refusal(name, value, "sees what was read, of which a file keeps a digest alone; leave it out")
            ids_1N = torch.tensor([self.talk.ids.tolist()], device=input_device(self.lm.model))
            found.append(_behind(ids_1N[0, :-1], make(value, ids_1N)))
        return found

    def _streamed(self, text: str, settings: dict[str, Any]) -> Iterator[str]:
        stop, parts, failed = threading.Event(), SimpleQueue[str | None](), list[BaseException]()

        def write() -> None:
            try:
                self._write(text, settings, parts.put, stop.is_set)
            except BaseException as error:
                failed.append(error)
            finally:
                parts.put(None)

        writer = threading.Thread(target=write, name="locret-answer", daemon=True)
        hand_back_cores()
        writer.start()
        try:
            while (part := parts.get()) is not None:
                yield part
        finally:
            stop.set()
            writer.join()
        if failed:
            raise failed[0]

    def _write(
        self, text: str, settings: dict[str, Any], write: Callable[[str], object] | None, stopped: Callable[[], bool]
    ) -> None:
        """Read a turn and write the answer, until there is a reason to stop."""

        def stop(input_ids: Tensor, scores: Any, **_: Any) -> Tensor:  # after a token, so that the cache stays whole
            return torch.full((input_ids.shape[0],), stopped(), device=input_ids.device)

        settings["stopping_criteria"] = StoppingCriteriaList([*(settings.get("stopping_criteria") or ()), stop])
        if not self._speaking.acquire(blocking=False):
            raise ValueError(_SPEAKING)
        try:
            self.read_turn(text, settings["max_new_tokens"])
            self.write_answer(settings, write)
        finally:
            self._speaking.release()

    def measured(
        self,
        text: str | None,
        settings: dict[str, Any],
        *,
        write: Callable[[str], object] | None = None,
        read_seconds: float = 0.0,
    ) -> Measured:
        """Say something and return the answer with what it took.

        Args:
            text: The user's turn; None: the document is all of it.
            settings: What `LongContextModel.settings` returned.
            write: Takes the answer as it is written.
            read_seconds: How long the text was read, where that was for this answer alone; its tokens count then.
        """
        cache, model, most = self.cache, unwrap(self.lm.model), settings["max_new_tokens"]
        device = input_device(model)
        self._looking_back(dict(settings))
        start, before = now(device), cache.seen
        self.read_turn(text, most)
        middle, prompt_tokens, kept_units = now(device), cache.seen, cache.memory().units
        new = self.write_answer(settings, write)
        end, seconds = now(device), read_seconds + middle - start
        own, copies = cache.memory(), cache.copies_memory
        return Measured(
            answer=decode(self.lm.tokenizer, new),
            prompt_tokens=prompt_tokens,
            new_tokens=len(new),
            kept_units=kept_units,
            planned_cache_bytes=own.planned + copies.actual,
            peak_cache_bytes=max(own.peak, own.actual + copies.actual),
            full_cache_bytes=full_bytes(cache.backbone, prompt_tokens, model.dtype.itemsize),
            host_bytes=own.host + copies.host,
            moved_bytes=max(own.moved, copies.moved),  # a copy goes on counting
            prefill_seconds=seconds,
            decode_seconds=end - middle,
            prefill_tokens_per_second=(prompt_tokens - (0 if read_seconds else before)) / seconds,
            decode_tokens_per_second=len(new) / (end - middle),
            finished=len(new) < most or new[-1] in self.lm.end_ids,
        )

    def read_turn(self, text: str | None, new_tokens: int) -> None:
        """Read a user's turn up to where the answer begins, which has to follow; `say` does both.

        Args:
            text: The turn; None: the document is all of it.
            new_tokens: Longest answer in tokens.

        Raises:
            ValueError: For an empty text, or a conversation that broke off.
        """
        self._check_whole(text or "")
        if self.asked is not None:
            return
        if text is not None or self.talk.transcript.turns:
            check_question(text)
        talk, seen = self.talk.copy(), self.cache.seen + self.cache.held_back
        more, asked = talk.stream.followed(talk.transcript.ask(text))
        ids = [*talk.unread, *more]
        if talk.protection.turns is not None:  # what waits is still part of the turn before
            talk.protection = talk.protection.began(USER, seen + len(talk.unread) + asked)
            talk.protection.check_answer(self.cache, seen + len(ids), new_tokens)
            talk.protection.apply(self.cache, seen + len(ids))
        self._torn = True
        if ids:  # a plain text without a question is all there
            read_turn(self.lm.model, torch.tensor([ids]), self.cache, new_tokens=new_tokens)
        talk.read(ids)
        self.talk, self.asked = talk, text or ""

    def write_answer(self, settings: dict[str, Any], write: Callable[[str], object] | None = None) -> list[int]:
        """Write the answer to the turn that has been read, and return its tokens.

        Args:
            settings: What `LongContextModel.settings` returned.
            write: Takes the answer's text as it is written; with beams, which are known at the end, as a whole.
        """
        beams = settings.get("num_beams", 1) > 1
        streamer = None if write is None or beams else AnswerStreamer(self.lm.tokenizer, write)
        tokenizer, read, talk = self.lm.tokenizer, self.cache.seen, self.talk
        protection = talk.protection.began(ASSISTANT, read)
        if self.cache.policy.decode_budget is not None:  # else nothing is evicted meanwhile
            protection.apply(self.cache)
        settings = dict(settings)
        behind = self._looking_back(settings)
        settings["logits_processor"] = LogitsProcessorList([*behind, *(settings.get("logits_processor") or ())])
        try:
            ids = generate(self.lm.model, cache=self.cache, tokenizer=tokenizer, streamer=streamer, **settings)
        except Exception:
            # Nothing was written if the prompt's last token is still the newest: the turn can be answered once more.
            with suppress(ValueError):
                self.cache.check_whole()
                self._torn = self.cache.last_tokens is None
            raise
        new: list[int] = ids[0].tolist()
        talk.read(new[: self.cache.seen - read])
        unread = new[self.cache.seen - read :]  # the last token is never fed, with beams none is
        if unread and unread[-1] in self.lm.end_ids:  # the template writes its own end of a turn
            unread.pop()
        answer = decode(tokenizer, new)
        talk.transcript.answered(answer)
        talk.stream.context = answer[-talk.stream.margin :]
        talk.unread, talk.protection, self._torn, self.asked = tuple(unread), protection, False, None
        if write is not None and beams:
            write(talk.transcript.turns[-1].content)
        return new

    def _check(self, said: str | None = None) -> None:
        if self._speaking.locked():
            raise ValueError(_SPEAKING)
        self._check_whole(said)

    def _check_whole(self, said: str | None = None) -> None:
        """Refuse to go on where a turn broke off, or where another one than is said waits for its answer."""
        if self._torn:
            raise ValueError(
                "the last turn of this chat broke off in the middle; go on with a fork made before it, or begin again "
                "with context.chat()"
            )
        if self.asked not in (None, said):
            raise ValueError(
                f"{shown(self.asked)} has been read but not answered, because its options failed; say it once more, "
                "with others"
            )
        self.cache.check_whole()

    @property
    def messages(self) -> list[dict[str, str]]:
        """What was said, as transformers' chat templates take it; the document is not repeated."""
        return self.talk.transcript.messages()

    def fork(self) -> Chat:
        """Return a copy that goes its own way."""
        self._check()
        return Chat(self.lm, self.cache.copy(), self.talk.copy())

    def save(self, path: str | Path) -> None:
        """Write the conversation to one file; see `Reading.save`."""
        self._check()
        super().save(path)


def check_question(text: Any) -> None:
    """Refuse what cannot be answered."""
    if not (is_text(text) and text.strip()):
        raise ValueError(f"{text!r} is nothing to answer; give a question as text")


def second_tier(memory: CacheMemory) -> str:
    """Return what the second tier holds and takes, as the end of a sentence about the first; empty without one."""
    return f", beside {memory.host_units:,} units in {memory.host:,} bytes in host memory" if memory.host else ""


def now(device: torch.device) -> float:
    """Return the time in seconds once a device has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
