"""Contexts on disk by name: found, read, forked, composed, shrunk, deleted, and loaded within the memory of the plan.

A context is one file, `NAME.ctx`, that appears whole or not at all; the token ids of its text are in the folder
`texts`, if they are kept. What is read without a name, so that a conversation goes on, is in the folder `auto`, under
the digest of its token ids, and goes when it has no more room on the disk, least recently used first.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import threading
import time
import uuid
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from locret.cache.cache_file import check_header, load_cache, save_cache
from locret.conversation.chat import save
from locret.conversation.compose import compose
from locret.conversation.rules import DOCUMENT, SYSTEM, check_named, rules_of
from locret.conversation.saved_turns import saved_turns
from locret.conversation.templates import encode
from locret.engines.prefix import Prefix
from locret.files import PARTIAL, locked, written_whole
from locret.infer.serve.engine import NoRoom
from locret.infer.serve.entry import IDS, TEXTS, Entry
from locret.infer.serve.keys import digest, digests, shrunk_key
from locret.infer.serve.loaded import Loaded
from locret.infer.serve.plan import MemoryPlan, reader_bytes
from locret.infer.serve.reading import Job, Reader
from locret.infer.serve.refusal import Refusal, fault_of
from locret.infer.serve.turns import Turns
from locret.infer.serve.upload import Upload
from locret.nearest import nearest
from locret.policy.policy import RetentionPolicy
from locret.policy.protection import Span, closed

if TYPE_CHECKING:
    from locret import RetentionCache
    from locret.conversation.context import Context
    from locret.conversation.long_context_model import LongContextModel

SUFFIX = ".ctx"
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
"""What a context may be called: no name is a path, hidden, or longer than a file system takes."""
AUTO, UPLOADS = "auto", ".uploads"
_STORED = 4
"""Texts of the largest size that are on disk at once until they are read, or as many bytes of smaller ones."""
_WORTH = 1 << 17
"""Bytes of a text that are worth a reader; the tokenizer's window."""
_COPIES = 3.5
"""Of contexts that are joined: themselves, a copy of each, the whole, and what joining works with; measured."""
_FORGOTTEN = 100
"""Failed contexts that are remembered, so that one can see why."""


class Library:
    """The contexts of one folder.

    Args:
        folder: Where they are; made if need be, and held against other servers until `close`.
        lm: What reads them.
        plan: How much memory reading and loading may take.
        auto_bytes: Most bytes on disk of contexts that have no name.
        max_upload: Most bytes of one text.
        max_waiting: Most texts that are read or wait to be read.
        keep_text: Keep the token ids of uploaded texts, so that the passages that were kept can be shown.
        stall: Seconds without a byte after which an upload is given up.

    Raises:
        ValueError: If another process holds the folder, or it is a file.
        OSError: If it cannot be made or written.
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
        keep_text: bool = True,
        stall: float = 60.0,
    ) -> None:
        if auto_bytes < plan.moving:
            raise ValueError(
                f"--auto-contexts {auto_bytes:,} bytes cannot hold one context, which takes up to {plan.moving:,}; "
                "give more"
            )
        self.folder, self.lm, self.plan = Path(folder).resolve(), lm, plan
        self.auto_bytes, self.max_upload, self.max_waiting = auto_bytes, max_upload, max_waiting
        self.keep_text, self.stall = keep_text, stall
        self.turns = Turns()
        """The readers' turns; an engine's answers are known to them."""
        self.reader = Reader(lm, plan.reading, plan.reader, self.turns)
        settings = json.dumps(lm.policy.to_dict(), sort_keys=True)
        self._policy = hashlib.sha256(settings.encode()).hexdigest()
        """What texts without a base follow: a server with another policy keeps other units of them."""
        self._entries: dict[str, Entry] = {}
        self._automatic: OrderedDict[str, Entry] = OrderedDict()
        self._leaving: weakref.WeakValueDictionary[str, Entry] = weakref.WeakValueDictionary()
        """Those without a name that are to go, but are still asked."""
        self._loaded = Loaded(plan.loaded)
        self._uploads: weakref.WeakSet[Upload] = weakref.WeakSet()
        self._lock = threading.RLock()
        self._moving = threading.Lock()
        """Held by who writes a context to disk or reads one, as memory is planned for one at a time."""
        self._closed = False
        self._held = ExitStack()
        self._held.enter_context(locked(self.folder, f"--contexts {folder}"))
        try:
            self._clean()
            self._find()
            self._find_automatic()
        except BaseException:
            self._held.close()
            raise

    def close(self) -> None:
        """End all that is being read, and let go of the folder; idempotent."""
        with self._lock:
            self._closed = True
            jobs = [entry.job for entry in (*self._entries.values(), *self._automatic.values()) if entry.job]
        for job in jobs:
            job.cancel(wait=False)
        for job in jobs:
            job.cancel()
        shutil.rmtree(self.folder / UPLOADS, ignore_errors=True)
        for folder in (self.folder / AUTO, self.folder / TEXTS):
            with suppress(OSError):
                folder.rmdir()
        self._held.close()

    # -- what there is ------------------------------------------------------------------------------------------------

    def entries(self) -> list[Entry]:
        """Return all contexts with a name, in the order of their names; files that somebody has put there are found."""
        self._find()
        with self._lock:
            return [self._entries[name] for name in sorted(self._entries)]

    def automatic(self) -> list[Entry]:
        """Return the contexts without a name, the least recently used first."""
        with self._lock:
            return list(self._automatic.values())

    def find(self, name: str) -> Entry:
        """Return a context in any state.

        Raises:
            Refusal: 404 with the nearest names if there is none.
        """
        with self._lock:
            entry = self._entries.get(name)
        if entry is None or (entry.job is None and _changed(entry)):
            self._find()
            with self._lock:
                entry = self._entries.get(name)
        if entry is None:
            near = nearest(name, tuple(self._entries))
            hint = f"; did you mean {' or '.join(near)}?" if near else "; GET /v1/contexts lists them"
            raise Refusal(404, f"there is no context {_shown(name)}{hint}", param="context", code="context_not_found")
        return entry

    def get(self, name: str) -> Entry:
        """Return a context that can be asked.

        Raises:
            Refusal: 404 with the nearest names if there is none, 409 while it is being read, if that failed, or if its
                file is damaged.
        """
        entry = self.find(name)
        if entry.state in ("waiting", "reading"):
            raise Refusal(
                409,
                f"context {name} is still being read ({entry.progress.tokens:,} tokens so far); ask again when it is "
                "ready",
                param="context",
                code="context_not_ready",
                headers={"Retry-After": "1"},
            )
        if entry.state != "ready":
            raise Refusal(409, f"context {name} cannot be asked: {entry.message}", param="context", code=entry.state)
        return entry

    @property
    def used_bytes(self) -> dict[str, int]:
        """Bytes in use of what is planned: "reading" and "loaded"."""
        return {"reading": self.reader.room.used, "loaded": self._loaded.used}

    @property
    def loaded(self) -> int:
        """Contexts in memory."""
        return len(self._loaded)

    # -- making contexts ----------------------------------------------------------------------------------------------

    def upload(self, name: str, *, total: int | None = None) -> Upload:
        """Return what takes the bytes of a text that is to be read; give it to `read`, or remove it.

        Raises:
            Refusal: If the name is no name or taken (400, 409), the text too long (413), too many wait (429), or the
                disk is full (507) or fails (503).
        """
        self._check_new(name)
        if total is not None and total > self.max_upload:
            raise Refusal(
                413,
                f"the text has {total:,} bytes, more than the {self.max_upload:,} that the server takes; upload it in "
                "parts, or start the server with a larger --max-upload",
            )
        self._check_waiting()
        if (stored := sum(upload.written for upload in list(self._uploads))) >= _STORED * self.max_upload:
            raise Refusal(
                429,
                f"texts of {stored:,} bytes are stored until they are read, and no more are taken; try again later",
                code="queue_full",
                headers={"Retry-After": "10"},
            )
        path = self.folder / UPLOADS / uuid.uuid4().hex
        try:
            path.parent.mkdir(exist_ok=True)
            upload = Upload(path, most=self.max_upload, total=total, stall=self.stall)
        except OSError as error:
            raise not_stored(error) from error
        self._uploads.add(upload)
        return upload

    def read(
        self,
        name: str,
        upload: Upload,
        *,
        source: str | None = None,
        system: str | None = None,
        protect: Sequence[str] = (),
    ) -> Entry:
        """Read a text in the background, as it is uploaded.

        Raises:
            Refusal: If the name is no name or taken (400, 409), too many wait (429), or there is nothing of what is to
                be protected in the text (400).
        """
        try:
            # Turns that follow the text are read by requests, whose tokens nothing protects.
            if rules := rules_of(protect):
                check_named(rules, (*([SYSTEM] if system and self.lm.system_end(system) else ()), DOCUMENT))
        except ValueError as error:
            raise Refusal(400, str(error), param="protect") from None
        temporary = upload.path.with_suffix(IDS)
        called = source or name

        def make(job: Job) -> None:
            upload.wait(_WORTH, job.check)  # with less there is no token yet, and a reader for somebody else
            with self.reader.slot(job):
                context = self.reader.text(
                    job,
                    upload,
                    source=called,
                    system=system,
                    ids=temporary if self.keep_text else None,
                    protect=protect,
                )
                notes = {"bytes": upload.written, "sha256": upload.digest, "seconds": round(job.seconds, 3)}
                self._save(name, context, notes, temporary if self.keep_text else None)

        def end(job: Job) -> None:
            if job.state != "ready":
                upload.fail(job.message, job.fault)
            upload.remove()
            self._uploads.discard(upload)
            temporary.unlink(missing_ok=True)

        return self._begin(name, called, make, end)

    def fork(self, name: str, new: str) -> Entry:
        """Copy a context under a new name.

        Raises:
            Refusal: As `get` for the one, and if the other is no name or taken.
        """
        entry = self.get(name)

        def make(job: Job) -> None:
            with self._there([entry]):
                self._copy_text(entry, new)
                with self._moving:
                    _copy(entry.path, self.folder / f"{new}{SUFFIX}")

        return self._made_now(new, entry.source, make)

    def compose(self, names: Sequence[str], new: str, *, budget: int | None = None, shares: Any = "fair") -> Entry:
        """Join contexts in their order under a new name, in the background.

        Args:
            names: The contexts, two or more.
            new: What to call the whole.
            budget: Units per KV head of the whole; None: all that are held.
            shares: As for `locret.compose`.

        Raises:
            Refusal: As `get` for each of them, and if the new name is no name or taken.
        """
        entries = [self.get(name) for name in names]
        if len(entries) < 2:
            raise Refusal(400, "compose joins two or more contexts; name them in a list", param="contexts")

        def make(job: Job) -> None:
            with self._working(job, entries):
                parts = [self._load(entry) for entry in entries]
                with self.turns.turn(job.check):
                    whole = compose(parts, budget, shares, name=source)
                self._save(new, whole, {"of": list(names)}, None)

        source = " + ".join(names)
        return self._begin(new, source, make)

    def shrink(self, name: str, new: str, budget: int) -> Entry:
        """Make a smaller context of one, under a new name, in the background.

        Raises:
            Refusal: As `get` for the one, and if the other is no name or taken, or the budget is not smaller.
        """
        entry = self._to_shrink(name, budget)

        def make(job: Job) -> None:
            with self._working(job, [entry]):
                small = self._load(entry).shrink(budget)
                self._copy_text(entry, new)
                self._save(new, small, {"of": [name]}, None)

        return self._begin(new, entry.source, make)

    def delete(self, name: str) -> None:
        """Remove a context, whatever its state; what is reading it ends first. Answers that use it go on.

        What was made of it without a name goes too, unless a fork holds the same.

        Raises:
            Refusal: 404 if there is none.
        """
        entry = self.find(name)
        if (job := entry.job) is not None:
            job.cancel()
        with self._lock:
            if job is not None and self._entries.get(name) not in (entry, None):  # somebody uses the name again
                return
            self._entries.pop(name, None)
            self._loaded.forget(entry.key)
            for file in (entry.path, entry.ids):
                _remove(file)
            if not any(one.key == entry.key for one in self._entries.values()):
                for made in list(self._automatic.values()):
                    if made.root and made.root == entry.key and made.state == "ready":
                        self._loaded.forget(made.key)
                        self._let_go(made)

    # -- contexts without a name --------------------------------------------------------------------------------------

    def shrunk(self, name: str, budget: int, cancelled: Callable[[], bool] = lambda: False) -> Entry:
        """Return a context with fewer units, which is made once and kept without a name.

        Args:
            name: The context.
            budget: Units per KV head.
            cancelled: Asked while it is made; nobody waits for it any more then.

        Raises:
            Refusal: As for `get`, and 400 if it has fewer units than that.
        """
        entry = self.get(name)
        if entry.units == budget:
            return entry
        entry, key = self._to_shrink(name, budget), shrunk_key(entry, budget)

        def make(job: Job) -> None:
            with self._working(job, [entry]):
                cache = self._load(entry).shrink(budget).cache
                cache.protected = closed(cache.protected, self._text_end(entry))
                self._save_automatic(key, cache, entry.key, entry.root)

        return self._made_automatic(key, entry.source, make, cancelled)

    def has_shrunk(self, name: str, budget: int) -> bool:
        """Return whether a context has no more units than that, or the smaller one is there.

        Raises:
            Refusal: As for `get`.
        """
        entry = self.get(name)
        with self._lock:
            key = shrunk_key(entry, budget)
            small = self._automatic.get(key) or self._leaving.get(key)
        return budget >= entry.units or (small is not None and small.state == "ready")

    def longest(
        self, ids: Sequence[int], base: Entry | None = None, protected: Sequence[Span] = ()
    ) -> tuple[Entry | None, int]:
        """Return what has read the most of a text, and how many of its tokens; (None, 0) if nothing has.

        Args:
            ids: Token ids of the text.
            base: A context that the text follows; None if it follows nothing.
            protected: What of the text is to be protected: what has read it has to have protected as much of it.
        """
        with self._lock:
            before = self._policy if base is None else base.key
            known = {
                entry.notes["read"]
                for entry in self._automatic.values()
                if entry.state == "ready" and entry.notes.get("base") == before and entry.notes["read"] <= len(ids)
            }
            best, read = None, 0
            for count, key in digests(before, "read", ids, sorted(known), protected):
                if (found := self._automatic.get(key)) is not None and found.state == "ready":
                    best, read = found, count
            if best is None:
                return base, 0
            self._automatic.move_to_end(best.key)
            with suppress(OSError):
                os.utime(best.path)
            return best, read

    def read_on(
        self,
        ids: Sequence[int],
        read: tuple[Entry | None, int],
        base: Entry | None,
        cancelled: Callable[[], bool],
        protected: Sequence[Span] = (),
    ) -> Entry:
        """Read all of a text into a context without a name, chunk by chunk in turns with other readers.

        Args:
            ids: Token ids of the text, all of which are read.
            read: What `longest` returned: a copy of it reads what is new.
            base: As for `longest`.
            cancelled: Asked between chunks; what has been read is dropped then.
            protected: What of the ids is protected; what a base protects is besides.

        Raises:
            Refusal: If too many readers wait (429), the server ends (503), or it failed.
        """
        start, done = read
        before = self._policy if base is None else base.key
        key = digest(before, "read", ids, protected)
        if start is not None and done == len(ids):
            return start

        def make(job: Job) -> None:
            with self.reader.slot(job, None if start is None else self._reading_bytes(start, len(ids) - done)):
                cache = self.lm.new_cache() if start is None else self._load_cache(start)
                if base is not None and any(one.end is None for spans in cache.protected for one in spans):
                    cache.protect(*closed(cache.protected, self._text_end(base)))
                if protected:
                    cache.protect(protected)
                self.reader.ids(job, ids[done:], cache)
                self._save_automatic(key, cache, before, "" if base is None else base.root, len(ids))

        return self._made_automatic(key, "", make, cancelled)

    # -- into memory --------------------------------------------------------------------------------------------------

    def prefix(self, entry: Entry) -> Prefix:
        """Return the units of a context, from memory or from its file; see `Entry.prefix`."""
        if (prefix := self._loaded.get(entry.key)) is not None:
            return prefix
        with self._moving:
            if (prefix := self._loaded.get(entry.key)) is not None:
                return prefix
            if not self._loaded.make_room(self._prefix_bytes(entry)):
                raise NoRoom("contexts that are being asked take all memory there is for them")
            try:
                prefix = Prefix.from_file(entry.path)
                self._check_same(entry)
                return self._loaded.put(entry.key, prefix)
            except (ValueError, OSError) as error:
                raise self._damaged(entry, error) from error

    def _prefix_bytes(self, entry: Entry) -> int:
        wanted = entry.units * self.plan.unit
        if wanted > self.plan.loaded:
            raise Refusal(
                400,
                f"context {entry.name} has {entry.units:,} units and takes {wanted:,} bytes, more than the "
                f"{self.plan.loaded:,} that --kv-memory leaves for contexts in memory; shrink it, or start the server "
                "with more",
                param="context",
            )
        return wanted

    @contextmanager
    def _working(self, job: Job, entries: Sequence[Entry]) -> Iterator[None]:
        """Hold the memory that it takes to join or cut contexts, until the block ends.

        Raises:
            ValueError: If that is never free.
        """
        wanted = int(_COPIES * sum(entry.size for entry in entries))
        if wanted > self.plan.loaded and wanted > self.plan.reading:
            raise ValueError(
                f"this takes {wanted:,} bytes, but --kv-memory leaves {self.plan.loaded:,} for contexts in memory and "
                f"{self.plan.reading:,} for readers; take fewer contexts, shrink them, or start the server with more"
            )
        with self._there(entries):
            if wanted > self.plan.loaded:
                with self.reader.slot(job, wanted):
                    yield
            else:
                with self._loaded.taken(wanted, job.check):
                    job.begin()
                    yield

    @contextmanager
    def _there(self, entries: Sequence[Entry]) -> Iterator[None]:
        """Say of what is made of contexts within the block why it fails if one of them goes meanwhile."""
        try:
            yield
        except (ValueError, OSError, SafetensorError) as error:
            for entry in entries:
                if not entry.path.exists():
                    raise ValueError(f"context {entry.name} was deleted meanwhile") from error
            raise

    def _reading_bytes(self, entry: Entry, tokens: int) -> int:
        """Return what a copy of a context needs to read on: its file says by which policy, and may hold more units."""
        state = check_header(entry.path, self.lm.model, self.lm.scorer)
        following = state.get("following", ["stabilizers"])  # files of earlier versions do not say
        policy = RetentionPolicy.from_dict(state["policy"], "policy", following)
        length = entry.units + tokens if policy.plans_by_length else None
        return max(self.plan.reader, reader_bytes(self.lm, policy, length) + self.plan.more_to_work(self.lm, policy))

    def _load_cache(self, entry: Entry) -> RetentionCache:
        with self._moving:
            cache = load_cache(entry.path, self.lm.model, self.lm.scorer)
            self._check_same(entry)
            return cache

    def _text_end(self, entry: Entry) -> int:
        """Return where the text of a context with a name ends: after the words that wait for what follows them."""
        stream, *_ = saved_turns(entry.path, self.lm.tokenizer, self.lm._vocabulary)
        return entry.tokens + len(encode(self.lm.tokenizer, stream.pending))

    def _load(self, entry: Entry) -> Context:
        with self._moving:
            context = self.lm.load(entry.path)
            self._check_same(entry)
            return context

    def _check_same(self, entry: Entry) -> None:
        """Look whether a file that was just read is the one that was asked for; what is loaded is found by its key.

        Raises:
            ValueError: If another context has taken its name meanwhile.
        """
        if _changed(entry) and self._examine(Entry(entry.name, entry.path, library=self)).key != entry.key:
            raise ValueError("another context has taken its name meanwhile; ask again")

    # -- onto disk ----------------------------------------------------------------------------------------------------

    def _save(self, name: str, context: Context, notes: dict[str, Any], ids: Path | None) -> None:
        if ids is not None:
            (self.folder / TEXTS).mkdir(exist_ok=True)
            os.replace(ids, self.folder / TEXTS / f"{name}{IDS}")
        path = self.folder / f"{name}{SUFFIX}"
        with self._moving:
            parts = (context.name, context._stream, context._transcript, context.sources, context.protection)
            save(path, context.cache, *parts, upload=notes)

    def _copy_text(self, entry: Entry, new: str) -> None:
        if entry.has_text:
            with self._moving:
                _copy(entry.ids, self.folder / TEXTS / f"{new}{IDS}")

    def _save_automatic(self, key: str, cache: RetentionCache, base: str, root: str, read: int = 0) -> None:
        folder = self.folder / AUTO
        folder.mkdir(exist_ok=True)
        with self._moving:
            save_cache(
                cache, folder / f"{key}{SUFFIX}", notes={"automatic": {"base": base, "root": root, "read": read}}
            )

    def _begin(
        self, name: str, source: str, make: Callable[[Job], None], end: Callable[[Job], None] | None = None
    ) -> Entry:
        """Make a context in the background."""

        def ended(job: Job) -> None:
            if end is not None:
                end(job)
            self._settle(name, entry, job)

        job = Job(self._told(make), ended)
        with self._lock:
            self._check_new(name)
            self._check_waiting()
            path = self.folder / f"{name}{SUFFIX}"
            entry = Entry(name, path, source=source, created=time.time(), job=job, library=self)
            self._entries[name] = entry
            job.start()
        return entry

    def _made_now(self, name: str, source: str, make: Callable[[Job], None]) -> Entry:
        """Make a context at once."""
        entry = self._begin(name, source, make)
        if (job := entry.job) is not None:
            job.done.wait()
        return entry

    def _told(self, make: Callable[[Job], None]) -> Callable[[Job], None]:
        """Let messages name contexts, not where the server keeps them."""

        def told(job: Job) -> None:
            try:
                make(job)
            except ValueError as error:
                raise ValueError(self._public(error)) from error
            except OSError as error:
                failed = OSError(self._public(error))
                failed.errno = error.errno
                raise failed from error

        return told

    def _public(self, error: Exception) -> str:
        out = _way_out(error) if isinstance(error, OSError) else ""
        reason = f"{error.strerror}; {out}" if isinstance(error, OSError) and error.strerror else str(error)
        text = " ".join(reason.split()).replace(f"{self.folder}{os.sep}", "").replace(str(self.folder), "the folder")
        return text.replace("choose another folder or make room", out)

    def _settle(self, name: str, entry: Entry, job: Job) -> None:
        """Take note of what became of a job."""
        with self._lock:
            if job.state == "ready":
                self._examine(entry)
                return
            entry.ids.unlink(missing_ok=True)
            entry.status, entry.message, entry.fault, entry.job = "failed", job.message, job.fault, None
            failed = [other for other in self._entries.values() if other.state == "failed"]
            for other in sorted(failed, key=lambda other: other.created)[:-_FORGOTTEN]:
                del self._entries[other.name]

    def _made_automatic(
        self, key: str, source: str, make: Callable[[Job], None], cancelled: Callable[[], bool]
    ) -> Entry:
        """Return a context without a name once it has been made, by this request or another."""

        def ended(job: Job) -> None:
            with self._lock:
                if job.state == "ready":
                    self._examine(entry)
                    if entry.root and not any(one.key == entry.root for one in self._entries.values()):
                        self._let_go(entry)  # what it was made of was deleted meanwhile
                    self._bound()
                else:
                    self._automatic.pop(key, None)

        with self._lock:
            if (left := self._leaving.pop(key, None)) is not None and key not in self._automatic:
                self._automatic[key] = left
            if key in self._automatic:
                entry = self._automatic[key]
                running = entry.job
            else:
                self._check_waiting()
                path, running = self.folder / AUTO / f"{key}{SUFFIX}", Job(self._told(make), ended)
                entry = Entry(key, path, source=source, created=time.time(), job=running, library=self)
                self._automatic[key] = entry
                running.start()
            if running is not None:
                running.wanted += 1
        if running is not None:
            while not running.done.wait(0.05):
                if cancelled():
                    with self._lock:
                        running.wanted -= 1
                        if not running.wanted:  # others may still want it
                            running.cancel(wait=False)
                    raise Refusal(503, "nobody waits any more for what was to be read")
            if running.cancelled and not self._closed:  # by those who wanted it before
                return self._made_automatic(key, source, make, cancelled)
            if running.state != "ready":
                status = 503 if running.cancelled else running.fault
                raise Refusal(status, f"reading this failed: {running.message}")
        with self._lock:
            if key in self._automatic:
                self._automatic.move_to_end(key)
        return entry

    def _bound(self) -> None:
        """Delete contexts without a name, least recently used first, until the others fit.

        The file of one that a request still needs goes with the request.
        """
        sizes = sum(entry.size for entry in self._automatic.values())
        for entry in list(self._automatic.values())[:-1]:
            if sizes <= self.auto_bytes:
                return
            if entry.state == "ready":
                sizes -= entry.size
                self._let_go(entry)

    def _let_go(self, entry: Entry) -> None:
        del self._automatic[entry.key]
        self._leaving[entry.key] = entry
        weakref.finalize(entry, self._gone, entry.key, entry.path).atexit = False

    def _gone(self, key: str, path: Path) -> None:
        if key not in self._automatic:
            path.unlink(missing_ok=True)

    # -- checks -------------------------------------------------------------------------------------------------------

    def _check_new(self, name: str) -> None:
        """Refuse a name that is none, or taken.

        Raises:
            Refusal: Saying which.
        """
        check_name(name)
        with self._lock:
            if self._closed:
                raise Refusal(503, "the server is about to end; try again later")
            self._find()
            entry = self._entries.get(name)
            if entry is not None and entry.state != "failed":
                doing = "is being read" if entry.state in ("waiting", "reading") else "is there already"
                raise Refusal(
                    409,
                    f"a context {name} {doing}; choose another name, or delete it first",
                    param="name",
                    code="context_exists",
                )

    def _check_waiting(self) -> None:
        with self._lock:
            every = (*self._entries.values(), *self._automatic.values())
            waiting = sum(entry.state in ("waiting", "reading") for entry in every)
        if waiting >= self.max_waiting:
            raise Refusal(
                429,
                f"{waiting} texts are read or wait for it, and no more may wait; try again later",
                code="queue_full",
                headers={"Retry-After": "10"},
            )

    def _to_shrink(self, name: str, budget: int) -> Entry:
        entry = self.get(name)
        if not 1 <= budget < entry.units:
            raise Refusal(
                400,
                f"budget={budget} is not fewer than the {entry.units:,} units of context {name}; give a number from 1 "
                f"to {entry.units - 1:,}",
                param="budget",
            )
        return entry

    def _damaged(self, entry: Entry, error: Exception) -> Refusal:
        """Take note that a file cannot be used, and return what to say."""
        with self._lock:
            if not entry.path.exists():
                self._entries.pop(entry.name, None)
                self._automatic.pop(entry.key, None)
                return Refusal(404, f"context {entry.name} was deleted", param="context", code="context_not_found")
            if isinstance(error, OSError):  # the disk's trouble, not the file's
                return Refusal(503, f"context {entry.name} cannot be read: {self._public(error)}")
            entry.status, entry.message = "damaged", self._public(error)
        return Refusal(409, f"context {entry.name} cannot be asked: {entry.message}", param="context", code="damaged")

    # -- finding ------------------------------------------------------------------------------------------------------

    def _clean(self) -> None:
        """Remove what a killed server was about to write; `locked` has removed half-written files of the folder."""
        shutil.rmtree(self.folder / UPLOADS, ignore_errors=True)
        for folder in (self.folder / AUTO, self.folder / TEXTS):
            for partial in folder.glob(PARTIAL):
                shutil.rmtree(partial, ignore_errors=True)
        for ids in (self.folder / TEXTS).glob(f"*{IDS}"):
            if not (self.folder / f"{ids.name.removesuffix(IDS)}{SUFFIX}").exists():
                ids.unlink(missing_ok=True)

    def _find(self) -> None:
        """Look which files there are."""
        with self._lock:
            files = (path for path in self.folder.glob(f"*{SUFFIX}") if not path.name.startswith("."))
            found = {path.name.removesuffix(SUFFIX): path for path in files}
            for name, entry in list(self._entries.items()):
                if entry.state in ("ready", "damaged") and name not in found:
                    del self._entries[name]
            for name, path in found.items():
                known = self._entries.get(name)
                if known is None or (known.job is None and _changed(known)):
                    self._entries[name] = self._examine(Entry(name, path, library=self))

    def _find_automatic(self) -> None:
        paths = sorted((self.folder / AUTO).glob(f"*{SUFFIX}"), key=lambda path: path.lstat().st_mtime)
        for path in paths:
            entry = self._examine(Entry(path.stem, path, library=self))
            # Those of earlier versions follow nothing, and do not tell by which policy they were read.
            if entry.status == "ready" and isinstance(entry.notes.get("read"), int) and entry.notes.get("base"):
                self._automatic[entry.key] = entry
            elif not path.is_symlink():
                path.unlink(missing_ok=True)
        self._bound()

    def _examine(self, entry: Entry) -> Entry:
        """Look at the header of a file: it is ready, or damaged. Its units are checked when they are loaded."""
        entry.status, entry.message, entry.passing, path = "ready", "", False, entry.path
        try:
            status = path.lstat()
            entry.size, entry.created = status.st_size, status.st_mtime
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("it is a link, or no file; put the file itself into the folder")
            state = check_header(path, self.lm.model, self.lm.scorer)
            entry.tokens, entry.units = state["seen"], state["layers"][0]["fill"]
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata()
            notes = json.loads(metadata.get("notes", "{}"))
            if path.parent != self.folder:
                entry.key, entry.notes = path.stem, dict(notes["automatic"])
            else:
                check_name(entry.name)
                _, transcript, entry.source, _ = saved_turns(path, self.lm.tokenizer, state["vocab_size"])
                if transcript.turns:
                    raise ValueError("it holds a conversation; save its context instead")
                entry.notes = dict(notes["conversation"].get("upload") or {})
                identity = [metadata["state"], metadata["notes"], metadata.get("checksum", "")]
                entry.key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
        except Refusal as refusal:
            entry.status, entry.message = "damaged", f"{refusal.message}; rename its file"
        except (ValueError, OSError, SafetensorError, KeyError, TypeError, IndexError) as error:
            entry.status, entry.message, entry.passing = "damaged", self._public(error), isinstance(error, OSError)
        finally:
            entry.job = None
        return entry


def check_name(name: str) -> None:
    """Refuse what is no name of a context.

    Raises:
        Refusal: If it is none.
    """
    if not re.fullmatch(NAME, name) or name.endswith((SUFFIX, IDS)):
        raise Refusal(
            400,
            f"{_shown(name)} is no name of a context; give 1 to 100 letters, digits, dots, dashes and underscores, "
            "the first of them a letter or digit",
            param="name",
        )


def not_stored(error: OSError) -> Refusal:
    """Return what to say where the disk does not take a text."""
    status = fault_of(error)
    code = "no_space" if status == 507 else None
    return Refusal(status, f"the text cannot be stored ({error.strerror}); {_way_out(error)}", code=code)


def _way_out(error: OSError) -> str:
    return "make room on the server's disk" if fault_of(error) == 507 else "look at the server's disk, and ask again"


def _copy(file: Path, new: Path) -> None:
    """Copy a file that nobody will change: where the file system can, both are one."""
    with written_whole(new) as fresh:
        try:
            os.link(file, fresh)
        except OSError:
            shutil.copyfile(file, fresh)


def _remove(file: Path) -> None:
    """Remove a file, or what somebody has put in its place."""
    if file.is_dir() and not file.is_symlink():
        shutil.rmtree(file, ignore_errors=True)
    else:
        file.unlink(missing_ok=True)


def _changed(entry: Entry) -> bool:
    if entry.passing:
        return True
    try:
        status = entry.path.lstat()
    except OSError:
        return True
    return (status.st_size, status.st_mtime) != (entry.size, entry.created)


def _shown(name: str) -> str:
    return repr(name[:40] + "..." if len(name) > 40 else name)
