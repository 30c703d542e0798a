"""The files of contexts, and what they say: `NAME.ctx` each, those without a name in the folder `auto`.

A context without a name is under the digest of what it follows and its token ids.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from safetensors import SafetensorError, safe_open

from locret import RetentionCache
from locret.base.fields import shown
from locret.base.nearest import nearest
from locret.cache.cache_file import check_header, save_cache
from locret.cache.export import mean_units
from locret.conversation.document import encode, is_text
from locret.conversation.model import LongContextModel
from locret.conversation.turns import Talk, saved_talk
from locret.infer.serve.jobs import Job, Progress
from locret.infer.serve.refusal import Refusal, fault_of, one_line

SUFFIX, AUTO, UPLOADS = ".ctx", "auto", ".uploads"
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
"""What a context may be called: no name is a path, hidden, or longer than a file system takes."""
_T = TypeVar("_T")
State = Literal["waiting", "reading", "ready", "failed", "unusable"]


@dataclass(eq=False)
class Entry:
    """A context, or what is to become one."""

    name: str
    path: Path
    named: bool = True
    """Whether somebody has given it its name; else it is a key."""
    status: State = "ready"
    message: str = ""
    fault: int = 400
    source: str = ""
    tokens: int = 0
    """Tokens that were read."""
    units: int = 0
    """Units per KV head that stayed, on average where they differ."""
    whole: bool = False
    """Whether all did, in every layer."""
    end: int = 0
    """The position of the token that follows."""
    size: int = 0
    created: float = 0.0
    key: str = ""
    """Digest of what identifies its content; of one without a name, of what it has read."""
    notes: dict[str, Any] = field(default_factory=dict)
    """What was written beside it: of an upload its bytes, digest and the seconds it took."""
    talk: Talk | None = field(default=None, repr=False)
    """How a context with a name goes on."""
    base: str = ""
    """Of one without a name: the key of the context that its text follows, if it follows one."""
    read: int = 0
    """And the tokens after it."""
    job: Job | None = field(default=None, repr=False)

    @property
    def state(self) -> State:
        """Whether it waits to be read, is read, can be asked, or why not."""
        if (job := self.job) is None:
            return self.status
        return "reading" if job.began else "waiting"  # until what was made has been looked at

    @property
    def going(self) -> bool:
        """Whether it is still being made."""
        return self.job is not None

    @property
    def progress(self) -> Progress:
        return Progress(tokens=self.tokens, units=self.units) if (job := self.job) is None else job.progress

    @property
    def changed(self) -> bool:
        """Whether its file is not the one that was looked at."""
        try:
            status = self.path.lstat()
        except OSError:
            return True
        return (status.st_size, status.st_mtime) != (self.size, self.created)


class Index:
    """What there is in a folder of contexts that one model has read, without what a server that was killed has left."""

    def __init__(self, folder: Path, lm: LongContextModel) -> None:
        self.folder, self.lm = folder, lm
        self.named: dict[str, Entry] = {}
        self.automatic: OrderedDict[str, Entry] = OrderedDict()
        """Those without a name, the least recently used first."""
        self.moving = threading.RLock()
        """Held by who writes a context to disk or reads one; memory is planned for one at a time."""
        self.clear()
        self.scan()

    def clear(self) -> None:
        """Remove what a server was about to read, or has read without a name."""
        for folder in (UPLOADS, AUTO):
            shutil.rmtree(self.folder / folder, ignore_errors=True)

    def path(self, name: str, *, named: bool = True) -> Path:
        return (self.folder if named else self.folder / AUTO) / f"{name}{SUFFIX}"

    def scan(self) -> None:
        """Look which files there are that have a name."""
        files = (path for path in self.folder.glob(f"*{SUFFIX}") if not path.name.startswith("."))
        found = {_printable(path.name.removesuffix(SUFFIX)): path for path in files}
        for name, entry in list(self.named.items()):
            if entry.state in ("ready", "unusable") and name not in found:
                del self.named[name]
        for name, path in found.items():
            if (known := self.named.get(name)) is None or (known.job is None and known.changed):
                self.named[name] = self.examine(Entry(name, path))

    def find(self, name: str) -> Entry:
        if (entry := self.named.get(name)) is None or (entry.job is None and entry.changed):
            self.scan()
        if (entry := self.named.get(name)) is None:
            near = nearest(name, tuple(self.named))
            hint = f"; did you mean {' or '.join(near)}?" if near else "; GET /v1/contexts lists them"
            raise Refusal(404, f"there is no context {shown(name)}{hint}", param="context", code="context_not_found")
        return entry

    def examine(self, entry: Entry) -> Entry:
        """Look at the header of a file: it is ready, or unusable. Its units are checked when they are loaded."""
        entry.status, entry.message, path = "ready", "", entry.path
        try:
            status = path.lstat()
            entry.size, entry.created = status.st_size, status.st_mtime
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("it is a link, or no file; put the file itself into the folder")
            state = check_header(path, self.lm.model, self.lm.scorer)
            entry.tokens, units = state["seen"], [counters["fill"] for counters in state["layers"]]
            entry.units, even = mean_units(units), state["policy"].get("head_budgets", "uniform") == "uniform"
            entry.whole = min(units) >= entry.tokens
            entry.end = entry.units if even and len({*units}) == 1 else state["next_position"]
            if type(entry.end) is not int or entry.end < entry.units:
                raise ValueError(f"{shown(entry.end)} is no position after its units; save it again")
            if entry.named:
                self._examine_named(entry, state["vocab_size"])
        except (Refusal, ValueError, OSError, SafetensorError, KeyError, TypeError, IndexError) as error:
            entry.status, entry.message = "unusable", self.told(error)
            entry.size -= isinstance(error, OSError)  # so that it is looked at again
        finally:
            entry.job = None
        return entry

    def _examine_named(self, entry: Entry, vocabulary: int) -> None:
        check_name(entry.name)
        with safe_open(entry.path, framework="pt") as file:
            metadata = file.metadata()
        entry.talk = saved_talk(entry.path, self.lm.tokenizer, vocabulary)
        entry.source = _printable(entry.talk.name)
        if entry.talk.transcript.turns:
            raise ValueError("it holds a conversation; save its context instead")
        entry.notes = dict(json.loads(metadata["notes"])["conversation"].get("upload") or {})
        if not is_text(json.dumps(entry.notes, ensure_ascii=False)):
            raise ValueError("its notes hold half characters; save it again")
        identity = [metadata["state"], metadata["notes"], metadata.get("checksum", "")]
        entry.key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()

    def load(self, entry: Entry, load: Callable[[Path], _T]) -> _T:
        with self.moving:
            found = load(entry.path)
            if entry.changed and self.examine(Entry(entry.name, entry.path, entry.named)).key != entry.key:
                raise ValueError("another context has taken its name meanwhile; ask again")
            return found

    def text_end(self, entry: Entry) -> int:
        """Return where the text of a context with a name ends: after the words that wait for what follows them."""
        assert entry.talk is not None
        return entry.tokens + len(encode(self.lm.tokenizer, entry.talk.stream.pending))

    def save(self, path: Path, cache: RetentionCache, notes: dict[str, Any] | None = None) -> None:
        path.parent.mkdir(exist_ok=True)
        with self.moving:
            save_cache(cache, path, notes=notes)

    def unusable(self, entry: Entry, error: Exception) -> Refusal:
        """Take note that a file cannot be used, and return what to say."""
        if not entry.path.exists():
            if not entry.named:
                self.automatic.pop(entry.key, None)
                why = "what had been read for this has made room for others, or was deleted; ask again"
                return Refusal(503, why, headers={"Retry-After": "1"})
            self.named.pop(entry.name, None)
            return Refusal(404, f"context {entry.name} was deleted", param="context", code="context_not_found")
        if isinstance(error, OSError):  # the disk's trouble, not the file's
            return Refusal(fault_of(error), f"context {entry.name} cannot be read: {self.told(error)}")
        entry.status, entry.message = "unusable", self.told(error)
        return Refusal(409, f"context {entry.name} cannot be asked: {entry.message}", param="context", code="unusable")

    def told(self, error: object) -> str:
        """Return what went wrong in one sentence that does not tell where the server keeps contexts."""
        text = str(error).replace(f"{self.folder}{os.sep}", "").replace(str(self.folder), "the folder")
        return one_line(_printable(text))


def _printable(text: str) -> str:
    """Return a text that JSON can carry: bytes of a file's name that are not UTF-8 are half characters in Python."""
    return text.encode("utf-8", "backslashreplace").decode()


def check_name(name: str) -> None:
    if not re.fullmatch(NAME, name) or name.endswith(SUFFIX):
        raise Refusal(
            400,
            f"{shown(name)} is no name of a context; give 1 to 100 letters, digits, dots, dashes and underscores, the "
            "first of them a letter or digit",
            param="name",
        )


def digests(base: str, ids: Sequence[int], counts: Sequence[int]) -> Iterator[tuple[int, str]]:
    """Yield for rising counts the key of what has read so many of the first ids after `base`, in one pass."""
    total, done = hashlib.sha256(f"{base} ".encode()), 0
    for count in counts:
        total.update(array("Q", ids[done:count]).tobytes())
        done = count
        yield count, total.hexdigest()
