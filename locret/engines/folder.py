"""The contexts of a folder as an engine's process knows them: found by the ids that a prompt begins with."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from locret.engines.prefix import Prefix

LEAD = 8
"""Ids by which a context is recognised: those of another one differ, as they are drawn from a digest, and an ordinary
text does not begin with them."""

Stamp = tuple[int, int]
"""When a file was changed, in nanoseconds, and its bytes: a file with another stamp is read again."""


def stamp_of(path: str | Path) -> Stamp:
    """Return the stamp of a file.

    Raises:
        OSError: If there is none.
    """
    stat = os.stat(path)
    return stat.st_mtime_ns, stat.st_size


@dataclass(frozen=True)
class Listed:
    """A file of the folder."""

    path: Path
    stamp: Stamp
    ids: tuple[int, ...] = ()
    """What stands for the context in a prompt; none if the file is no context."""
    wrong: str = ""
    """Why it cannot be asked here."""

    @property
    def unchanged(self) -> bool:
        """Whether the file is as it was when it was read."""
        try:
            return stamp_of(self.path) == self.stamp
        except OSError:
            return False


class ContextFolder:
    """The contexts in a folder, read once for each change of a file; of their units nothing stays in memory.

    Args:
        folder: Where the files are; those that are hidden, and folders below, are left alone.
        check: Raises ValueError for a context that the engine cannot use.

    Raises:
        ValueError: If there is no such folder.
    """

    def __init__(self, folder: str | Path, check: Callable[[Path, Prefix], None]) -> None:
        self.folder, self._check = Path(folder).expanduser(), check
        if not self.folder.is_dir():
            raise ValueError(f"contexts={str(folder)!r} is no folder; give the one that contexts are saved in")
        self._files: dict[str, Listed] = {}
        self._by_lead: dict[tuple[int, ...], Listed] = {}

    def refresh(self) -> None:
        """Look for files that are new, changed or gone.

        Raises:
            OSError: If the folder cannot be listed.
        """
        paths = sorted(path for path in self.folder.iterdir() if path.is_file() and not path.name.startswith("."))
        known = {name: listed for name, listed in self._files.items() if listed.unchanged}
        self._files = {path.name: known.get(path.name) or self._listed(path) for path in paths}
        self._by_lead = {listed.ids[:LEAD]: listed for listed in self._files.values() if listed.ids}

    def _listed(self, path: Path) -> Listed:
        stamp: Stamp = (0, 0)
        ids: tuple[int, ...] = ()
        try:
            stamp, prefix = stamp_of(path), Prefix.from_file(path)
            if prefix.units < LEAD:
                raise ValueError(f"{path} has so few units that their ids may begin any text; read more text")
            ids = tuple(prefix.placeholders)
            self._check(path, prefix)
        except (ValueError, OSError) as error:
            return Listed(path, stamp, ids, str(error))
        return Listed(path, stamp, ids)

    def beginning(self, ids: Sequence[int]) -> Listed | None:
        """Return the context whose ids a prompt begins with; only the first few of them have been compared."""
        return self._by_lead.get(tuple(ids[:LEAD]))
