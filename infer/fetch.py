"""Texts at addresses: fetched whole into a folder of their own, then read as files are."""

from __future__ import annotations

import re
from http.client import HTTPException
from mimetypes import guess_extension
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit
from urllib.request import Request, urlopen

from locret import __version__

if TYPE_CHECKING:
    from locret.conversation.document import Document

_LARGEST = 2**30
_PATIENCE = 60.0
"""Seconds that a server may be silent."""


def is_address(name: str) -> bool:
    """Return whether a name is that of a page, not of a file."""
    return re.match(r"https?://", name, re.IGNORECASE) is not None


def fetched(address: str, setting: str) -> Document:
    """Fetch a page, a PDF or another file that can be read, and open it.

    Args:
        address: http or https.
        setting: What error messages put before the address.

    Raises:
        ValueError: If it cannot be fetched, is larger than 1 GiB, or cannot be read.
    """
    from locret.conversation.document import open_file  # imports torch, which commands do not need at once

    if re.match(r"[^/]*//[^/?#]*@", address):
        raise ValueError(f"{setting}the address of a page holds a user's name or password; take it out, or give a file")
    with TemporaryDirectory(prefix="locret-") as folder:
        try:
            request = Request(address, headers={"User-Agent": f"locret/{__version__}"})
            with urlopen(request, timeout=_PATIENCE) as answer:
                kind, given = answer.headers.get_content_type(), PurePosixPath(unquote(urlsplit(answer.url).path))
                coding, charset = answer.headers.get("Content-Encoding", ""), answer.headers.get_content_charset()
                if coding.lower() not in ("", "identity", "utf-8"):
                    raise ValueError(f"it comes packed as {coding[:20]}, which was not asked for")
                # What a server calls plain text or nothing at all is what its name says.
                known = kind not in ("text/plain", "application/octet-stream") and guess_extension(kind)
                file = Path(folder, f"page{known or given.suffix or '.txt'}")
                with file.open("wb") as into:
                    while block := answer.read(1 << 20):
                        into.write(block)
                        if into.tell() > _LARGEST:
                            raise ValueError("it is larger than 1 GiB")
                if answer.length:
                    raise ValueError("it ended early")
            if kind.startswith("text/") and charset not in (None, "utf-8"):
                try:
                    file.read_text("utf-8")  # as it is all the same
                except UnicodeDecodeError:
                    file.write_text(file.read_text(charset), "utf-8")
        except (OSError, HTTPException, ValueError, LookupError) as error:
            why = getattr(error, "reason", None) or error
            rule = "check the address, or give a file"
            raise ValueError(f"{setting}{address} cannot be fetched ({why}); {rule}") from None
        # What is open stays readable when its folder is gone.
        return open_file(file, given.name or urlsplit(address).netloc, f"{setting}{address} as ")
