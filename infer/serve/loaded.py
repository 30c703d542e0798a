"""Contexts in memory, as engines take them, within the bytes that are planned for them."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from locret.engines.prefix import Prefix

_LOOK = 0.1
"""Seconds after which somebody who waits looks whether it is still wanted."""


class Loaded:
    """Prefixes in memory: those that are used count as long as somebody has them, and the others until room is needed.

    Args:
        total: Bytes there are.
    """

    def __init__(self, total: int) -> None:
        self.total, self.used = total, 0
        self._held: OrderedDict[str, Prefix] = OrderedDict()
        self._known: weakref.WeakValueDictionary[str, Prefix] = weakref.WeakValueDictionary()
        self._changed = threading.Condition()  # of a lock that is reentrant: a finalizer may run anywhere

    def __len__(self) -> int:
        return len(self._known)

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
            while self.used + wanted > self.total and self._held:
                self._held.popitem(last=False)
            return self.used + wanted <= self.total

    def put(self, key: str, prefix: Prefix) -> Prefix:
        """Take a prefix in."""
        size = sum(tensor.nbytes for tensor in (*prefix.keys, *prefix.values))
        with self._changed:
            self.used += size
            weakref.finalize(prefix, self._gone, size).atexit = False
            self._held[key] = self._known[key] = prefix
        return prefix

    @contextmanager
    def taken(self, wanted: int, check: Callable[[], None]) -> Iterator[None]:
        """Hold so many bytes for something else until the block ends; `check` is called while they are waited for."""
        with self._changed:
            while not self.make_room(wanted):
                self._changed.wait(_LOOK)
                check()
            self.used += wanted
        try:
            yield
        finally:
            self._gone(wanted)

    def forget(self, key: str) -> None:
        """Do not keep a prefix for later."""
        with self._changed:
            self._held.pop(key, None)

    def _gone(self, size: int) -> None:
        with self._changed:
            self.used -= size
            self._changed.notify_all()
