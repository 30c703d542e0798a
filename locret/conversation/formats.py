"""Files that are no plain text, and folders, as text: by markitdown, so that names of pages and chapters stay in it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from locret.base.plugins import install
from locret.base.warned import warn_user

CONVERTED = {
    ".pdf": "PdfConverter",
    ".epub": "EpubConverter",
    ".docx": "DocxConverter",
    ".html": "HtmlConverter",
    ".htm": "HtmlConverter",
}
"""Endings of files that are converted to Markdown, as a whole and in memory, and markitdown's name of what does it."""


def pieces_of(path: Path, setting: str, read: Callable[[Path], Any]) -> Iterator[str] | None:
    """Return the text of a folder or of a file of another format; None of what is read as it is.

    Raises:
        ValueError: If the extra that reads the format is missing, or nothing can be read.
    """
    if path.is_dir():
        return _folder(path, setting, read)
    return iter([_converted(path, setting)]) if path.is_file() and path.suffix.lower() in CONVERTED else None


def _converted(path: Path, setting: str) -> str:
    kind = path.suffix[1:].upper()
    try:
        from markitdown import MarkItDown, StreamInfo, converters  # an extra
    except ImportError:
        raise ValueError(
            f"{setting}{path} is a file of format {kind}, which the extra documents reads; {install('documents')}, or "
            "convert it to plain text"
        ) from None
    try:
        reader = MarkItDown(enable_builtins=False, enable_plugins=False)
        # By the file's ending alone: else what is damaged would pass for plain text, or for an archive.
        reader.register_converter(getattr(converters, CONVERTED[path.suffix.lower()])())
        with path.open("rb") as file:
            text = reader.convert_stream(file, stream_info=StreamInfo(extension=path.suffix.lower())).markdown
    except Exception as error:  # of any of the libraries behind it
        why = str(error).strip().rpartition("\n")[2].rpartition(" threw ")[2] or type(error).__name__
        raise ValueError(f"{setting}{path} cannot be read as {kind} ({why}); convert it to plain text") from None
    if not text.strip():
        raise ValueError(f"{setting}{path} holds no text, pictures of pages perhaps; recognise its letters first (OCR)")
    pages = text.rstrip("\f").split("\f")
    if len(pages) > 1:
        text = "\n\n".join(f"[page {number}]\n\n{page.strip()}" for number, page in enumerate(pages, 1))
    return text


def _folder(folder: Path, setting: str, read: Callable[[Path], Any]) -> Iterator[str]:
    """Return every file of a folder below its name; without those that are no text, hidden, or ignored by git."""
    files = [path for path in _files(folder) if path.is_file() and not path.is_symlink()]
    if not files:
        raise ValueError(f"{setting}{folder} is a folder without files to read; give another, or a file")

    def pieces() -> Iterator[str]:
        left = []
        for path in files:
            name = path.relative_to(folder).as_posix().encode("utf-8", "replace").decode()
            try:
                blocks = read(path)
                first = next(blocks, "")
            except ValueError:
                left.append(name)
                continue
            if "\0" in first:
                left.append(name)
                continue
            yield f"# {name}\n\n{first}"
            yield from blocks
            yield "\n\n"
        if len(left) == len(files):
            raise ValueError(f"{setting}{folder} holds no text; its files are {', '.join(left[:3])}; give another")
        if left:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            warn_user(f"{folder}: no text, so left out: {', '.join(left[:3])}{more}")

    return pieces()


def _files(folder: Path) -> list[Path]:
    """Return a folder's files in order; those that git knows or would add, where it is a repository."""
    # What a stranger's folder configures must not run: git starts a file monitor of its own choice otherwise.
    line = ["git", "-C", str(folder), "-c", "core.fsmonitor=false", "ls-files", "-z"]
    line += ["--cached", "--others", "--exclude-standard"]
    try:
        listed = os.fsdecode(subprocess.run(line, capture_output=True, check=True).stdout).split("\0")
    except (OSError, subprocess.CalledProcessError):
        listed = []
    if any(listed):  # git lists nothing of a folder that it ignores as a whole, which somebody asks for all the same
        return sorted(folder / name for name in set(listed) if name)
    found = list[Path]()
    for here, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(here) / name for name in names if not name.startswith(".")]
    return sorted(found)
