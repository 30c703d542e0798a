"""The body of an upload as it comes: a text, or a form with one file. It begins to be read with its first byte."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from locret.infer.serve.index import Entry
from locret.infer.serve.library import Library
from locret.infer.serve.refusal import Refusal
from locret.infer.serve.upload import TooLarge

_BOUNDARY = 70
"""Characters of the boundary of a form, as RFC 2046 allows."""
_FRAME = 1 << 16
"""Bytes of a form that are not its file."""
_NOT_ONE = "the form has other parts than one file; send one file, and name, source and system in the query"
_TEXTS = ("text/", "application/octet-stream", "application/x-www-form-urlencoded")
"""Types of a body that is a text; the last is what curl says of --data-binary."""


@dataclass
class About:
    """What a text is called, its system message, and what of it is protected."""

    name: str
    source: str | None
    system: str | None
    protect: list[str]


def receiver_of(headers: Mapping[str, str], library: Library, about: About) -> Receiver:
    """Return what takes the body of a request."""
    kind, options = parse_options_header(headers.get("content-type", "text/plain"))
    given = kind.decode("latin-1").lower()
    charset = options.get(b"charset", b"utf-8").decode("latin-1").lower()
    coding = headers.get("content-encoding", "identity").lower()
    if coding != "identity":
        raise Refusal(415, f"Content-Encoding {coding[:40]} is not taken; send the text as it is")
    if charset not in ("utf-8", "utf8", "us-ascii"):
        raise Refusal(415, f"charset={charset[:40]} is not taken; send the text as UTF-8")
    if given == "multipart/form-data":
        if not (boundary := options.get(b"boundary")):
            raise Refusal(400, "Content-Type multipart/form-data has no boundary; let the client write that header")
        if len(boundary) > _BOUNDARY:
            raise Refusal(400, f"the form's boundary has more than {_BOUNDARY} characters; let the client choose one")
        return FormReceiver(library, about, boundary)
    if not given.startswith(_TEXTS):
        raise Refusal(
            415, f"Content-Type {given[:80]} is no text; send the text as text/plain in UTF-8, or as a file of a form"
        )
    length = headers.get("content-length", "")
    return Receiver(library, about, int(length) if length.isdecimal() and len(length) < 20 else None)


class Receiver:
    """Takes a body that is a text, of so many bytes if that is known."""

    def __init__(self, library: Library, about: About, total: int | None = None) -> None:
        self.library, self.about = library, about
        self.upload = library.upload(about.name, total=total)
        self.entry: Entry | None = None

    def take(self, data: bytes) -> None:
        """Take a part of the body."""
        self.upload.write(data)
        if self.entry is None:
            about = self.about
            more: Any = {"source": about.source, "system": about.system, "protect": about.protect}
            self.entry = self.library.read(about.name, self.upload, **more)

    def end(self) -> Entry:
        """Take note that all has come."""
        self.upload.end()
        assert self.entry is not None
        return self.entry

    def fail(self, message: str) -> None:
        """Give it up."""
        self.upload.fail(message)
        if self.entry is None:
            self.upload.remove()


class FormReceiver(Receiver):
    """Takes the one file of a multipart form."""

    def __init__(self, library: Library, about: About, boundary: bytes) -> None:
        super().__init__(library, about)
        self._header, self._files, self._taken, self._whole = [b"", b""], 0, 0, False
        self._parser = MultipartParser(
            boundary,
            {
                "on_header_begin": self._on_begin,
                "on_header_field": lambda data, start, end: self._add(0, data[start:end]),
                "on_header_value": lambda data, start, end: self._add(1, data[start:end]),
                "on_header_end": self._on_header,
                "on_part_data": lambda data, start, end: self._on_data(data[start:end]),
                "on_end": self._on_end,
            },
        )

    def take(self, data: bytes) -> None:
        """Take a part of the body."""
        self._taken += len(data)
        if self._taken > self.upload.most + _FRAME:
            raise TooLarge(f"the form has more than {self.upload.most:,} bytes; send one file in it, and nothing else")
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise ValueError(
                f"the form cannot be read ({error}); send one file in it, or the text as the body"
            ) from error

    def end(self) -> Entry:
        """Take note that all has come."""
        if not self._whole:
            raise ValueError("the form breaks off; send one file in it, or the text as the body")
        return super().end()

    def _on_begin(self) -> None:
        self._header = [b"", b""]

    def _add(self, which: int, data: bytes) -> None:
        self._header[which] += data

    def _on_header(self) -> None:
        if self._header[0].lower() != b"content-disposition":
            return
        _, options = parse_options_header(self._header[1])
        self._files += 1
        if self._files > 1 or b"filename" not in options:
            raise ValueError(_NOT_ONE)
        self.about.source = self.about.source or options[b"filename"].decode("utf-8", "replace")[:200] or None

    def _on_data(self, data: bytes) -> None:
        if not self._files:
            raise ValueError(_NOT_ONE)
        super().take(data)

    def _on_end(self) -> None:
        self._whole = True
