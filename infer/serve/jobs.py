"""Texts and contexts that are worked on in the background: each in a thread, within the readers' memory, in turns."""

from __future__ import annotations

import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from locret.chunked_prefill import prefill
from locret.conversation.text import Document
from locret.infer.serve.kept import mean_shares
from locret.infer.serve.refusal import fault_of, one_line
from locret.infer.serve.turns import Turn, Turns
from locret.infer.serve.upload import Upload

if TYPE_CHECKING:
    from locret import RetentionCache
    from locret.conversation.context import Context
    from locret.conversation.model import LongContextModel

_LOOK = 0.1
"""Seconds after which a job that waits looks whether it is still wanted."""
_SHOWN = 0.25
"""Seconds, at least, between two counts of what is kept."""


class Cancelled(Exception):
    """Somebody does not want it any more."""


@dataclass(frozen=True)
class Progress:
    """How far a job has got."""

    tokens: int = 0
    """Tokens read."""
    bytes: int = 0
    """About how many bytes of the text they are."""
    total: int | None = None
    """Bytes of the text, if known."""
    units: int = 0
    """Units per KV head that are held."""
    seconds: float = 0.0
    """Since it began to be read."""
    kept: tuple[float, ...] = ()
    """For stretches of what was read, all equally long: the share of it that is kept, 0 to 1."""


class Room:
    """Bytes that jobs share, first come, first served."""

    def __init__(self, total: int) -> None:
        self.total, self.used = total, 0
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()

    def make_room(self, wanted: int) -> bool:
        """Return whether so many bytes are free."""
        return self.used + wanted <= self.total

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
                while self._waiting[0] is not ticket or not self.make_room(wanted):
                    self._changed.wait(_LOOK)
                    check()
                self.used += wanted
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()
        try:
            yield
        finally:
            self.give(wanted)

    def give(self, size: int) -> None:
        """Give bytes back."""
        with self._changed:
            self.used -= size
            self._changed.notify_all()


class Job:
    """Something that `make` makes in the background, such as a context of a text; it looks at `check`.

    `end` is called when it has ended, however it did; `told` says how a failure is told.
    """

    def __init__(
        self, make: Callable[[Job], None], end: Callable[[Job], None], told: Callable[[Exception], str] = one_line
    ) -> None:
        self.ready = False
        """Whether it has been made."""
        self.message = ""
        """Why it failed, in one sentence."""
        self.fault = 400
        """HTTP status of the failure: 400 where what was asked cannot be done, 500 and more where the server failed."""
        self.progress, self.done = Progress(), threading.Event()
        self.wanted = 0
        """Requests that wait for it."""
        self.began = 0.0
        """When it got its memory, by `time.monotonic`; 0 while it waits."""
        self._make, self._end, self._told, self._cancelled = make, end, told, threading.Event()
        self._thread = threading.Thread(target=self._run, name="locret-reading", daemon=True)

    @property
    def cancelled(self) -> bool:
        """Whether it was cancelled."""
        return self._cancelled.is_set()

    @property
    def seconds(self) -> float:
        """Seconds since it got its memory."""
        return time.monotonic() - self.began if self.began else 0.0

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

    @contextmanager
    def holding(self, room: Room, wanted: int) -> Iterator[None]:
        """Hold memory until the block ends."""
        with room.taken(wanted, self.check):
            self.began = time.monotonic()
            yield

    def _run(self) -> None:
        try:
            self._make(self)
            self.ready = True
        except Cancelled:
            self.message = "it was cancelled"
        except (ValueError, OSError) as error:
            self.message = self._told(error)
            self.fault = fault_of(error) if isinstance(error, OSError) else 400
        except Exception as error:
            self.message, self.fault = f"reading it failed ({type(error).__name__}); see the server's log", 500
            raise  # threading.excepthook writes the traceback
        finally:
            self._end(self)
            self.done.set()


def read_text(
    lm: LongContextModel,
    turns: Turns,
    job: Job,
    upload: Upload,
    *,
    source: str,
    system: str | None,
    ids: Path,
    protect: Sequence[str] = (),
) -> Context:
    """Read a text as it is uploaded, and write its token ids to a file; the job holds the memory of a reader."""

    def check() -> None:
        job.check()
        upload.check()

    document = Document(source, upload.pieces(check), size=upload.total, unit="bytes")
    watch = _Watch(job, upload)
    job.progress = Progress(total=upload.total)
    with turns.turn(check) as turn, open(ids, "xb") as file:

        def feed(blocks: Iterator[list[int]]) -> Iterator[list[int]]:
            for block in _between_turns(blocks, turn):
                watch.tokens += len(block)
                turns.feed(len(block))
                array("I", block).tofile(file)
                yield block

        def on_chunk(cache: RetentionCache) -> None:
            watch(cache)
            turn.chunk()

        cache, reading = lm.new_cache(), {"feed": feed, "on_chunk": on_chunk, "protect": protect}
        context = lm.read_into(cache, document, system=system, progress=False, **reading)  # type: ignore[arg-type]
    watch(context.cache, last=True)
    return context


def read_ids(lm: LongContextModel, turns: Turns, job: Job, ids: Sequence[int], cache: RetentionCache) -> None:
    """Read token ids after what a cache holds; the job holds the memory. Errors as for `read_text`."""
    watch = _Watch(job)
    turns.feed(len(ids))
    with turns.turn(job.check) as turn:

        def on_chunk(cache: RetentionCache) -> None:
            watch(cache)
            turn.chunk()

        prefill(lm.model, torch.tensor([ids]), cache, on_chunk=on_chunk)
    watch(cache, last=True)


class _Watch:
    """Tells a job how far a cache has got."""

    def __init__(self, job: Job, upload: Upload | None = None) -> None:
        self._job, self._upload, self._counted = job, upload, 0.0
        self.tokens = 0
        """Tokens of the text that was taken, read or not."""

    def __call__(self, cache: RetentionCache, *, last: bool = False) -> None:
        kept, now = self._job.progress.kept, time.monotonic()
        if last or now - self._counted >= _SHOWN:
            kept, self._counted = _kept(cache), now
        taken = 0 if self._upload is None else self._upload.given
        self._job.progress = Progress(
            tokens=cache.seen,
            bytes=taken if last else int(taken * min(1.0, cache.seen / max(1, self.tokens))),
            total=None if self._upload is None else self._upload.total,
            units=max(layer.fill for layer in cache.governed),
            seconds=self._job.seconds,
            kept=kept,
        )


def _kept(cache: RetentionCache) -> tuple[float, ...]:
    positions = [cache.kept_positions(layer)[0].cpu() for layer in cache.backbone.layers]
    return mean_shares(positions, cache.seen)


def _between_turns(blocks: Iterator[list[int]], turn: Turn) -> Iterator[list[int]]:
    """Pass token ids on; while more are waited for, the turn is others'."""
    while True:
        turn.let_go()
        block = next(blocks, None)
        turn.take()
        if block is None:
            return
        yield block
