"""What answers need of the contexts on disk; `locret.infer.serve.library.Library` is them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from locret.engines.prefix import Prefix
from locret.policy.protection import Span


class Entry(Protocol):
    """A context that has been read."""

    name: str
    path: Path
    """Its file, whose notes say how its conversation goes on."""
    tokens: int
    """Tokens that were read."""
    units: int
    """Units per KV head that stayed."""

    def prefix(self) -> Prefix:
        """Return the units, from memory or from the file; may block."""
        ...


class Contexts(Protocol):
    """Contexts by name, and by what they have read. Methods block, and may be called from any thread."""

    def get(self, name: str) -> Entry:
        """Return a context by name.

        Raises:
            Refusal: 404 with the nearest names if there is none, 409 while it is being read or if that failed.
        """
        ...

    def shrunk(self, name: str, budget: int, cancelled: Callable[[], bool]) -> Entry:
        """Return a context with fewer units, which is made once and kept.

        Args:
            name: The context.
            budget: Units per KV head.
            cancelled: Asked while it is made; nobody waits for it any more then.

        Raises:
            Refusal: As for `get`, and 400 if it has fewer units than that.
        """
        ...

    def has_shrunk(self, name: str, budget: int) -> bool:
        """Return whether `shrunk` has nothing to make.

        Raises:
            Refusal: As for `get`.
        """
        ...

    def longest(
        self, ids: Sequence[int], base: Entry | None = None, protected: Sequence[Span] = ()
    ) -> tuple[Entry | None, int]:
        """Return what has read the most of a text, and how many of its tokens; (None, 0) if nothing has.

        Args:
            ids: Token ids of the text.
            base: A context that the text follows; None if it follows nothing.
            protected: What of the text is to be protected: what has read it has to have protected as much of it.
        """
        ...

    def read_on(
        self,
        ids: Sequence[int],
        read: tuple[Entry | None, int],
        base: Entry | None,
        cancelled: Callable[[], bool],
        protected: Sequence[Span] = (),
    ) -> Entry:
        """Read all of a text into an automatic context, chunk by chunk in turns with other readers.

        Args:
            ids: Token ids of the text, all of which are read.
            read: What `longest` returned: a copy of it reads what is new.
            base: As for `longest`.
            cancelled: Asked between chunks; what has been read is dropped then.
            protected: What of the ids is protected.

        Raises:
            Refusal: If too many readers wait (429), or the server ends (503).
        """
        ...
