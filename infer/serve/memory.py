"""Memory of the plan while it is used: bytes that readers share, and contexts as engines take them."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from locret.engines.prefix import Prefix
from locret.infer.serve.turns import LOOK


class Room:
    """Bytes that jobs share, first come, first served."""

    def __init__(self, total: int) -> None:
        self.total, self.used = total, 0
        self._changed = threading.Condition()  # reentrant, as a finalizer may run anywhere
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
                    self._changed.wait(LOOK)
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


class Prefixes(Room):
    """Prefixes: those that are used count as long as somebody has them, and the others until room is needed."""

    def __init__(self, total: int) -> None:
        super().__init__(total)
        self._held: OrderedDict[str, Prefix] = OrderedDict()
        self._known: weakref.WeakValueDictionary[str, Prefix] = weakref.WeakValueDictionary()

    def get(self, key: str) -> Prefix | None:
        """Return a prefix, if it is in memory."""
        with self._changed:
            if (prefix := self._known.get(key)) is not None:
                self._held[key] = prefix
                self._held.move_to_end(key)
            return prefix

    def make_room(self, wanted: int) -> bool:
        """Forget what was used least recently until so many bytes are free; return whether they are."""
        with self._changed:
            while not super().make_room(wanted) and self._held:
                self._held.popitem(last=False)
            return super().make_room(wanted)

    def put(self, key: str, prefix: Prefix) -> Prefix:
        """Take a prefix in."""
        size = sum(tensor.nbytes for tensor in (*prefix.keys, *prefix.values))
        with self._changed:
            self.used += size
            weakref.finalize(prefix, self.give, size).atexit = False
            self._held[key] = self._known[key] = prefix
        return prefix

    def forget(self, key: str) -> None:
        """Do not keep a prefix for later."""
        with self._changed:
            self._held.pop(key, None)
