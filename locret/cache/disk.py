"""A scratch file that holds the second tier of all layers: tensors in memory-mapped areas, space reserved at once.

The file has no name while it is in use: it is made, which proves that nothing was there, and its name is removed before
the first byte is written. So the operating system takes its space back when the cache goes, or the process ends,
however it ends; nothing half-written can stay, nobody can open it, and two runs may be given the same path. A context
that should outlive the process is saved with `save_cache`.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import threading
import time
import uuid
import weakref
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from locret.base import interrupts
from locret.base.fields import shown

_PAGE = mmap.ALLOCATIONGRANULARITY
_ZEROS = bytes(2**20)
_TRIES, _PAUSE = 10, 0.01
_WAY_OUT = "make room there, give a file on another disk, or lower host_budget"


class _Area(NamedTuple):
    """A piece of one part of the file."""

    part: int
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


class Disk:
    """Space for tensors in one scratch file.

    Args:
        path: A file that is not there yet, or a folder to work in; `~` is the home folder.

    Raises:
        ValueError: If there is a file, a link or anything else of that name, or no folder to make it in.
        OSError: If it cannot be made; the message names it.

    Examples:
        >>> disk = Disk("scratch")
        >>> disk.reserve(1 << 20)
        >>> keys = disk.empty((1, 4, 512, 64), torch.bfloat16)
        >>> disk.used
        262144
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path
        self._file = _nameless(path)
        self._close = weakref.finalize(self, os.close, self._file)
        self._lock = threading.RLock()  # the collector may end a tensor while another is being made
        self._maps: list[mmap.mmap] = []
        """The file in memory, one part for each time that it grew."""
        self._free: list[_Area] = []
        """What nobody uses, ascending; neighbours are one area."""
        self.nbytes = 0
        """Bytes of the file, all of them reserved on the disk."""

    @property
    def used(self) -> int:
        """Bytes of the file that hold tensors, each rounded up to whole pages."""
        with self._lock:
            return self.nbytes - sum(area.nbytes for area in self._free)

    def reserve(self, nbytes: int, tensors: int = 0) -> None:
        """Make sure that there is room for tensors that are still to be made, whatever happens to the disk.

        Args:
            nbytes: Bytes of all of them.
            tensors: How many there will be, since each takes whole pages.

        Raises:
            OSError: If the disk has no room for them; the file is then as large as before.
        """
        with self._lock:
            if (nbytes := nbytes + tensors * _PAGE) > max((area.nbytes for area in self._free), default=0):
                self._grow(_pages(nbytes))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: object = None) -> Tensor:
        """Return an uninitialised tensor in the file; its area is free again once no tensor uses it.

        Args:
            shape: Any shape.
            dtype: Any type that torch can hold.
            device: Where the tensor will be used; it lies in the file all the same.

        Raises:
            OSError: If that takes more than was reserved, and the disk has no room.
        """
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        with self._lock:
            area = self._take(_pages(count * dtype.itemsize))
            # A part of a map is an object of its own, which lives as long as tensors look at it; a map of its own for
            # each tensor would take a file descriptor.
            part = memoryview(self._maps[area.part])[area.start : area.end]
        weakref.finalize(part, self._give_back, area)
        with torch.inference_mode(False):
            return torch.frombuffer(part, dtype=dtype, count=count).view(shape)

    def _take(self, nbytes: int) -> _Area:
        """Return an area of so many bytes: the begin of the first that is free and large enough, or a new one."""
        if all(area.nbytes < nbytes for area in self._free):
            self.reserve(nbytes)
        place, found = next((place, area) for place, area in enumerate(self._free) if area.nbytes >= nbytes)
        rest = _Area(found.part, found.start + nbytes, found.end)
        self._free[place : place + 1] = [rest] if rest.nbytes else []
        return _Area(found.part, found.start, rest.start)

    def _give_back(self, area: _Area) -> None:
        with self._lock:
            merged: list[_Area] = []
            for free in sorted([*self._free, area]):
                if merged and merged[-1].part == free.part and merged[-1].end == free.start:
                    free = _Area(free.part, merged.pop().start, free.end)
                merged.append(free)
            self._free = merged

    def _grow(self, nbytes: int) -> None:
        """Make the file longer; the disk has then set the space aside, or nothing has changed."""
        try:
            room = os.fstatvfs(self._file)
            if nbytes > room.f_bavail * room.f_frsize:  # at once, rather than fill the disk to find out
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            _set_aside(self._file, self.nbytes, nbytes)
            self._maps.append(mmap.mmap(self._file, nbytes, offset=self.nbytes))
        except OSError as error:
            os.ftruncate(self._file, self.nbytes)
            _refuse(self.path, f"{nbytes:,} bytes for the host tier", error)
        self.nbytes += nbytes
        self._give_back(_Area(len(self._maps) - 1, 0, nbytes))

    def __repr__(self) -> str:
        return f"Disk({str(self.path)!r}, {self.used:,} of {self.nbytes:,} bytes used)"


def _nameless(path: str | Path) -> int:
    """Return the descriptor of a new file that has no name any more."""
    try:
        target = Path(path).expanduser()
        target = target / f".locret-{uuid.uuid4().hex}" if target.is_dir() else target
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
        for left in reversed(range(_TRIES)):
            try:
                with interrupts.uninterrupted():
                    file = os.open(target, flags, 0o600)  # units tell what the text says
                    os.unlink(target)
                return file
            except FileExistsError:  # for a moment, where another process makes its own
                if not left:
                    raise
                time.sleep(_PAUSE)
        raise AssertionError
    except FileExistsError:
        raise ValueError(
            f"disk={path} is there already and is not overwritten; give a file that is not there yet"
        ) from None
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"disk={path} is in a folder that does not exist; make it, or choose another") from None
    except (ValueError, RuntimeError) as error:  # a NUL in the name, a home that is unknown
        raise ValueError(f"disk={shown(str(path))} is not a name of a file ({error}); choose another") from None
    except OSError as error:
        _refuse(path, "a scratch file", error)


def _set_aside(file: int, start: int, nbytes: int) -> None:
    """Have the disk keep bytes free for a part of a file. Without a call for it the part is written instead."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file, start, nbytes)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
    os.lseek(file, start, os.SEEK_SET)
    written = 0
    while written < nbytes:
        written += os.write(file, _ZEROS[: nbytes - written])


def _refuse(path: str | Path, what: str, error: OSError) -> NoReturn:
    raise type(error)(f"disk={path} cannot hold {what} ({error.strerror or error}); {_WAY_OUT}") from error


def _pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE
