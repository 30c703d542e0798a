"""A context of the library: what is known of it while it waits, is read, can be asked, or cannot."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from locret.engines.prefix import Prefix
from locret.infer.serve.reading import Job, Progress

if TYPE_CHECKING:
    from locret.infer.serve.library import Library

TEXTS, IDS = "texts", ".ids"
"""The folder of the token ids of texts, and the end of its files' names."""
State = Literal["waiting", "reading", "ready", "failed", "damaged"]


@dataclass(eq=False)
class Entry:
    """A context, or what is to become one."""

    name: str
    path: Path
    status: State = "ready"
    """Its state when no job works on it."""
    message: str = ""
    """Why it failed or is damaged, in one sentence."""
    passing: bool = False
    """Whether it is damaged only because its file could not be read just now, so that it is looked at again."""
    fault: int = 400
    """HTTP status of why it failed; see `Job.fault`."""
    source: str = ""
    """What its text is called."""
    tokens: int = 0
    """Tokens that were read."""
    units: int = 0
    """Units per KV head that stayed."""
    size: int = 0
    """Bytes of its file."""
    created: float = 0.0
    """Seconds since the epoch."""
    key: str = ""
    """Digest of what identifies its content; of an automatic one, of the token ids it has read."""
    notes: dict[str, Any] = field(default_factory=dict)
    """What was written beside it: of an upload its bytes, digest and the seconds it took."""
    job: Job | None = field(default=None, repr=False)
    """What reads it."""
    library: Library | None = field(default=None, repr=False)

    @property
    def state(self) -> State:
        """Whether it waits to be read, is read, can be asked, or why not."""
        if (job := self.job) is None:
            return self.status
        return "waiting" if job.state == "waiting" else "reading"  # until what was made has been looked at

    @property
    def progress(self) -> Progress:
        """How far it has been read."""
        return Progress(tokens=self.tokens, units=self.units) if self.job is None else self.job.progress

    @property
    def root(self) -> str:
        """Key of the context with a name that all of it follows, its own if it has one; empty if there is none."""
        named = self.library is None or self.path.parent == self.library.folder
        return self.key if named else str(self.notes.get("root", ""))

    @property
    def ids(self) -> Path:
        """File of the token ids of its text, 4 bytes each, if they are kept."""
        return self.path.parent / TEXTS / f"{self.name}{IDS}"

    @property
    def has_text(self) -> bool:
        """Whether the token ids of its text are there."""
        ids = self.ids
        return self.state == "ready" and ids.is_file() and ids.stat().st_size == array("I").itemsize * self.tokens

    def prefix(self) -> Prefix:
        """Return the units, from memory or from the file; may block.

        Raises:
            NoRoom: If contexts that others use take all the memory there is for them.
            Refusal: If the file is damaged or gone, or could never be held.
        """
        assert self.library is not None
        return self.library.prefix(self)
