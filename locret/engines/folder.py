"""The contexts of a folder as an engine's process knows them: found by name, or by the ids a prompt begins with."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from locret.base.fields import shown
from locret.engines.prefix import Prefix

_LEAD = 16
"""Ids by which a context is recognised; those of another one differ, as they are drawn from a digest."""

LEAST = 8
"""Fewer ids may begin an ordinary text: a context of so few is recognised where a request says that it has one."""

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
    digest: bytes = b""
    """Of the units."""

    @property
    def unchanged(self) -> bool:
        """Whether the file is as it was when it was read."""
        try:
            return stamp_of(self.path) == self.stamp
        except OSError:
            return False


class ContextFolder:
    """The contexts in a folder, read once for each change of a file; of their units nothing stays in memory.

    Those in folders below count too; what is hidden is left alone.

    Args:
        folder: Where the files are.
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
        now = dict(_stamps(self.folder))
        if now == {name: listed.stamp for name, listed in self._files.items()}:
            return
        known = self._files
        self._files = {
            name: known[name] if name in known and known[name].stamp == stamp else self._listed(name, stamp)
            for name, stamp in sorted(now.items())
        }
        digests: dict[tuple[int, ...], set[bytes]] = {}
        for listed in self._files.values():
            digests.setdefault(listed.ids[:_LEAD], set()).add(listed.digest)
        for name, listed in self._files.items():
            if listed.ids and len(digests[listed.ids[:_LEAD]]) > 1:  # and so it stays: engines keep what they computed
                wrong = f"{listed.path} has so few units that equal ids stand for those of another file; read more text"
                self._files[name] = replace(listed, wrong=wrong)
        self._by_lead = {listed.ids[:_LEAD]: listed for listed in self._files.values() if listed.ids}

    def _listed(self, name: str, stamp: Stamp) -> Listed:
        path = self.folder / name
        try:
            prefix = Prefix.from_file(path)
        except (ValueError, OSError) as error:
            return Listed(path, stamp, wrong=str(error))
        ids = tuple(prefix.placeholders)
        try:
            self._check(path, prefix)
        except ValueError as error:
            return Listed(path, stamp, ids, str(error), prefix.digest)
        return Listed(path, stamp, ids, digest=prefix.digest)

    @property
    def files(self) -> list[Listed]:
        """All files, in the order of their names."""
        return list(self._files.values())

    def named(self, name: str) -> Listed:
        """Return the file of that name below the folder, with or without its ending.

        Raises:
            ValueError: If there is none, or several.
        """
        if name in self._files:
            return self._files[name]
        found = [listed for file, listed in self._files.items() if os.path.splitext(file)[0] == name]
        if not found:
            raise ValueError(f"there is no context {shown(name)} in {self.folder}")
        if len(found) > 1:
            raise ValueError(f"{name!r} may be {' or '.join(one.path.name for one in found)}; name it with its ending")
        return found[0]

    def beginning(self, ids: Sequence[int], *, least: int = LEAST) -> Listed | None:
        """Return the context whose ids a prompt begins with; only the first few of them have been compared.

        Args:
            ids: The prompt.
            least: Fewest ids that tell a context from a text.
        """
        for length in sorted({len(lead) for lead in self._by_lead}, reverse=True):
            if length >= least and (listed := self._by_lead.get(tuple(ids[:length]))):
                return listed
        return None


def _stamps(folder: Path, below: str = "", inside: tuple[str, ...] = ()) -> Iterator[tuple[str, Stamp]]:
    inside = (*inside, os.path.realpath(folder / below))
    with os.scandir(folder / below) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            try:
                if entry.is_dir():
                    if os.path.realpath(entry.path) not in inside:  # a link to where it lies leads nowhere else
                        yield from _stamps(folder, f"{below}{entry.name}/", inside)
                elif entry.is_file():
                    stat = entry.stat()
                    yield f"{below}{entry.name}", (stat.st_mtime_ns, stat.st_size)
            except OSError:  # gone since the folder was listed, a link to itself, or not ours: lost+found
                continue
