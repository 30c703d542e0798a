"""Files and folders that appear whole or not at all, and a lock on the folder that a command writes into."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import Any

from safetensors import SafetensorError

from locret.base import interrupts
from locret.base.fields import shown

LOCK = ".locret.lock"
_MOST_JSON = 1 << 28
PARTIAL = ".*.partial"
"""Pattern of what a killed process was about to write."""


@contextmanager
def written_whole(target: str | Path, *, parents: bool = False, last: str | None = None) -> Iterator[Path]:
    """Give a path for a new file or folder, which takes the target's place when the block ends well.

    A file, and a folder that is not there yet, appear by one rename. In a folder that is there each file is replaced by
    its new version and other files stay. Whatever ends the block early leaves the target as it was.

    Args:
        target: File or folder to write. Behind a symbolic link the file that it points to is replaced.
        parents: Make the folders above it that are missing.
        last: File of a folder to replace after all others, since readers look for it first.

    Raises:
        OSError: If it cannot be written; the message names it.
    """
    path = Path(os.path.realpath(target))
    # Beside the files to be replaced, since a rename cannot cross file systems and a mounted folder is one of its own.
    staging = (path if path.is_dir() else path.parent) / f".{path.name}.{uuid.uuid4().hex[:8]}.partial"
    fresh = staging / path.name
    if not parents and not staging.parent.exists():
        raise FileNotFoundError(
            f"cannot write {target}: there is no folder {staging.parent}; make it, or choose another"
        )
    with interrupts.undone(lambda: shutil.rmtree(staging, ignore_errors=True)):
        try:
            if path.exists() and not (path.is_dir() or path.is_file()):
                raise OSError("it is a device or a pipe")
            staging.mkdir(parents=parents)
            yield fresh
            if path.exists() and path.is_dir() != fresh.is_dir():
                raise OSError("it is a folder" if path.is_dir() else "it is a file")
            for file in fresh.rglob("*") if fresh.is_dir() else [fresh]:
                if file.is_file():
                    # As the umask allows, which made the staging folder: safetensors writes for the owner alone.
                    old = path / file.relative_to(fresh)
                    _finish(file, old.stat().st_mode & 0o777 if old.is_file() else staging.stat().st_mode & 0o666)
            with interrupts.uninterrupted():
                if path.is_dir():
                    for file in sorted(fresh.iterdir(), key=lambda file: file.name == last):
                        os.replace(file, path / file.name)
                else:
                    os.replace(fresh, path)
                shutil.rmtree(staging, ignore_errors=True)
        except (OSError, SafetensorError) as error:
            kind = type(error) if isinstance(error, OSError) else OSError
            hidden = re.search(r"os error (\d+)", str(error))  # where safetensors has the operating system's number
            number = int(hidden[1]) if hidden else getattr(error, "errno", None)
            why = getattr(error, "strerror", None) or (os.strerror(number) if number else error)
            failed = kind(f"cannot write {target}: {why}; choose another folder or make room")
            failed.errno = number  # what is done about it may depend on whether the disk is full
            raise failed from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def write_text(path: str | Path, text: str, *, parents: bool = False) -> None:
    """Write a text file that appears whole or not at all; see `written_whole`."""
    with written_whole(path, parents=parents) as fresh:
        fresh.write_text(text, encoding="utf-8")


def read_json(file: Path, what: str) -> Any:
    """Read a JSON file that somebody else may have written."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, value in pairs:
            if name in values:
                raise ValueError(f"it has {shown(name)[1:-1]} twice")
            values[name] = value
        return values

    if (size := file.stat().st_size) > _MOST_JSON:
        raise ValueError(f"{file} has {size:,} bytes, more than any JSON that is read here; give {what}")
    try:
        return json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=once)
    except RecursionError:
        raise ValueError(f"{file} is not valid JSON (its values are nested too deeply); give {what}") from None
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON ({error}); give {what}") from error


def shards(index: Path) -> dict[str, Path]:
    """Return which file of its folder holds each weight, by the index of a sharded checkpoint."""
    values = read_json(index, "the index of a sharded checkpoint")
    files = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(files, dict):
        raise ValueError(f"{index} is not an index of a sharded checkpoint (it has no weight_map); download it again")
    for name, file in files.items():
        if not isinstance(file, str) or file in ("", ".", "..") or PurePath(file).name != file or "\0" in file:
            raise ValueError(
                f"{index} has {shown(file)} for {shown(name)[1:-1]}, which is not the name of a file of its folder; "
                "download it again"
            )
    return {name: index.parent / file for name, file in files.items()}


def _finish(file: Path, mode: int) -> None:
    """Bring a file to the disk, with the permissions it is to have."""
    with open(file, "rb+") as handle:
        os.fsync(handle.fileno())
    file.chmod(mode)


@contextmanager
def locked(folder: str | Path, setting: str) -> Iterator[None]:
    """Hold a folder against other commands until the block, or this process, ends, however it ends.

    The folder is made if need be, and removed again if it stays empty. What a killed process was about to write in it
    is removed.

    Raises:
        ValueError: If another process holds it, or it cannot be a folder.
        OSError: If it cannot be made or written.
    """
    from filelock import FileLock, Timeout

    path, made = Path(folder), list[Path]()
    lock = FileLock(path / LOCK)
    try:
        if path.exists() and not path.is_dir():
            raise ValueError(f"{setting} is a file; choose a folder")
        made = [parent for parent in (path, *path.parents) if not parent.exists()]
        path.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except Timeout:
        holder = "another process"
        with suppress(OSError):
            holder = (path / LOCK).read_text(encoding="utf-8").strip() or holder
        raise ValueError(f"{setting} is being written by {holder}; wait until it ends, or choose another") from None
    except OSError as error:
        _remove_empty(made)
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            raise ValueError(f"{shown(setting)[1:-1]} cannot be a folder ({error.strerror}); choose another") from None
        raise OSError(f"{setting} cannot be written ({error.strerror}); choose another folder") from error

    def let_go() -> None:
        with suppress(OSError):
            (path / LOCK).unlink()  # before it is let go: whoever locks then finds that its file is gone
        lock.release()
        _remove_empty(made)

    try:
        with suppress(OSError):  # only for the message above
            (path / LOCK).write_text(f"process {os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")
        for partial in path.glob(PARTIAL):
            shutil.rmtree(partial, ignore_errors=True)
        with interrupts.undone(let_go):
            yield
    finally:
        let_go()


def visible(folder: Path) -> list[str]:
    """Return what a folder holds, in order, without locks and what a killed process was about to write."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith(".")) if folder.is_dir() else []


def _remove_empty(folders: list[Path]) -> None:
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()
