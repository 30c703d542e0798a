"""Answers as they are written: a bounded queue in front of the engine, tokens that become text, texts that end it."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from locret.conversation.templates import decode
from locret.infer.serve.engine import Asked, NoRoom, NotRunning, Step
from locret.infer.serve.refusal import Refusal

if TYPE_CHECKING:
    from locret.infer.serve.transformers_engine import TransformersEngine

_LOOKING_AGAIN = 0.25
"""Seconds after which an answer that found no room asks again, whatever has ended meanwhile."""
_STOPPED = "the engine that writes answers does not run; ask again when the server has been started again"
_BEFORE = 5
"""Tokens before an answer that are decoded with it."""
_HALF_A_CHARACTER = "\ufffd"


@dataclass(frozen=True)
class Written:
    """A token of an answer."""

    id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Piece:
    """A part of an answer that no later token changes."""

    choice: int
    """Which of the answers that were asked together."""
    text: str
    tokens: tuple[Written, ...]
    """The tokens that it is made of."""
    count: int
    """Tokens of the answer so far, those without a text of their own included."""
    finish: Literal["stop", "length"] | None = None


class AnswerText:
    """Turns the tokens of one answer into text, and ends it at a stop text, also one across tokens.

    Args:
        tokenizer: The backbone's.
        stops: Texts that end the answer and are not part of it.
        end_ids: Tokens that end the answer and have no text.
        before: Tokens of the text that the answer goes on with; none where it begins one. Tokenizers such as
            SentencePiece's leave out the space before the first word that they decode.
    """

    def __init__(
        self, tokenizer: Any, stops: Sequence[str], end_ids: frozenset[int], before: Sequence[int] = ()
    ) -> None:
        self.tokenizer, self.stops, self.end_ids = tokenizer, stops, end_ids
        self.count = 0
        """Tokens so far."""
        self._ids = _beginning(tokenizer, before)
        self._start, self._read = 0, len(self._ids)
        self._held = ""
        self._tokens: list[tuple[int, Written]] = []
        self._length = 0
        """Characters of the text so far, held ones included."""

    def add(self, step: Step, choice: int = 0) -> Piece | None:
        """Take a step and return what of the text is certain now, if anything is; the last piece has a finish."""
        assert step.token is not None
        assert step.finish != "error"
        self.count += 1
        finish = step.finish
        if not (finish == "stop" and step.token in self.end_ids):
            self._ids.append(step.token)
            # A token belongs to the piece in which its text begins.
            self._tokens.append((self._length, Written(step.token, step.logprob, step.top)))
        self._held += (new := self._decoded(last=finish is not None))
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
        ready = [token for begins, token in self._tokens if begins < end or finish is not None and at is None]
        self._tokens = self._tokens[len(ready) :]
        return Piece(choice, text, tuple(ready), self.count, finish)

    def _decoded(self, *, last: bool) -> str:
        """Return what the newest tokens add; a character of several tokens comes with the last of them."""
        before = decode(self.tokenizer, self._ids[self._start : self._read])
        now = decode(self.tokenizer, self._ids[self._start :])
        if len(now) <= len(before) or (now.endswith(_HALF_A_CHARACTER) and not last):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return now[len(before) :]

    def _open_stop(self) -> int:
        """Return how many characters at the end may be the beginning of a stop text."""
        longest = 0
        for stop in self.stops:
            for size in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:size]):
                    longest = size
                    break
        return longest


def _beginning(tokenizer: Any, before: Sequence[int]) -> list[int]:
    """Return the last tokens of a text after which more is decoded; none where that begins a text of its own."""
    ids: list[int] = []
    for one in reversed(before[-_BEFORE:]):
        if tokenizer.decode([one]) and not decode(tokenizer, [one]):  # a special token, after which a text begins
            break
        ids.insert(0, one)
    # Half a character would be there before and after its other half, which would seem to add nothing.
    return [] if decode(tokenizer, ids).endswith(_HALF_A_CHARACTER) else ids


class TimeLimit(Exception):
    """A request took longer than requests may."""


class Answers:
    """The answers of a server: those that wait, in the order they came, and those that are being written.

    Args:
        engine: Writes them.
        tokenizer: The backbone's.
        end_ids: Tokens that end an answer.
        max_queue: Answers that may wait for their first token; further ones are refused with 429.
    """

    def __init__(self, engine: TransformersEngine, tokenizer: Any, end_ids: Iterable[int], *, max_queue: int) -> None:
        self.engine, self.tokenizer, self.max_queue = engine, tokenizer, max_queue
        self.end_ids = frozenset(end_ids)
        self.waiting = self.running = 0
        """Answers that wait for their first token, and those that have it."""
        self._line = asyncio.Lock()  # first come, first served
        self._freed = asyncio.Event()
        self._seconds = deque([1.0], maxlen=32)  # of answers that ended lately
        self._asking = ThreadPoolExecutor(1, "locret-ask")

    def close(self) -> None:
        """Give the thread back."""
        self._asking.shutdown(wait=False, cancel_futures=True)

    @contextmanager
    def place(self, count: int) -> Iterator[Place]:
        """Take places in the queue for as many answers, until they are written or given up.

        Raises:
            Refusal: 429 if the queue is full, 400 if it could never hold so many.
        """
        if count > self.max_queue:
            raise Refusal(400, f"{count} answers at once are more than --max-queue {self.max_queue} allows; ask fewer")
        if self.waiting + count > self.max_queue:
            seconds = self._until_room()
            raise Refusal(
                429,
                f"{self.waiting} answers are waiting and --max-queue is {self.max_queue}; try again in {seconds} s",
                code="queue_full",
                headers={"Retry-After": str(seconds)},
            )
        place = Place(self, count)
        self.waiting += count
        try:
            yield place
        finally:
            place.leave()

    def _until_room(self) -> int:
        """Return the seconds after which there may be room: the time of an answer for each round of those waiting."""
        rounds = self.waiting / max(1, self.running)
        return min(60, max(1, math.ceil(rounds * sum(self._seconds) / len(self._seconds))))

    def ends(self, stops: Sequence[str]) -> frozenset[int]:
        """Return the tokens that end an answer: the backbone's, and special tokens that a request names as stop texts.

        Special tokens have no text in an answer, so that no text could end at them.
        """
        added = self.tokenizer.added_tokens_decoder if stops else {}  # which is made anew each time
        return self.end_ids | {token for token, one in added.items() if one.special and one.content in stops}

    async def write(
        self,
        asked: Sequence[Callable[[], Asked]],
        stops: Sequence[str],
        place: Place,
        deadline: float,
        before: Sequence[Sequence[int]] | None = None,
    ) -> AsyncGenerator[Piece, None]:
        """Yield the pieces of several answers as they are written; to leave cancels what is not finished.

        Args:
            asked: What returns what to answer, called when the engine may take it; it may block.
            stops: Texts that end an answer.
            place: Places for as many answers.
            deadline: When to give up, by `time.monotonic`.
            before: For each answer the tokens whose text it goes on with; None where answers begin texts of their own.

        Raises:
            TimeLimit: At the deadline.
            Refusal: If the engine cannot answer.
        """
        loop = asyncio.get_running_loop()
        steps = asyncio.Queue[tuple[int, Step | Exception]]()
        known = before or [()] * len(asked)
        ends = self.ends(stops)
        texts = [AnswerText(self.tokenizer, stops, ends, ids) for ids in known]
        cancels = [_Cancel() for _ in asked]
        begun = dict[int, float]()

        def receive(choice: int, step: Step | Exception) -> None:
            loop.call_soon_threadsafe(steps.put_nowait, (choice, step))

        entering = loop.create_task(self._enter(asked, receive, cancels))
        limit = loop.call_later(deadline - time.monotonic(), steps.put_nowait, (-1, TimeLimit()))
        unfinished = set(range(len(asked)))
        try:
            while unfinished:
                choice, step = await steps.get()
                if isinstance(step, Exception):
                    raise step
                if choice not in unfinished:  # it ended at a stop text, which the engine does not know
                    continue
                if step.finish == "error":
                    raise Refusal(503, step.message or "the engine failed; ask again")
                if choice not in begun:
                    begun[choice] = time.monotonic()
                    place.began()
                piece = texts[choice].add(step, choice)
                if piece is not None and piece.finish is not None:
                    unfinished.remove(choice)
                    cancels[choice]()
                    self._seconds.append(time.monotonic() - begun[choice])
                    place.ended()
                if piece is not None:
                    yield piece
        finally:
            limit.cancel()
            entering.cancel()
            for choice in unfinished:
                cancels[choice]()
            place.leave()

    async def _enter(
        self,
        asked: Sequence[Callable[[], Asked]],
        receive: Callable[[int, Step | Exception], None],
        cancels: Sequence[_Cancel],
    ) -> None:
        """Hand the answers to the engine, one after the other, each as soon as there is room."""
        for choice, one in enumerate(asked):
            try:
                async with self._line:
                    await self._admitted(one, partial(receive, choice), cancels[choice])
            except NotRunning:
                receive(choice, Refusal(503, _STOPPED, code="engine_stopped"))
                return
            except ValueError as error:
                receive(choice, Refusal(400, str(error)))
                return
            except Exception as error:
                receive(choice, error)
                return

    async def _admitted(self, asked: Callable[[], Asked], on_step: Callable[[Step], None], cancel: _Cancel) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._freed.clear()
            entering = loop.run_in_executor(self._asking, lambda: self.engine.ask(asked(), on_step))
            entering.add_done_callback(cancel.ready)
            try:
                await asyncio.shield(entering)
                return
            except NoRoom:
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._freed.wait(), _LOOKING_AGAIN)

    def freed(self) -> None:
        """Let the first in the queue ask again: an answer has ended."""
        self._freed.set()


class _Cancel:
    """Cancels an answer, also one that the engine is still taking in."""

    def __init__(self) -> None:
        self._wanted = False
        self._call: Callable[[], None] | None = None

    def __call__(self) -> None:
        self._wanted = True
        if self._call is not None:
            self._call()

    def ready(self, entering: asyncio.Future[Callable[[], None]]) -> None:
        """Take what the engine returned."""
        if not entering.cancelled() and entering.exception() is None:
            self._call = entering.result()
            if self._wanted:
                self._call()


@dataclass
class Place:
    """Places of one request: each waits, then is being written, then ends."""

    answers: Answers
    waiting: int
    running: int = 0

    def began(self) -> None:
        """Note an answer's first token."""
        self._move(-1, +1)

    def ended(self) -> None:
        """Note an answer's end."""
        self._move(0, -1)
        self.answers.freed()

    def leave(self) -> None:
        """Give all places back; idempotent."""
        if self.waiting or self.running:
            self._move(-self.waiting, -self.running)
            self.answers.freed()

    def _move(self, waiting: int, running: int) -> None:
        self.waiting += waiting
        self.running += running
        self.answers.waiting += waiting
        self.answers.running += running
