"""Texts at addresses: fetched whole into a folder of their own, then read as files are."""

from __future__ import annotations

import re
import socket
from http.client import HTTPException
from ipaddress import ip_address
from mimetypes import guess_extension
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from locret import __version__

if TYPE_CHECKING:
    from locret.conversation.document import Document

_LARGEST = 2**30
_PATIENCE = 60.0
"""Seconds that a server may be silent."""


class _Redirects(HTTPRedirectHandler):
    """Goes where a page has moved to, but by no weaker protocol, nor from the internet to a network of this machine."""

    def redirect_request(self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Request | None:
        to = super().redirect_request(req, fp, code, msg, headers, newurl)  # it reads an address as it will be asked
        if to and (to.type not in ("https", req.type) or (_is_private(to.host) and not _is_private(req.host))):
            raise ValueError(f"it leads to {to.type}://{to.host}, which a page may not; give that address itself")
        return to


def _is_private(host: str) -> bool:
    """Return whether a host, as in an address, is this machine or one that only its networks reach."""
    try:
        found = socket.getaddrinfo(urlsplit(f"//{host}").hostname, None)
    except OSError:  # a proxy may know it
        return False
    return not all(ip_address(address[0]).is_global for *_, address in found)


def is_address(name: str) -> bool:
    """Return whether a name is that of a page, not of a file."""
    return re.match(r"https?://", name, re.IGNORECASE) is not None


def fetched(address: str, setting: str) -> Document:
    """Fetch a page, a PDF or another file of up to 1 GiB, and open it; messages put `setting` before the address."""
    from locret.conversation.document import open_file  # imports torch, which commands do not need at once

    if re.match(r"[^/]*//[^/?#]*@", address):
        raise ValueError(f"{setting}the address of a page holds a user's name or password; take it out, or give a file")
    with TemporaryDirectory(prefix="locret-") as folder:
        try:
            request = Request(address, headers={"User-Agent": f"locret/{__version__}"})
            with build_opener(_Redirects).open(request, timeout=_PATIENCE) as answer:
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
            why = " ".join(str(getattr(error, "reason", None) or error).split())
            rule = "check the address, or give a file"
            raise ValueError(f"{setting}{address} cannot be fetched ({why}); {rule}") from None
        # What is open stays readable when its folder is gone.
        return open_file(file, given.name or urlsplit(address).netloc, f"{setting}{address} as ")
