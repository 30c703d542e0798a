"""Texts and contexts that are worked on in the background: each in a thread, within the readers' memory, in turns."""

from __future__ import annotations

import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from locret.chunked_prefill import prefill
from locret.conversation.document import Document
from locret.infer.serve.refusal import fault_of
from locret.infer.serve.turns import Turn, Turns
from locret.infer.serve.upload import Upload

if TYPE_CHECKING:
    from locret import RetentionCache
    from locret.conversation.context import Context
    from locret.conversation.long_context_model import LongContextModel

COLUMNS = 50
"""Stretches of a text for which is shown how much of them is kept."""
_LOOK = 0.1
"""Seconds after which a job that waits looks whether it is still wanted."""
_SHOWN = 0.25
"""Seconds, at least, between two counts of what is kept."""

State = Literal["waiting", "reading", "ready", "failed"]


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
    """Bytes that jobs share, first come, first served.

    Args:
        total: Bytes there are.
    """

    def __init__(self, total: int) -> None:
        self.total, self.used = total, 0
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()

    @contextmanager
    def taken(self, wanted: int, check: Callable[[], None]) -> Iterator[None]:
        """Hold so many bytes until the block ends; `check` is called while they are waited for, and raises to end that.

        Raises:
            ValueError: If there are never so many.
        """
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
                    self._changed.wait(_LOOK)
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


class Job:
    """Something that is made in the background, such as a context of a text.

    Args:
        make: Does it; it looks at `check` and reports to `progress`.
        end: Called when it has ended, however it did.
    """

    def __init__(self, make: Callable[[Job], None], end: Callable[[Job], None]) -> None:
        self.state: State = "waiting"
        self.message = ""
        """Why it failed, in one sentence."""
        self.fault = 400
        """HTTP status of the failure: 400 where what was asked cannot be done, 500 and more where the server failed."""
        self.progress = Progress()
        self.done = threading.Event()
        self.wanted = 0
        """Requests that wait for it."""
        self._make, self._end, self._cancelled = make, end, threading.Event()
        self._began = 0.0
        self._thread = threading.Thread(target=self._run, name="locret-reading", daemon=True)

    @property
    def cancelled(self) -> bool:
        """Whether it was cancelled."""
        return self._cancelled.is_set()

    @property
    def seconds(self) -> float:
        """Seconds since it began to be read."""
        return time.monotonic() - self._began if self._began else 0.0

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

    def begin(self) -> None:
        """Take note that it has its memory."""
        self.state, self._began = "reading", time.monotonic()

    def _run(self) -> None:
        try:
            self._make(self)
            self.state = "ready"
        except Cancelled:
            self.state, self.message = "failed", "it was cancelled"
        except (ValueError, OSError) as error:
            self.state, self.message = "failed", " ".join(str(error).split())
            self.fault = fault_of(error) if isinstance(error, OSError) else 400
        except Exception as error:
            self.state, self.message = "failed", f"reading it failed ({type(error).__name__}); see the server's log"
            self.fault = 500
            raise  # threading.excepthook writes the traceback
        finally:
            self._end(self)
            self.done.set()


class Reader:
    """Reads texts with one model, several side by side.

    Args:
        lm: The model.
        reading: Bytes of all readers' caches.
        reader: Bytes of one of them.
        turns: The readers' turns.
    """

    def __init__(self, lm: LongContextModel, reading: int, reader: int, turns: Turns) -> None:
        self.lm, self.turns = lm, turns
        self.room, self._each = Room(reading), reader

    @contextmanager
    def slot(self, job: Job, wanted: int | None = None) -> Iterator[None]:
        """Hold the memory of one reader, or so many bytes, until the block ends."""
        with self.room.taken(self._each if wanted is None else wanted, job.check):
            job.begin()
            yield

    def text(
        self,
        job: Job,
        upload: Upload,
        *,
        source: str,
        system: str | None,
        ids: Path | None,
        protect: Sequence[str] = (),
    ) -> Context:
        """Read a text as it is uploaded; call it within `slot`.

        Args:
            job: What it is done for.
            upload: The text.
            source: What to call it.
            system: System message.
            ids: File to write its token ids to, 4 bytes each; None: they are not kept.
            protect: What stays whatever its scores, as for `LongContextModel.read`.

        Raises:
            ValueError: If it cannot be read.
            OSError: If the disk is full.
            Cancelled: If the job was.
        """

        def check() -> None:
            job.check()
            upload.check()

        document = Document(source, upload.pieces(check), size=upload.total, unit="bytes")
        watch = _Watch(job, upload)
        job.progress = Progress(total=upload.total)
        with self.turns.turn(check) as turn, _kept_ids(ids) as keep:

            def feed(blocks: Iterator[list[int]]) -> Iterator[list[int]]:
                for block in _between_turns(blocks, turn):
                    watch.tokens += len(block)
                    self.turns.feed(len(block))
                    keep(block)
                    yield block

            def on_chunk(cache: RetentionCache) -> None:
                watch(cache)
                turn.chunk()

            context = self.lm.read_into(
                self.lm.new_cache(),
                document,
                system=system,
                progress=False,
                feed=feed,
                on_chunk=on_chunk,
                protect=protect,
            )
        watch(context.cache, last=True)
        return context

    def ids(self, job: Job, ids: Iterable[int], cache: RetentionCache) -> None:
        """Read token ids after what a cache holds; call it within `slot`. Errors as for `text`."""
        watch, fed = _Watch(job, None), list(ids)
        self.turns.feed(len(fed))
        with self.turns.turn(job.check) as turn:

            def on_chunk(cache: RetentionCache) -> None:
                watch(cache)
                turn.chunk()

            prefill(self.lm.model, torch.tensor([fed]), cache, on_chunk=on_chunk)
        watch(cache, last=True)


class _Watch:
    """Tells a job how far a cache has got."""

    def __init__(self, job: Job, upload: Upload | None) -> None:
        self._job, self._upload, self._counted = job, upload, 0.0
        self.tokens = 0
        """Tokens of the text that was taken, read or not."""

    def __call__(self, cache: RetentionCache, *, last: bool = False) -> None:
        kept, now = self._job.progress.kept, time.monotonic()
        if last or now - self._counted >= _SHOWN:
            kept, self._counted = kept_shares(cache), now
        taken = 0 if self._upload is None else self._upload.given
        self._job.progress = Progress(
            tokens=cache.seen,
            bytes=taken if last else int(taken * min(1.0, cache.seen / max(1, self.tokens))),
            total=None if self._upload is None else self._upload.total,
            units=max(layer.fill for layer in cache.governed),
            seconds=self._job.seconds,
            kept=kept,
        )


def kept_shares(cache: RetentionCache, columns: int = COLUMNS) -> tuple[float, ...]:
    """Return for equal stretches of what a cache has read which share of it is kept, as the mean over all heads."""
    columns = min(columns, cache.seen)
    counts = torch.zeros(columns)
    for layer in cache.backbone.layers:
        positions = cache.kept_positions(layer)[0].flatten().cpu()
        counts += torch.bincount(positions[positions >= 0] * columns // cache.seen, minlength=columns)[:columns]
    heads = sum(shape.num_kv_heads for shape in cache.backbone.full_shapes)
    return tuple(round(share, 4) for share in (counts * columns / (heads * cache.seen)).clamp(max=1).tolist())


def _between_turns(blocks: Iterator[list[int]], turn: Turn) -> Iterator[list[int]]:
    """Pass token ids on; while more are waited for, the turn is others'."""
    while True:
        turn.let_go()
        block = next(blocks, None)
        turn.take()
        if block is None:
            return
        yield block


@contextmanager
def _kept_ids(path: Path | None) -> Iterator[Callable[[list[int]], None]]:
    if path is None:
        yield lambda block: None
        return
    with open(path, "xb") as file:
        yield lambda block: array("I", block).tofile(file)
