"""Notices at once when another process of a run has died, whatever this one is waiting for.

Every process holds a connection to the first one. The kernel closes those of a process that is killed, and finds by
keep-alive packets that a machine is gone, so nothing depends on how busy the processes are. Collectives do not notice
by themselves: NCCL would wait for hours.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import struct
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import cast

GRACE = 10.0
"""Seconds in which a process may still end in its own words after another one has died."""
_MEETING = 120.0
_LEAVE = 2**32 - 1
_NUMBER = struct.Struct("!I")
_HELLO = struct.Struct("!16sI")


class Watch:
    """Watches the other processes until `close`.

    Args:
        rank: Of this process.
        size: How many there are.
        exchange: Gives all processes what the first one gave, and is called by all.
        sentence: What to say when process number so and so has died.
        prog: Name of the command, which says it.
        code: Exit code of this process then.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        exchange: Callable[[object], object],
        sentence: Callable[[int], str],
        prog: str,
        code: int,
    ) -> None:
        self._sentence, self._prog, self._code = sentence, prog, code
        self._rank, self._gone = rank, -1
        self._noticed, self._closed = threading.Event(), threading.Event()
        self._peers: dict[int, socket.socket] = {}
        self._lock = threading.Lock()
        self._meet(size, exchange)
        self._wake, woken = socket.socketpair()
        self._thread = threading.Thread(target=self._watch, args=(woken,), name="locret-watch", daemon=True)
        self._thread.start()

    def gone(self, seconds: float = 0.0) -> int | None:
        """Return a process that has ended without taking leave, if it is noticed within so many seconds."""
        return self._gone if self._noticed.wait(seconds) else None

    def close(self, *, orderly: bool) -> None:
        """Watch no longer.

        Args:
            orderly: Take leave, so that the others go on; else they end, as this process has failed.
        """
        self._closed.set()
        if orderly:
            self._tell(_LEAVE)
        self._wake.close()
        self._thread.join(GRACE)
        for peer in self._peers.values():
            peer.close()

    def _meet(self, size: int, exchange: Callable[[object], object]) -> None:
        """Connect all to the first process."""
        if self._rank:
            address, port, token = cast(tuple[str, int, bytes], exchange(None))
            peer = socket.create_connection((address, port), _MEETING)
            peer.sendall(_HELLO.pack(token, self._rank))
            self._peers[0] = _kept_alive(peer)
            return
        host = os.environ.get("MASTER_ADDR", "localhost")
        try:
            listener = socket.create_server((host, 0))
        except OSError:  # a name that others know this machine by
            listener = socket.create_server(("", 0))
        token = secrets.token_bytes(16)
        with listener:
            exchange((host, listener.getsockname()[1], token))
            listener.settimeout(_MEETING)
            while len(self._peers) < size - 1:
                peer, _ = listener.accept()
                peer.settimeout(_MEETING)
                said = _received(peer, _HELLO.size)
                if said is None or not secrets.compare_digest(said[:16], token):
                    peer.close()
                    continue
                self._peers[_HELLO.unpack(said)[1]] = _kept_alive(peer)

    def _watch(self, woken: socket.socket) -> None:
        with selectors.DefaultSelector() as selector, woken:
            selector.register(woken, selectors.EVENT_READ)
            for rank, peer in self._peers.items():
                selector.register(peer, selectors.EVENT_READ, rank)
            while not self._closed.is_set():
                for key, _ in selector.select():
                    if key.fileobj is woken:
                        return
                    said = self._said(key.data)
                    if said == _LEAVE:
                        selector.unregister(key.fileobj)
                    else:
                        self._notice(key.data if said is None else said)
                        return

    def _said(self, rank: int) -> int | None:
        """Return the number of a process that has ended, or `_LEAVE`; None if the connection is cut."""
        said = _received(self._peers[rank], _NUMBER.size)
        return None if said is None else int(_NUMBER.unpack(said)[0])

    def _notice(self, rank: int) -> None:
        if not self._closed.is_set():
            self._gone = rank
            self._tell(rank)
            self._noticed.set()
            if not self._closed.wait(GRACE):
                sys.stderr.write(f"{self._prog}: {self._sentence(rank)}\n")
                sys.stderr.flush()
                # What this process waits for will never come.
                os._exit(self._code)

    def _tell(self, number: int) -> None:
        with self._lock:
            for peer in self._peers.values():
                with suppress(OSError):
                    peer.sendall(_NUMBER.pack(number))


def _kept_alive(peer: socket.socket) -> socket.socket:
    peer.settimeout(None)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return peer


def _received(peer: socket.socket, size: int) -> bytes | None:
    """Return so many bytes; None if the connection ends before."""
    with suppress(OSError):
        found = peer.recv(size, socket.MSG_WAITALL)
        return found if len(found) == size else None
    return None
