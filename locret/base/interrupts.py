"""Ctrl-C and SIGTERM: one line and 130 or 143, from a command's first moments on, whatever it is doing.

An exception is not enough while libraries are imported and weights are loaded: they swallow it, or make a traceback of
it. So a signal ends the process from its handler, which removes what is half-written first. Work that has something to
say or to save when it is interrupted asks for a KeyboardInterrupt instead (`unwinding`).
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _State:
    """What a signal finds: one per process, as signals are."""

    prog = "locret"
    raises = 0
    held = 0
    waiting: int | None = None
    undo: tuple[Callable[[], object], ...] = ()


def answer(prog: str) -> None:
    """Answer SIGINT and SIGTERM from now on, unless whoever started the process has them ignored."""
    _State.prog = prog
    if threading.current_thread() is not threading.main_thread():
        return
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _handle)
    atexit.register(_ignore)


def _ignore() -> None:
    """Let no signal change the exit code of a command that is done: Python gives up its own handlers as it leaves."""
    for number in SIGNALS:
        if signal.getsignal(number) is _handle:
            signal.signal(number, signal.SIG_IGN)


def code_of(error: KeyboardInterrupt) -> int:
    """Return the exit code of an interrupt: 130, or 143 for SIGTERM."""
    return 128 + next((one for one in error.args if isinstance(one, int)), signal.SIGINT)


@contextmanager
def unwinding() -> Iterator[None]:
    """Let a signal raise KeyboardInterrupt, with its number, in the block, so that it can say or save something."""
    _State.raises += 1
    try:
        yield
    finally:
        _State.raises -= 1


@contextmanager
def undone(undo: Callable[[], Any]) -> Iterator[None]:
    """Call `undo` if a signal ends the process in the block; otherwise the block's own cleaning up does."""
    _State.undo = (*_State.undo, undo)
    try:
        yield
    finally:
        _State.undo = tuple(one for one in _State.undo if one is not undo)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let a signal wait for the end of a short block, such as renaming the files of a folder."""
    _State.held += 1
    try:
        yield
    finally:
        _State.held -= 1
        if not _State.held and _State.waiting is not None:
            number, _State.waiting = _State.waiting, None
            _handle(number, None)


def _handle(number: int, frame: FrameType | None) -> None:
    if _State.held:
        _State.waiting = number
        return
    if _State.raises:
        raise KeyboardInterrupt(number)
    for other in SIGNALS:
        signal.signal(other, lambda number, frame: os._exit(128 + number))  # who asks twice does not wait
    undo, _State.undo = _State.undo, ()
    for one in reversed(undo):
        with suppress(BaseException):
            one()
    with suppress(BaseException):
        sys.stdout.flush()
    # A process that a launcher started leaves the line to the first one. The rest of a progress bar is left standing.
    if os.environ.get("RANK", "0") == "0":
        start = "\n" if os.isatty(2) else ""
        with suppress(OSError):
            os.write(2, f"{start}{_State.prog}: interrupted\n".encode())
    os._exit(128 + number)


@contextmanager
def noted(*numbers: int) -> Iterator[list[int]]:
    """Inside the block, the first of these signals is put on the list; a second one acts as it did before.

    A handler that the user has set stays, and is called.
    """
    received: list[int] = []
    before: dict[int, Any] = {}

    def restore() -> None:
        for number, handler in before.items():
            if signal.getsignal(number) is note:
                signal.signal(number, handler)

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        restore()

    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            if signal.getsignal(number) in (usual, _handle):
                before[number] = signal.signal(number, note)
    try:
        yield received
    finally:
        restore()
