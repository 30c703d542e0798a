"""One command at a time writes an output folder: the system drops the lock when its process ends, however it ends."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

LOCK = ".locret-eval.lock"


@contextmanager
def locked(output: str) -> Iterator[None]:
    """Make a folder if need be and hold it; a folder made here that stays empty is removed again.

    Raises:
        ValueError: If another process holds it, or something that is no folder is in its place.
        OSError: If it cannot be made or written.
    """
    folder = Path(output)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output {output} is a file; name a folder")
    made = _missing(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = _acquire(folder / LOCK, output)
    except OSError as error:
        _remove_empty(made)
        raise OSError(f"--output {output} cannot be written ({error.strerror}); choose another folder") from error
    try:
        yield
    finally:
        with suppress(OSError):
            (folder / LOCK).unlink()  # before it is let go: whoever waits sees that its file is gone
        file.close()
        _remove_empty(made)


def _missing(folder: Path) -> list[Path]:
    """Return the folder and those above it that do not exist, innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def _remove_empty(folders: list[Path]) -> None:
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


def _acquire(path: Path, output: str) -> IO[str]:
    """Return the locked file with our name in it."""
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            if not _lock(file):
                file.seek(0)
                holder = file.read().strip() or "another process"
                raise ValueError(
                    f"--output {output} is being written by {holder}; wait until it ends, or choose another folder"
                )
            if _is_current(file, path):
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
                file.flush()
                return file
        except BaseException:
            file.close()
            raise
        file.close()  # whoever held it has removed it: lock the file that is there now


def _lock(file: IO[str]) -> bool:
    """Lock a file without waiting; return whether it is ours."""
    try:
        import fcntl
    except ImportError:  # not a Unix
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # some network file systems
        warnings.warn(
            f"{file.name} cannot be locked ({error.strerror}); make sure that no other command writes this folder",
            stacklevel=2,
        )
    return True


def _is_current(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
