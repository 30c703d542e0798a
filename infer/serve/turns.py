"""Who goes on: texts are read chunk by chunk in turns, and every chunk gives way to answers first.

One chunk runs at a time. An engine answers in a thread of its own, beside a chunk that runs, so a question never waits
for a text: at worst its first step is slow while the chunk ends. Then no further chunk begins before every answer that
was asked for has its first token and one step was made, but for so long that reading goes on under any load.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from locret.engines.transformers import Written

PATIENCE = 2.0
"""Longest pause for answers, in times of the chunk before it: at least a third of the time is left to reading."""
LOOK = 0.1
"""Seconds after which who waits looks whether it is still wanted."""


class Turns:
    """The turns of all readers of one model, and what they know of answers."""

    def __init__(self, patience: float = PATIENCE) -> None:
        self.patience = patience
        self.chunks = 0
        """Chunks that were read."""
        self._changed = threading.Condition()
        self._waiting: deque[Turn] = deque()
        self._running: Turn | None = None
        self._answers: dict[object, bool] = {}
        """Those that are being written, and whether each has a token."""
        self._stepped = False
        self._took = self._ended = 0.0

    @contextmanager
    def turn(self, check: Callable[[], None]) -> Iterator[Turn]:
        """Read within the block, chunk by chunk; the first one waits for its turn too.

        `check` is called while it waits and after each chunk; raises to end the reading.
        """
        turn = Turn(self, check)
        turn.take()
        try:
            yield turn
        finally:
            turn.let_go()

    def giving_way(
        self, submit: Callable[..., Callable[[], None]], on_token: Callable[[Written], Any]
    ) -> Callable[[], None]:
        """Begin an answer, and let the readers know of it and of each of its tokens; return what cancels it."""
        answer = object()
        self._note(answer, False)

        def told(written: Written) -> None:
            self._note(answer, True if written.finish is None else None)
            on_token(written)

        try:
            cancel = submit(on_token=told)
        except BaseException:
            self._note(answer, None)
            raise

        def cancelled() -> None:
            cancel()
            self._note(answer, None)

        return cancelled

    def _note(self, answer: object, stepped: bool | None) -> None:
        """Take note of an answer: it was asked for, has one more token, or (None) has ended."""
        with self._changed:
            if stepped is None:
                self._answers.pop(answer, None)
            elif not stepped or answer in self._answers:  # one that was cancelled may still have a token
                self._answers[answer] = stepped
                self._stepped |= stepped
            self._changed.notify_all()

    def _pause(self) -> float:
        """Return how long the next chunk still gives way at most, in seconds."""
        if not self._answers or (self._stepped and all(self._answers.values())):
            return 0.0
        return max(0.0, self._ended + self.patience * self._took - time.monotonic())


class Turn:
    """One reader's place among the others."""

    def __init__(self, turns: Turns, check: Callable[[], None]) -> None:
        self._turns, self._check, self._began = turns, check, 0.0

    def take(self) -> None:
        """Wait until it is this reader's turn."""
        turns = self._turns
        with turns._changed:
            turns._waiting.append(self)
            try:
                while turns._waiting[0] is not self or turns._running is not None or turns._pause():
                    turns._changed.wait(min(turns._pause() or LOOK, LOOK))
                    self._check()
                turns._running, self._began = self, time.monotonic()
            finally:
                turns._waiting.remove(self)
                turns._changed.notify_all()

    def let_go(self) -> None:
        """Leave the turn to others; nothing if it is theirs."""
        with self._turns._changed:
            if self._turns._running is self:
                self._turns._running = None
                self._turns._changed.notify_all()

    def chunk(self) -> None:
        """Take note that a chunk has been read, and wait for the turn of the next one."""
        self._check()
        turns = self._turns
        with turns._changed:
            turns.chunks += 1
            turns._ended = time.monotonic()
            turns._took, turns._stepped = turns._ended - self._began, False
        self.let_go()
        self.take()
