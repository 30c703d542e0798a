"""Texts and contexts that are worked on in the background: each in a thread, within the readers' memory, in turns."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from locret.conversation.document import Document, ReadingBar, read_text
from locret.infer.serve.turns import LOOK, Turns
from locret.pictures import Retention, kept_shares

if TYPE_CHECKING:
    from locret import RetentionCache
    from locret.conversation.context import Context
    from locret.conversation.model import LongContextModel

COLUMNS = 50
"""Stretches of a text for which is said how much of them is kept."""


class Cancelled(Exception):
    """Somebody does not want it any more."""


class Room:
    """Bytes that jobs share, first come, first served."""

    def __init__(self, total: int) -> None:
        self.total, self.used = total, 0
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()

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
                while self._waiting[0] is not ticket or self.used + wanted > self.total:
                    self._changed.wait(LOOK)
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


class Job:
    """A text that is read in the background by a function, which looks at `check` and sets `done` at its end."""

    def __init__(self, read: Callable[[Job], None]) -> None:
        self.progress, self.done = Progress(), threading.Event()
        self.began = 0.0
        """When it got its memory, by `time.monotonic`; 0 while it waits."""
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=read, args=[self], name="locret-reading", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def cancel(self, *, wait: bool = True) -> None:
        """End it early; returns when it has ended, unless it is not waited for."""
        self._cancelled.set()
        if wait and self._thread.is_alive():
            self._thread.join()

    def check(self) -> None:
        """Raise `Cancelled` if it was cancelled."""
        if self._cancelled.is_set():
            raise Cancelled


def read_file(lm: LongContextModel, turns: Turns, job: Job, file: Path, *, source: str, **about: Any) -> Context:
    """Read a text; the job holds the memory of a reader."""
    size, cache, job.began = file.stat().st_size, lm.new_cache(), time.monotonic()
    job.progress = Progress(total=size)
    document = Document(source, read_text(file, setting=""), size=size, unit="bytes")
    bar = ReadingBar(document, show=False)

    def tell(read: int) -> None:
        """Let the job know how far the cache has got."""
        units = max(layer.fill for layer in cache.governed)
        job.progress = Progress(cache.seen, read, size, units, time.monotonic() - job.began)

    with turns.turn(job.check) as turn:

        def on_chunk(cache: RetentionCache) -> None:
            tell(bar.done(cache))
            turn.chunk()

        context = lm.read_into(cache, document, bar=bar, on_chunk=on_chunk, **about)
    tell(size)
    return context


def shares_in(path: Path, tokens: int) -> list[float]:
    """Return for equal stretches of a saved text of so many tokens which share is kept, 0 to 1, as a mean of heads."""
    with safe_open(path, framework="pt") as file:
        layers = [file.get_tensor(name)[0] for name in file.keys() if name.endswith(".positions")]  # noqa: SIM118
    kept = {nth: [head[head >= 0] for head in layer] for nth, layer in enumerate(layers)}
    means = kept_shares(Retention(kept, tokens), min(COLUMNS, tokens)).mean(0)
    return [round(share, 4) for share in means.tolist()]
