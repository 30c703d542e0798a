"""A folder that holds second tiers: each tensor is a memory-mapped file of its own, which has no name.

A file's name is removed before the first byte is written. So the operating system takes its space back when the tensor
goes, or the process ends, however it ends; nothing half-written can stay, and nobody can open it. A context that should
outlive the process is saved with `save_cache`.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
import uuid
import weakref
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from locret.base import interrupts
from locret.base.fields import shown


class Disk:
    """Space for tensors on a disk.

    Args:
        path: A folder to work in, or a name in one that nothing has yet; `~` is the home folder.

    Raises:
        ValueError: If there is a file, a link or anything else of that name, or no such folder.
        OSError: If nothing can be made there; the message names it.

    Examples:
        >>> disk = Disk("scratch")
        >>> keys = disk.empty((1, 4, 512, 64), torch.bfloat16)
        >>> disk.used
        262144
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path
        self.used = 0
        """Bytes of the tensors that are there now."""
        try:
            target = Path(path).expanduser()
            taken, self._folder = os.path.lexists(target), target if target.is_dir() else target.parent
        except RuntimeError as error:  # a home that is unknown
            raise ValueError(f"disk={shown(str(path))} is not a name of a file ({error}); choose another") from None
        except OSError as error:
            self._refuse("a scratch file", error)
        if taken and not target.is_dir():
            raise ValueError(f"disk={path} is there already and is not overwritten; give a file that is not there yet")
        if not self._folder.is_dir():
            raise ValueError(f"disk={path} is in a folder that does not exist; make it, or choose another")
        self.empty((1,), torch.uint8)

    def check_room(self, nbytes: int) -> None:
        """Refuse so many bytes where there is no room for them now.

        Raises:
            OSError: If there is none.
        """
        if nbytes > shutil.disk_usage(self._folder).free:
            self._refuse(f"{nbytes:,} bytes for the host tier", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: object = None) -> Tensor:
        """Return an uninitialised tensor on the disk, all of whose space is set aside; `device` does not matter.

        Raises:
            OSError: If the disk has no room for it.
        """
        nbytes, name = math.prod(shape) * dtype.itemsize, self._folder / f".locret-{uuid.uuid4().hex}"
        if not nbytes:
            return torch.empty(shape, dtype=dtype)
        try:
            with interrupts.uninterrupted():
                file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)  # units tell what the text says
                try:
                    (getattr(os, "posix_fallocate", None) or _longer)(file, 0, nbytes)
                    held = torch.from_file(str(name), shared=True, size=nbytes, dtype=torch.uint8)
                finally:
                    os.close(file)
                    name.unlink()
        except OSError as error:
            self._refuse(f"{nbytes:,} bytes for the host tier", error)
        self.used += nbytes
        weakref.finalize(held.untyped_storage(), self._gone, nbytes)
        return held.view(dtype).view(shape)

    def _gone(self, nbytes: int) -> None:
        self.used -= nbytes

    def _refuse(self, what: str, error: OSError) -> NoReturn:
        raise type(error)(
            f"disk={self.path} cannot hold {what} ({error.strerror or error}); make room there, give a file on another "
            "disk, or lower host_budget"
        ) from error


def _longer(file: int, start: int, nbytes: int) -> None:
    os.ftruncate(file, start + nbytes)
