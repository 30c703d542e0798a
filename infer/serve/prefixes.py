"""Contexts in memory, as engines take them, within the bytes that are planned for them."""

from __future__ import annotations

import weakref
from collections import OrderedDict

from locret.engines.prefix import Prefix
from locret.infer.serve.jobs import Room


class Prefixes(Room):
    """Prefixes: those that are used count as long as somebody has them, and the others until room is needed."""

    def __init__(self, total: int) -> None:
        super().__init__(total)  # its lock is reentrant, as a finalizer may run anywhere
        self._held: OrderedDict[str, Prefix] = OrderedDict()
        self._known: weakref.WeakValueDictionary[str, Prefix] = weakref.WeakValueDictionary()

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
