"""Contexts on disk by name: read, deleted, and loaded within the memory of the plan.

A context is one file that appears whole or not at all. What is read without a name, so that a conversation goes on,
goes when it has no more room on the disk, least recently used first.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch

from locret.base.files import locked
from locret.cache.cache_file import check_header, load_cache, policy_in
from locret.chunked_prefill import prefill
from locret.conversation.model import LongContextModel
from locret.engines.prefix import Prefix
from locret.engines.transformers import Stored
from locret.infer.serve.index import UPLOADS, Entry, Index, check_name, digests
from locret.infer.serve.jobs import LOOK, Cancelled, Job, Room, Turns, read_file
from locret.infer.serve.plan import MemoryPlan, reader_bytes, working_bytes
from locret.infer.serve.refusal import Refusal, fault_of
from locret.policy.protection import closed

_log = logging.getLogger(__name__)
_FORGOTTEN = 100
"""Failed contexts that are remembered, so that one can see why."""


class Library:
    """The contexts of one folder. Its methods block, and may be called from any thread.

    They refuse (`Refusal`) with 400 where a name is no name, 404 where there is no such context, 409 where it is not
    ready or a new name is taken, 429 where too many texts wait, and 503 where the server ends.

    The folder is made if need be, and held against other servers until `close`.

    Args:
        folder: Where they are.
        lm: What reads them.
        plan: How much memory reading and loading may take.
        auto_bytes: Most bytes on disk of contexts that have no name.
        max_upload: Most bytes of one text.
        max_waiting: Most texts that are read or wait to be read.
    """

    def __init__(
        self,
        folder: str | Path,
        lm: LongContextModel,
        plan: MemoryPlan,
        *,
        auto_bytes: int = 8 << 30,
        max_upload: int = 1 << 30,
        max_waiting: int = 64,
    ) -> None:
        if auto_bytes < plan.moving:
            raise ValueError(f"--auto-contexts {auto_bytes:,} bytes hold no context; give {plan.moving:,} or more")
        self.folder, self.lm, self.plan = Path(folder).resolve(), lm, plan
        self.auto_bytes, self.max_upload, self.max_waiting = auto_bytes, max_upload, max_waiting
        self.turns = Turns()
        """The readers' turns, which give way to answers."""
        self.room = Room(plan.reading)
        """Memory of texts that are read."""
        self._lock = threading.RLock()
        self._closed, self._claims = False, set[str]()
        self._held = ExitStack()
        self._held.enter_context(locked(self.folder, f"--contexts {folder}"))
        try:
            self._index = Index(self.folder, lm)
        except BaseException:
            self._held.close()
            raise

    def close(self) -> None:
        """End all that is being read, and let go of the folder; idempotent."""
        with self._lock:
            self._closed = True
            jobs = [job for entry in self._index.named.values() if (job := entry.job)]
        for job in jobs:
            job.cancel()
        for job in jobs:
            job.join()
        with self.room.taken(self.room.total, lambda: None):  # what is read for requests sees it, and ends
            pass
        self._index.clear()
        self._held.close()

    # -- what there is ------------------------------------------------------------------------------------------------

    def entries(self) -> list[Entry]:
        """Return all contexts with a name, in the order of their names; files that somebody has put there are found."""
        with self._lock:
            self._index.scan()
            return [entry for _, entry in sorted(self._index.named.items())]

    def automatic(self) -> list[Entry]:
        """Return the contexts without a name, the least recently used first."""
        with self._lock:
            return list(self._index.automatic.values())

    def find(self, name: str) -> Entry:
        with self._lock:
            return self._index.find(name)

    def get(self, name: str) -> Entry:
        """Return a context that can be asked."""
        entry = self.find(name)
        if entry.going:
            why = f"context {name} is still being read ({entry.progress.tokens:,} tokens so far); ask again later"
            raise Refusal(409, why, param="context", code="context_not_ready", headers={"Retry-After": "1"})
        if entry.state != "ready":
            raise Refusal(409, f"context {name} cannot be asked: {entry.message}", param="context", code=entry.state)
        return entry

    # -- making contexts ----------------------------------------------------------------------------------------------

    def upload(self, name: str | None = None) -> Path:
        """Return the file for the bytes of a text that is to be read under a name; give it to `read`, or remove it."""
        if name is not None:
            self._check_new(name)
        self._check_waiting()
        path = self.folder / UPLOADS / uuid.uuid4().hex
        path.parent.mkdir(exist_ok=True)
        return path

    def write(self, file: BinaryIO, part: bytes) -> None:
        """Write a part of an upload, if all that wait to be read have room for it: together they take `max_upload`."""
        with self._lock:
            waiting = 0
            for path in (self.folder / UPLOADS).iterdir():
                with suppress(FileNotFoundError):  # it has just been read
                    waiting += path.stat().st_size
            if waiting + len(part) > self.max_upload:
                why = f"texts that wait to be read take {waiting:,} of the {self.max_upload:,} bytes of --max-upload"
                raise Refusal(503, f"{why}; try again later", headers={"Retry-After": "10"})
            file.write(part)
            file.flush()

    def read(
        self,
        name: str,
        file: Path,
        *,
        source: str | None = None,
        system: str | None = None,
        notes: dict[str, Any] | None = None,
    ) -> Entry:
        """Read a text in the background; its file is removed then."""
        called = source or name

        def work(job: Job) -> None:
            failed: tuple[int, str] | None = None
            try:
                with self.room.taken(self.plan.reader, job.check):
                    context = read_file(self.lm, self.turns, job, file, source=called, system=system)
                    about = {**(notes or {}), "seconds": round(job.progress.seconds, 3)}
                    saved = context.talk.notes(backbone=self.lm.name, upload=about)
                    self._index.save(self._index.path(name), context.cache, saved)
            except Cancelled:
                failed = 400, "it was cancelled"
            except (ValueError, OSError) as error:
                failed = fault_of(error), self._index.told(error)
            except Exception as error:
                failed = 500, f"reading it failed ({type(error).__name__}); see the server's log"
                raise  # threading.excepthook writes the traceback
            finally:
                file.unlink(missing_ok=True)
                with self._lock:
                    self._ended(entry, failed)

        with self._lock:
            self._check_new(name)
            self._check_waiting()
            entry = Entry(name, self._index.path(name), source=called, created=time.time(), notes=notes or {})
            entry.job = job = Job(work)
            job.start()
            self._index.named[name] = entry  # only now, for a system that makes no more threads raises
            return entry

    def _ended(self, entry: Entry, failed: tuple[int, str] | None) -> None:
        """Look at what has been read, or take note of why it has not: a status and a sentence."""
        if failed is None:
            self._index.examine(entry)
            return
        entry.status, (entry.fault, entry.message), entry.job = "failed", failed, None
        named = self._index.named
        for _, old in sorted((one.created, one.name) for one in named.values() if one.state == "failed")[:-_FORGOTTEN]:
            del named[old]

    def delete(self, name: str) -> None:
        """Remove a context, whatever its state; what is reading it ends first. Answers that are being written go on.

        What was made of it without a name goes too.
        """
        entry = self.find(name)
        if (job := entry.job) is not None:
            job.cancel()
            job.join()
        with self._lock:
            named = self._index.named
            if job is not None and named.get(name) not in (entry, None):  # somebody uses the name again
                return
            named.pop(name, None)
            entry.path.unlink(missing_ok=True)
            for made in self.automatic():
                if made.base == entry.key:
                    self._let_go(made)

    # -- contexts without a name --------------------------------------------------------------------------------------

    def longest(self, ids: Sequence[int], base: Entry | None = None) -> tuple[Entry | None, int]:
        """Return what has read the most of a text, and how many of its tokens; (None, 0) if nothing has.

        `base` is a context that the text follows.
        """
        with self._lock:
            before, automatic = "" if base is None else base.key, self._index.automatic
            known = {entry.read for entry in automatic.values() if entry.base == before and entry.read <= len(ids)}
            best, read = None, 0
            for count, key in digests(before, ids, sorted(known)):
                if (found := automatic.get(key)) is not None and found.state == "ready":
                    best, read = found, count
            if best is None:
                return base, 0
            automatic.move_to_end(best.key)
            return best, read

    def read_on(
        self, ids: Sequence[int], read: tuple[Entry | None, int], base: Entry | None, cancelled: Callable[[], bool]
    ) -> Entry:
        """Read all of a text into a context without a name, chunk by chunk in turns with other readers.

        A copy of what `longest` returned (`read`) reads what is new. `cancelled` is asked between chunks; what has been
        read is dropped then.
        """
        (start, done), before = read, "" if base is None else base.key
        if start is not None and done == len(ids):
            return start

        def check() -> None:
            if cancelled() or self._closed:
                raise Refusal(503, "nobody waits any more for what was to be read, or the server is about to end")

        ((_, key),) = digests(before, ids, [len(ids)])
        made = Entry(key, self._index.path(key, named=False), False, key=key, base=before, read=len(ids))
        if (found := self._claimed(key, check)) is not None:
            return found
        try:
            wanted = self.plan.reader if start is None else self._reading_bytes(start, len(ids) - done)
            with self.room.taken(wanted, check):
                load = partial(load_cache, model=self.lm.model, scorer=self.lm.scorer)
                cache = self.lm.new_cache() if start is None else self._index.load(start, load)
                if base is not None and any(one.end is None for spans in cache.protected for one in spans):
                    cache.protect(*closed(cache.protected, self._index.text_end(base)))
                with self.turns.turn(check) as next_turn:
                    prefill(self.lm.model, torch.tensor([ids[done:]]), cache, on_chunk=lambda _: next_turn())
                self._index.save(made.path, cache)
            with self._lock:
                self._index.automatic[key] = self._index.examine(made)
                if before and not any(one.key == before for one in self._index.named.values()):  # it was deleted
                    self._let_go(made)
                self._bound()
            return made
        except (ValueError, OSError) as error:
            raise Refusal(fault_of(error), f"reading this failed: {self._index.told(error)}") from None
        except Refusal:
            raise
        except Exception as error:
            _log.exception("reading for a request failed")
            raise Refusal(500, f"reading this failed ({type(error).__name__}); see the server's log") from error
        finally:
            with self._lock:
                self._claims.discard(key)

    def _claimed(self, key: str, check: Callable[[], None]) -> Entry | None:
        """Return what another request has read, after a wait for its end; None where this one is to read it."""
        while True:
            with self._lock:
                if (found := self._index.automatic.get(key)) is not None and found.state == "ready":
                    self._index.automatic.move_to_end(key)
                    return found
                if key not in self._claims:
                    self._claims.add(key)
                    return None
            check()
            time.sleep(LOOK)

    # -- from disk and onto it ----------------------------------------------------------------------------------------

    def prefix(self, entry: Entry) -> Prefix:
        """Return the units of a context from its file."""
        try:
            found: Prefix = self._index.load(entry, partial(Prefix.from_file, uneven=True))
        except (ValueError, OSError) as error:
            with self._lock:
                raise self._index.unusable(entry, error) from error
        return found

    def stored(self, entry: Entry) -> Stored:
        """Return a context as an engine takes it, which loads its units where it has to."""

        @contextmanager
        def load() -> Iterator[Prefix]:
            with self._index.moving:
                yield self.prefix(entry)

        return Stored(entry.key.encode(), entry.units, entry.end, load)

    def _reading_bytes(self, entry: Entry, tokens: int) -> int:
        """Return what a copy of a context needs to read on: its file says by which policy, and may hold more units."""
        state = check_header(entry.path, self.lm.model, self.lm.scorer)
        policy = policy_in(state)
        length = entry.units + tokens if policy.plans_by_length else None
        more_to_work = max(0, working_bytes(self.lm, policy) - self.plan.working)
        return max(self.plan.reader, reader_bytes(self.lm, policy, length) + more_to_work)

    def _bound(self) -> None:
        """Delete contexts without a name, least recently used first, until the others fit."""
        entries = self.automatic()
        size = sum(entry.size for entry in entries)
        for entry in entries[:-1]:
            if size <= self.auto_bytes:
                return
            size -= entry.size
            self._let_go(entry)

    def _let_go(self, entry: Entry) -> None:
        del self._index.automatic[entry.key]
        entry.path.unlink(missing_ok=True)

    # -- checks -------------------------------------------------------------------------------------------------------

    def _check_new(self, name: str) -> None:
        """Refuse a name that is none, or taken."""
        check_name(name)
        with self._lock:
            if self._closed:
                raise Refusal(503, "the server is about to end; try again later")
            self._index.scan()
            if (entry := self._index.named.get(name)) is not None and entry.state != "failed":
                doing = f"is being read; look at GET /v1/contexts/{name}," if entry.going else "is there already;"
                why = f"a context {name} {doing} choose another name, or delete it first"
                raise Refusal(409, why, param="name", code="context_exists")

    def _check_waiting(self) -> None:
        with self._lock:
            waiting = sum(entry.going for entry in self._index.named.values())
        if waiting >= self.max_waiting:
            why = f"{waiting} texts are read or wait for it, and no more may wait; try again later"
            raise Refusal(429, why, code="queue_full", headers={"Retry-After": "10"})
