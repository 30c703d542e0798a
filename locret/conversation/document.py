"""What there is to read: a text, a file, pieces or ids; opened here, and shown as it is read."""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from locret import shipped
from locret.base.fields import shown
from locret.conversation.text_stream import read_text, token_stream, trimmed
from locret.policy.policy import RetentionPolicy

if TYPE_CHECKING:
    from locret.backbone.adapters import Backbone
    from locret.cache.cache import RetentionCache

_FILES = (".txt", ".md", ".rst", ".tex", ".json", ".jsonl", ".csv", ".html", ".htm", ".xml", ".log", ".pdf", ".epub")
_LONGEST_PATH = 4096
_SLICE = 1 << 14
"""Characters between two looks at how far a text has been read."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """What a context was read from."""

    name: str
    sha256: str
    """Of the text in UTF-8, without byte-order mark, line ends as newlines; or of ids in decimal, one a line."""
    of: str
    """What that is the digest of: "text" or "ids"."""
    tokens: int
    """Tokens that were read, those before the text included."""

    def __post_init__(self) -> None:
        if not is_text(self.name) or self.of not in ("text", "ids"):
            raise ValueError(f"name={shown(self.name)} of {shown(self.of)} is no source")
        if not isinstance(self.sha256, str) or not re.fullmatch("[0-9a-f]{64}", self.sha256):
            raise ValueError(f"sha256={shown(self.sha256)} is no SHA-256 in hexadecimal digits")
        if type(self.tokens) is not int or self.tokens < 1:
            raise ValueError(f"tokens={shown(self.tokens)} is no number of tokens")


@dataclass
class Document:
    """A text to read, or its token ids, and how much of it there is; its digest is that of what has been taken."""

    name: str
    pieces: Iterable[str] | None = None
    ids: Iterable[list[int]] | None = None
    size: int | None = None
    """Characters, bytes or tokens; None if unknown."""
    unit: str = "characters"
    source: Path | None = None
    _digest: Any = field(default_factory=hashlib.sha256, init=False, repr=False)
    _of: str = field(default="text", init=False)

    def __post_init__(self) -> None:
        self.name = self.name.encode("utf-8", "replace").decode()  # the name of a file may be bytes that are no text
        if self.pieces is not None:
            self.pieces = self._noted(self.pieces, lambda piece: piece)
        elif self.ids is not None:
            self.ids = self._noted(self.ids, lambda block: "".join(f"{one}\n" for one in block))
            self._of = "ids"

    def _noted(self, parts: Iterable[Any], as_text: Callable[[Any], str]) -> Iterator[Any]:
        for part in parts:
            self._digest.update(as_text(part).encode("utf-8", "surrogatepass"))
            yield part

    def read(self, tokens: int) -> Source:
        """Return what has been read, once all has been taken, as so many tokens."""
        return Source(name=self.name, sha256=self._digest.hexdigest(), of=self._of, tokens=tokens)

    def count(self, tokenizer: Any) -> None:
        """Tokenise it all, so that its size is known in tokens; 8 bytes each are held."""
        assert self.pieces is not None
        found = whole(token_stream(tokenizer, trimmed(self.pieces), add_special_tokens=False))[0].tolist()
        if not found:
            raise ValueError(f"{self.name} is empty; give a text to read")
        self.pieces, self.ids, self.size, self.unit = None, [found], len(found), "tokens"


def open_document(source: Any, name: str | None = None) -> Document:
    """Return what a user gave to be read.

    A str is the path of a file if there is one of that name, else the text itself. Of an iterator the first item
    decides: pieces of a text, ids, or lists of ids.

    Args:
        source: A text, a path, an iterator of pieces of a text, ids, or an iterator of ids or of lists of them.
        name: What to call it; else the file's name.

    Raises:
        ValueError: For an empty text, a file that is not there, or something else.
    """
    if name is not None and not is_text(name):
        raise ValueError(f"name={name!r} is no text; give a name, or leave it out")
    if isinstance(source, str) and not _is_path(source):
        if not source.strip():
            raise ValueError("the text is empty; give something to read")
        return Document(name or "text", iter([_piece(source)]), size=len(source))
    if isinstance(source, (str, Path)):
        return _file(Path(os.path.expanduser(shipped.find(str(source)))), name)
    if isinstance(source, Tensor):
        if source.ndim > 2 or (source.ndim == 2 and source.shape[0] != 1):
            raise ValueError(f"ids of shape {tuple(source.shape)} are no single text; give (N,) ids")
        source = source.flatten().tolist()
    size = len(source) if isinstance(source, (list, tuple, array)) else None
    try:
        if isinstance(source, (bytes, bytearray, Mapping, Set)):  # their items are none of these
            raise TypeError
        items = iter(source)
    except TypeError:
        raise ValueError(
            f"{type(source).__name__} cannot be read; give a text, a path, an iterator of pieces, or token ids"
        ) from None
    first = next(items, None)
    if first is None:
        raise ValueError("the text is empty; give something to read")
    items = chain([first], items)
    if isinstance(first, str):
        return Document(name or "text", map(_piece, items))
    return Document(name or "ids", ids=map(_ids, items), size=size if isinstance(first, int) else None, unit="tokens")


def _piece(item: Any) -> str:
    if not is_text(item):
        raise ValueError(f"a piece of the text is {repr(item)[:80]}, which is no text in Unicode; give texts only")
    return item  # type: ignore[no-any-return]


def is_text(value: Any) -> bool:
    """Return whether a tokenizer can read a value: half characters (surrogates) are no text."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _ids(item: Any) -> list[int]:
    """Return one id, or several, as numbers of Python.

    Raises:
        ValueError: For anything else: nothing is rounded.
    """
    if type(item) is int:
        return [item]
    try:
        ids = torch.as_tensor(item).flatten()
        if isinstance(item, (list, tuple)) and not len(ids):  # a line of a text may have no tokens
            return []
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise TypeError
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ValueError(f"{shown(item)} among the token ids is none; give whole numbers, or lists of them") from None
    return ids.tolist()


def _is_path(text: str) -> bool:
    if "\n" in text or len(text) > _LONGEST_PATH or not text.strip():
        return False
    if os.path.exists(os.path.expanduser(shipped.find(text))):
        return True
    # A mistyped name must not be read as a text of one line.
    one_word = len(text.split()) == 1
    return text.lower().endswith(_FILES) or (one_word and ("/" in text or os.sep in text))


def _file(path: Path, name: str | None) -> Document:
    if not path.exists():
        raise ValueError(f"{path}: no such file; check the path, or give the text itself with a line's end in it")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give one text file")
    size = path.stat().st_size if path.is_file() else None
    return Document(name or path.name, read_text(path, setting=""), size=size, unit="bytes", source=path)


@dataclass
class ReadingBar:
    """A progress bar over a text of known or unknown size; tokens are not known before, so it counts what they are of.

    Args:
        document: What is read.
        shown: Show the bar, in a notebook or where somebody watches standard error.
    """

    document: Document
    shown: bool = True
    waiting: Callable[[], str] = str
    """What has been handed out and has no tokens yet."""
    bar: Any = field(default=None, init=False)
    _given: int = field(default=0, init=False)
    _tokens: int = field(default=0, init=False)

    def start(self) -> None:
        """Begin to count the time; nothing is shown before."""
        notebook = any(cls.__name__ == "tqdm_notebook" for cls in tqdm.__mro__)
        unit = {"bytes": "B", "characters": "chars", "tokens": "token"}[self.document.unit]
        disable = not self.shown or (False if notebook else None)
        self.bar = tqdm(total=self.document.size, unit=unit, unit_scale=True, desc="reading", disable=disable)

    def pieces(self, pieces: Iterable[str]) -> Iterator[str]:
        """Pass a text on, and count it."""
        for piece in pieces:
            for start in range(0, len(piece), _SLICE):
                part = piece[start : start + _SLICE]
                self._given += self._size(part)
                yield part

    def blocks(self, blocks: Iterable[list[int]]) -> Iterator[list[int]]:
        """Pass token ids on, and count them."""
        for block in blocks:
            self._tokens += len(block)
            yield block

    def __call__(self, cache: RetentionCache) -> None:
        """Show how far a cache has got."""
        done = self._given - self._size(self.waiting()) if self.document.unit != "tokens" else self._tokens
        done = int(done * min(1.0, cache.seen / max(self._tokens, 1)))
        self.bar.update(max(0, min(done, self.document.size or done) - self.bar.n))

    def end(self) -> None:
        """Show that all has been read."""
        if self.document.size is not None:
            self.bar.update(max(0, self.document.size - self.bar.n))

    def close(self) -> None:
        """Leave the bar as it is."""
        self.bar.close()

    def _size(self, text: str) -> int:
        return len(text.encode("utf-8", "surrogatepass")) if self.document.unit == "bytes" else len(text)


def as_prompt(blocks: Iterable[list[int]], policy: RetentionPolicy, most: int) -> Tensor | Iterable[list[int]]:
    """Return ids as `prefill` takes them: as a whole where the plan depends on their number, or where they are few.

    Args:
        blocks: Lists of ids.
        policy: How they will be read.
        most: Tokens that are not worth a stream: no more than their number is allocated then.
    """
    if policy.plans_by_length:
        return whole(blocks)
    rest, head = iter(blocks), list[int]()
    for block in rest:
        head.extend(block)
        if len(head) > most:
            return chain([head], rest)
    return torch.tensor([head], dtype=torch.long)


def whole(blocks: Iterable[list[int]]) -> Tensor:
    """Return ids as (1, N), 8 bytes each, for a plan that depends on N."""
    found = array("q")
    for block in blocks:
        found.extend(block)
    return torch.tensor(found, dtype=torch.long)[None]


class PositionWarning:
    """Says once, as early as it is known, that a text goes beyond the positions the backbone was trained on."""

    def __init__(self, backbone: Backbone, policy: RetentionPolicy) -> None:
        self.backbone, self.policy, self.said = backbone, policy, False

    def __call__(self, cache: RetentionCache) -> None:
        """Look at how far the cache's positions reach now."""
        limit, true = self.backbone.max_positions, self.policy.positions == "original" or self.backbone.slides
        reach = cache.next_position
        if self.said or reach <= limit:
            return
        self.said = True
        way_out = (
            "use --positions compact, which numbers the kept units only"
            if self.policy.positions == "original" and not self.backbone.slides
            else "shorten the prompt"
            if true
            else "lower --budget or --chunk-size"
            if self.policy.when == "chunk"
            else "use --when chunk, which holds fewer units"
        )
        warnings.warn(
            f"rotary positions reach beyond {limit}, the longest context of this backbone, where its answers usually "
            f"fall apart; reading goes on, but {way_out}",
            stacklevel=2,
        )
