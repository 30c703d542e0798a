"""A text on its way in: bytes go to a file as they come, and are read from there as far as they have come."""

from __future__ import annotations

import codecs
import hashlib
import io
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

_BLOCK = 1 << 16
"""Bytes that are read at a time."""
_LOOK = 0.1
"""Seconds after which a reader that waits looks whether it is still wanted."""


class TooLarge(ValueError):
    """More bytes than the server takes."""


class Upload:
    """A text that is uploaded: one thread writes it, another reads it meanwhile.

    Once it is given up, all that is done with it raises ValueError and says why.

    Args:
        path: File that holds it, made anew; `remove` removes it.
        most: Bytes it may have.
        total: Bytes it will have, if that is known.
        stall: Seconds without a byte after which it is given up.
    """

    def __init__(self, path: Path, *, most: int, total: int | None = None, stall: float = 60.0) -> None:
        self.path, self.most, self.total, self.stall = path, most, total, stall
        self.written = self.given = 0
        """Bytes that have come, and those that have been handed to the reader."""
        self.fault = 400
        """HTTP status of the failure, as of a job that reads it."""
        self.stalled = f"nothing of the text came for {stall:g} seconds; upload it again"
        """What to say where nothing comes."""
        self._changed = threading.Condition()
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._digest = hashlib.sha256()
        self._failure: str | None = None
        self._ended = False
        self._last = time.monotonic()
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115 (closed when the upload ends)

    @property
    def digest(self) -> str:
        """SHA-256 of the bytes that have come, in hexadecimal digits."""
        return self._digest.hexdigest()

    def write(self, data: bytes) -> None:
        """Take more of it."""
        if self.written + len(data) > self.most:
            raise TooLarge(
                f"the text has more than {self.most:,} bytes; upload it in parts, or start the server with a larger "
                "--max-upload"
            )
        self._check_text(data, final=False)
        rest = memoryview(data)
        while rest:  # an unbuffered file may take less at once
            rest = rest[self._file.write(rest) :]
        self._digest.update(data)
        with self._changed:
            self.written += len(data)
            self._last = time.monotonic()
            self._changed.notify_all()

    def end(self) -> None:
        """Take note that all has come."""
        self._check_text(b"", final=True)
        if not self.written:
            raise ValueError("the text is empty; send the text as the body of the request")
        self._close()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def fail(self, message: str, fault: int = 400) -> None:
        """Give it up, for a reason in one sentence; nothing if it has come to its end."""
        with self._changed:
            if not self._ended and self._failure is None:
                self._failure, self.fault = message, fault
            self._changed.notify_all()
        self._close()

    def wait(self, some: int, check: Callable[[], None]) -> None:
        """Wait until so many bytes have come, or all; `check` is called while nothing comes, and raises to end that."""
        with self._changed:
            while self.written < some and not self._ended:
                self.check()
                if time.monotonic() - self._last > self.stall:
                    self._failure, self.fault = self.stalled, 408
                    raise ValueError(self._failure)
                self._changed.wait(_LOOK)
                check()

    def pieces(self, check: Callable[[], None]) -> Iterator[str]:
        """Yield the text as it comes, without a byte-order mark, line ends as newlines; `check` as for `wait`."""
        decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8-sig")(), translate=True)
        with open(self.path, "rb", buffering=0) as file:
            while True:
                self.wait(self.given + 1, check)
                data = file.read(_BLOCK)
                self.given += len(data)
                if text := decoder.decode(data, final=not data):
                    yield text
                if not data:
                    return

    def remove(self) -> None:
        """Remove the file; what is being read of it can be read on."""
        self._close()
        with suppress(OSError):
            self.path.unlink()

    def check(self) -> None:
        """Look whether it was given up."""
        if self._failure is not None:
            raise ValueError(self._failure)

    def _check_text(self, data: bytes, *, final: bool) -> None:
        self.check()
        try:
            self._decoder.decode(data, final=final)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"the text is not UTF-8 ({error.reason} after {self.written:,} bytes or more); convert it, for "
                "instance with `iconv -t UTF-8`"
            ) from None

    def _close(self) -> None:
        with suppress(OSError):
            self._file.close()
