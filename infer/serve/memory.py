"""Memory of the plan while it is used: bytes that readers share."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from locret.infer.serve.turns import LOOK


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
