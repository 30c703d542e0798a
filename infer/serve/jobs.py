"""Texts and contexts that are worked on in the background: each in a thread, within the readers' memory, in turns.

Texts are read chunk by chunk in turns, and every chunk gives way to answers first. One chunk runs at a time. An engine
answers in a thread of its own, beside a chunk that runs, so a question never waits for a text: at worst its first step
is slow while the chunk ends. Then no further chunk begins before every answer that was asked for has its first token
and one step was made, but for so long that reading goes on under any load.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from locret import RetentionCache
from locret.base.openmp import hand_back_cores
from locret.cache.export import mean_units
from locret.conversation.context import Context
from locret.conversation.document import Document, read_text
from locret.conversation.model import LongContextModel
from locret.conversation.saved import kept_heads
from locret.pictures import Retention, kept_shares

PATIENCE = 2.0
"""Longest pause for answers, in times of the chunk before it: at least a third of the time is left to reading."""
LOOK = 0.1
"""Seconds after which who waits looks whether it is still wanted."""


class Room:
    """Bytes that jobs share, first come, first served."""

    def __init__(self, total: int) -> None:
        self.total, self.used = total, 0
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()

    def _pause(self) -> float:
        """Return for how many seconds nobody is let in."""
        return 0.0

    @contextmanager
    def taken(self, wanted: int, check: Callable[[], None]) -> Iterator[None]:
        """Hold so many bytes until the block ends; `check` is called while they are waited for, and raises to end."""
        if wanted > self.total:
            raise ValueError(
                f"this takes {wanted:,} bytes, but --kv-memory leaves {self.total:,} to readers; give the server more "
                "--kv-memory or --readers, or take fewer or smaller contexts"
            )
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            try:
                while self._waiting[0] is not ticket or self.used + wanted > self.total or self._pause():
                    self._changed.wait(min(self._pause() or LOOK, LOOK))
                    check()
                self.used += wanted
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self.used -= wanted
                self._changed.notify_all()


class Turns(Room):
    """The turns of all readers of one model, which is room for one chunk, and what they know of answers."""

    def __init__(self, patience: float = PATIENCE) -> None:
        super().__init__(1)
        self.patience = patience
        self.chunks = 0
        """Chunks that were read."""
        self._answers: dict[object, bool] = {}
        """Those that are being written, and whether each has a token."""
        self._stepped = False
        self._began = self._took = self._ended = 0.0

    @contextmanager
    def turn(self, check: Callable[[], None]) -> Iterator[Callable[[], None]]:
        """Read within the block, chunk by chunk; the first one waits for its turn too.

        `check` is called while it waits and after each chunk; raises to end the reading. Gives what takes note that a
        chunk has been read, and waits for the turn of the next one.
        """
        with ExitStack() as place:

            def take() -> None:
                place.enter_context(self.taken(1, check))
                place.callback(hand_back_cores)
                self._began = time.monotonic()

            def next_turn() -> None:
                check()
                with self._changed:
                    self.chunks += 1
                    self._ended = time.monotonic()
                    self._took, self._stepped = self._ended - self._began, False
                place.close()
                take()

            take()
            yield next_turn

    def note(self, answer: object, stepped: bool | None) -> None:
        """Take note of an answer, to which readers give way: asked for, with one more token, or (None) ended."""
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


COLUMNS = 50
"""Stretches of a text for which is said how much of them is kept."""


class Cancelled(Exception):
    """Somebody does not want it any more."""


@dataclass(frozen=True)
class Progress:
    """How far a text has been read."""

    tokens: int = 0
    bytes: int = 0
    """About how many bytes of the text were read, of so many in all."""
    total: int = 0
    units: int = 0
    """Units per KV head that are held."""
    seconds: float = 0.0


class Job(threading.Thread):
    """A text that is read in the background by a function, which looks at `check`."""

    def __init__(self, read: Callable[[Job], None]) -> None:
        super().__init__(target=read, args=[self], name="locret-reading", daemon=True)
        self.progress = Progress()
        self.began = 0.0
        """When it got its memory, by `time.monotonic`; 0 while it waits."""
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """End it early; `join` waits until it has."""
        self._cancelled.set()

    def check(self) -> None:
        if self._cancelled.is_set():
            raise Cancelled


def read_file(lm: LongContextModel, turns: Turns, job: Job, file: Path, *, source: str, **about: Any) -> Context:
    """Read a text; the job holds the memory of a reader."""
    size, cache, job.began = file.stat().st_size, lm.new_cache(), time.monotonic()
    job.progress = Progress(total=size)
    document = Document(source, read_text(file, setting=""), size=size, unit="bytes")

    def tell(read: int) -> None:
        units = mean_units([layer.fill for layer in cache.governed])
        job.progress = Progress(cache.seen, read, size, units, time.monotonic() - job.began)

    with turns.turn(job.check) as next_turn:

        def on_chunk(_: RetentionCache, read: int) -> None:
            tell(read)
            next_turn()

        context = lm.read_into(cache, document, progress=False, on_chunk=on_chunk, **about)
    tell(size)
    return context


def shares_in(path: Path, tokens: int) -> list[float]:
    """Return for equal stretches of a saved text of so many tokens which share is kept, 0 to 1, as a mean of heads."""
    with safe_open(path, framework="pt") as file:
        layers = sum(name.endswith(".positions") for name in file.keys())  # noqa: SIM118 (not a dict)
        kept = {nth: kept_heads(file.get_tensor, nth) for nth in range(layers)}
    means = kept_shares(Retention(kept, tokens), min(COLUMNS, tokens)).mean(0)
    return [round(share, 4) for share in means.tolist()]
