"""Answers as they are written: a bounded queue in front of the engine, tokens that become text, texts that end it."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from locret.base.openmp import Workers
from locret.conversation.document import HALF_A_CHARACTER, Decoder, decode
from locret.engines.transformers import NoRoom, NotRunning, Written
from locret.infer.serve.jobs import Turns
from locret.infer.serve.refusal import Refusal

_LOOKING_AGAIN = 0.25
"""Seconds after which an answer that found no room asks again, whatever has ended meanwhile."""
_STOPPED = "the engine that writes answers does not run; ask again when the server has been started again"
_BEFORE = 5
"""Tokens before an answer that are decoded with it."""


Begin = Callable[[Callable[[Written], None]], Callable[[], None]]
"""What begins an answer, given what to call for each token, and returns what cancels it; it may block."""
Asked = tuple[Begin, Sequence[int]]
"""What begins an answer, and the tokens whose text it goes on with; none if it begins a text of its own."""


@dataclass(frozen=True)
class Token:
    """A token of an answer by the text that it adds: the texts of all its tokens are the answer."""

    begins: int
    """Characters of the answer before it."""
    logprob: float | None
    top: tuple[tuple[str, float], ...]
    """What the likeliest tokens would have added, and their log-probabilities."""
    text: str = ""
    """Empty where a later token completes the character that it is a part of."""


@dataclass
class Piece:
    """A part of an answer that no later token changes; or all of them together."""

    choice: int
    """Which of the answers that were asked together."""
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    """Those whose text ends in it."""
    count: int = 0
    """Tokens of the answer so far, those without a text of their own included."""
    finish: Literal["stop", "length"] | None = None

    def add(self, more: Piece) -> None:
        """Take the part that follows."""
        self.text += more.text
        self.tokens += more.tokens
        self.count, self.finish = more.count, more.finish


class AnswerText:
    """Turns the tokens of one answer into text, and ends it at a stop text, also one across tokens.

    `before` are tokens of the text that it goes on with; see `Decoder`.
    """

    def __init__(
        self, tokenizer: Any, stops: Sequence[str], end_ids: frozenset[int], before: Sequence[int] = ()
    ) -> None:
        self.tokenizer, self.stops, self.end_ids = tokenizer, stops, end_ids
        self.count = 0
        """Tokens so far."""
        self._text = Decoder(tokenizer, _beginning(tokenizer, before))
        self._held = ""
        self._tokens: list[Token] = []
        """Those that no piece has yet."""
        self._length = 0
        """Characters of the text so far, held ones included."""

    def add(self, step: Written, choice: int = 0) -> Piece | None:
        """Take a token and return what of the text is certain now, if anything is; the last piece has a finish."""
        assert step.token is not None
        assert step.finish != "error"
        self.count += 1
        finish, ids = step.finish, list[int]()
        if not (finish == "stop" and step.token in self.end_ids):
            # What each would add to the text; its own text where that is nothing.
            top = tuple(
                (self._text.added(one) or str(self.tokenizer.decode([one])), logprob) for one, logprob in step.top
            )
            self._tokens.append(Token(self._length, step.logprob, top))
            ids.append(step.token)
        if new := self._text.add(ids, last=finish is not None):
            self._tokens[-1] = replace(self._tokens[-1], text=new)
        self._held += new
        self._length += len(new)
        at = min((found for stop in self.stops if (found := self._held.find(stop)) >= 0), default=None)
        if at is not None:
            self._length -= len(self._held) - at
            self._held, finish = self._held[:at], "stop"
        keep = 0 if finish is not None else self._open_stop()
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        if finish is None and not text:
            return None
        end = self._length - len(self._held)
        if finish is not None:
            ready = [
                replace(one, text=one.text[: end - one.begins])
                for one in self._tokens
                if one.begins < end or at is None
            ]
        else:
            ready = [one for one in self._tokens if one.begins < end and one.begins + len(one.text) <= end]
        self._tokens = self._tokens[len(ready) :]
        return Piece(choice, text, ready, self.count, finish)

    def _open_stop(self) -> int:
        """Return how many characters at the end may be the beginning of a stop text."""
        sizes = ((stop, range(1, min(len(stop), len(self._held) + 1))) for stop in self.stops)
        return max((size for stop, up_to in sizes for size in up_to if self._held.endswith(stop[:size])), default=0)


def _beginning(tokenizer: Any, before: Sequence[int]) -> list[int]:
    """Return the last tokens of a text after which more is decoded; none where that begins a text of its own."""
    ids: list[int] = []
    for one in reversed(before[-_BEFORE:]):
        if tokenizer.decode([one]) and not decode(tokenizer, [one]):  # a special token, after which a text begins
            break
        ids.insert(0, one)
    # Half a character would be there before and after its other half, which would seem to add nothing.
    return [] if decode(tokenizer, ids).endswith(HALF_A_CHARACTER) else ids


class TimeLimit(Exception):
    """A request took longer than requests may."""


@dataclass(eq=False)
class Place:
    """Places of one request: each answer waits, then is being written, then ends."""

    waiting: int
    running: int = 0


class Answers:
    """The answers of a server: those that wait, in the order they came, and those that are being written."""

    def __init__(self, tokenizer: Any, end_ids: Iterable[int], turns: Turns, *, max_queue: int) -> None:
        self.tokenizer, self.turns, self.max_queue = tokenizer, turns, max_queue
        self.end_ids = frozenset(end_ids)
        self._places: set[Place] = set()
        self._freed, self._closed = threading.Event(), False
        self._took = 1.0  # seconds of the last answer
        self._asking = Workers(1, "locret-ask")  # first come, first served

    @property
    def waiting(self) -> int:
        """Answers that wait for their first token."""
        return sum(place.waiting for place in self._places)

    @property
    def running(self) -> int:
        """Answers that have it."""
        return sum(place.running for place in self._places)

    def close(self) -> None:
        """Give the thread back."""
        self._closed = True
        self._freed.set()
        self._asking.shutdown(wait=False, cancel_futures=True)

    @contextmanager
    def place(self, count: int) -> Iterator[Place]:
        """Take places in the queue for as many answers, until they are written or given up."""
        if count > self.max_queue:
            raise Refusal(400, f"{count} answers at once are more than --max-queue {self.max_queue} allows; ask fewer")
        if (waiting := self.waiting) + count > self.max_queue:
            seconds = math.ceil(min(60, waiting / max(1, self.running) * self._took)) or 1
            why = f"{waiting} answers are waiting and --max-queue is {self.max_queue}; try again in {seconds} s"
            raise Refusal(429, why, code="queue_full", headers={"Retry-After": str(seconds)})
        self._places.add(place := Place(count))
        try:
            yield place
        finally:
            self._places.discard(place)
            self._freed.set()

    def ends(self, stops: Sequence[str]) -> frozenset[int]:
        """Return the tokens that end an answer: the backbone's, and special tokens that a request names as stop texts.

        Special tokens have no text in an answer, so that no text could end at them.
        """
        added = self.tokenizer.added_tokens_decoder if stops else {}  # which is made anew each time
        return self.end_ids | {token for token, one in added.items() if one.special and one.content in stops}

    async def write(
        self, asked: Sequence[Asked], stops: Sequence[str], place: Place, deadline: float
    ) -> AsyncGenerator[Piece, None]:
        """Yield the pieces of several answers as they are written; to leave cancels what is not finished."""
        loop, ends = asyncio.get_running_loop(), self.ends(stops)
        steps = asyncio.Queue[tuple[int, Written | Exception]]()
        texts = [AnswerText(self.tokenizer, stops, ends, before) for _, before in asked]
        waits, begun = list[Future[Callable[[], None] | None]](), dict[int, float]()
        gone = [threading.Event() for _ in asked]

        def receive(choice: int, step: Written | Exception) -> None:
            goes_on = isinstance(step, Written) and step.finish is None
            self.turns.note(gone[choice], True if goes_on else None)
            loop.call_soon_threadsafe(steps.put_nowait, (choice, step))

        def leave(choice: int) -> None:
            gone[choice].set()
            if not waits[choice].cancel():
                # At once, or as soon as the engine has taken it in.
                waits[choice].add_done_callback(partial(self._end, gone[choice]))

        limit = loop.call_later(deadline - time.monotonic(), steps.put_nowait, (-1, TimeLimit()))
        unfinished = set(range(len(asked)))
        try:
            for choice, (begin, _) in enumerate(asked):
                waits.append(self._asking.submit(self._begin, begin, partial(receive, choice), gone[choice]))
            while unfinished:
                choice, step = await steps.get()
                if isinstance(step, Exception):
                    raise step
                if choice not in unfinished:  # it ended at a stop text, which the engine does not know
                    continue
                if step.finish == "error":
                    raise Refusal(503, f"the engine failed ({step.error}); ask again")
                if choice not in begun:
                    begun[choice] = time.monotonic()
                    place.waiting, place.running = place.waiting - 1, place.running + 1
                if (piece := texts[choice].add(step, choice)) is None:
                    continue
                if piece.finish is not None:
                    unfinished.remove(choice)
                    leave(choice)
                    self._took = time.monotonic() - begun[choice]
                    place.running -= 1
                    self._freed.set()
                yield piece
        finally:
            limit.cancel()
            for choice in unfinished & set(range(len(waits))):
                leave(choice)
            place.waiting = place.running = 0
            self._freed.set()

    def _begin(
        self, begin: Begin, receive: Callable[[Written | Exception], None], gone: threading.Event
    ) -> Callable[[], None] | None:
        """Hand an answer to the engine as soon as there is room, in a thread that does so one after the other.

        Returns what cancels it.
        """
        try:
            while not (gone.is_set() or self._closed):
                self._freed.clear()
                self.turns.note(gone, False)
                try:
                    return begin(receive)
                except NoRoom:
                    self.turns.note(gone, None)
                    self._freed.wait(_LOOKING_AGAIN)
        except NotRunning:
            receive(Refusal(503, _STOPPED, code="engine_stopped"))
        except ValueError as error:
            receive(Refusal(400, str(error)))
        except Exception as error:
            receive(error)
        return None

    def _end(self, gone: threading.Event, begun: Future[Callable[[], None] | None]) -> None:
        """Cancel an answer that has begun."""
        if not begun.cancelled() and (cancel := begun.result()) is not None:
            cancel()
            self.turns.note(gone, None)
