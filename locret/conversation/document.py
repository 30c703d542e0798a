"""What there is to read: a text, a file, pieces or ids; opened here, tokenised in bounded memory, shown as it is read.

A text may be cut where tokenising the text on both sides of the cut in one piece gives the same tokens as tokenising
up to the cut, and then beyond it. That is tested at every cut, with `margin` characters on each side; what follows one
is tokenised together with what precedes it, and the tokens of the latter dropped, so that nothing happens at a cut that
happens only at a text's start (a space put before the first word, say). No offsets are needed, so any tokenizer does.

Cuts are looked for before white space first, then anywhere. If a whole window has none (a word longer than that, in
which no cut can be proven), it grows up to `GROWTH` times, and is then cut regardless: memory stays bounded and no text
is lost, but the tokens next to that cut may differ.
"""

from __future__ import annotations

import copy
import os
import re
import stat
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from locret import shipped
from locret.cache.cache import RetentionCache
from locret.conversation.formats import CONVERTED, pieces_of
from locret.token_ids import ids_of

GROWTH = 4
WINDOW = 1 << 17
"""Characters that are tokenised at a time."""
TRIES = 24
"""Cuts tried of each kind, and starts of the text before a cut: enough to fall on each phase of a digit group."""
HELD = 64
"""Characters at a text's end that wait for what follows; tokens are shorter, but for long runs of one character."""
WORD_START = re.compile(r"(?<=\S)(?=\s)")
_FILES = (".txt", ".md", ".rst", ".tex", ".json", ".jsonl", ".csv", ".xml", ".log", *CONVERTED)
_LONGEST_PATH = 4096
_LONGEST_PIPE = 1 << 30
"""Characters of what has no size, such as standard input."""
_SLICE = 1 << 14
"""Characters between two looks at how far a text has been read."""


# -- tokens -----------------------------------------------------------------------------------------------------------


_BREAK = "\ufdd0"
"""Stands after the first character of what spells a special token and is text; no text that is exchanged has it."""
HALF_A_CHARACTER = "\ufffd"
_SPLITTERS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
_LOCK = Lock()


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the token ids of a text without special tokens around it, whatever the model's maximum length."""
    arguments: dict[str, Any] = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
    if _BREAK not in text:
        return list(tokenizer(text, **arguments)["input_ids"])
    with _LOCK:  # a copy, because a tokenizer remembers this setting, and other threads use it
        splitter = _SPLITTERS.setdefault(tokenizer, None) or copy.deepcopy(tokenizer)
        _SPLITTERS[tokenizer] = splitter
    ids = list[int]()
    for nth, part in enumerate(_specials(tokenizer)[0].split(text)):
        if nth % 2:
            ids.append(tokenizer.convert_tokens_to_ids(part))
        elif part:
            whole = [part.replace(_BREAK, "")]
            for words in (whole, part.split(_BREAK)):  # a vocabulary may know the spelling as a word
                found = [
                    one for word in words for one in splitter(word, split_special_tokens=True, **arguments)["input_ids"]
                ]
                if not {*found} & {*tokenizer.all_special_ids}:
                    break
            ids += found
    return ids


def _specials(tokenizer: PreTrainedTokenizerBase) -> tuple[re.Pattern[str], int]:
    """Return what finds special tokens in a text, and the characters of the longest."""
    known = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    spelled = sorted(filter(None, {*known, *tokenizer.all_special_tokens}), key=len, reverse=True)
    longest = len(spelled[0]) if spelled else 1
    return re.compile(f"({'|'.join(map(re.escape, spelled)) or '(?!)'})(?!{_BREAK})"), longest


def as_text(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """Return a text for `encode` in which what spells a special token is tokenised as any other words are."""
    return "".join(all_as_text(tokenizer, [text]))


def all_as_text(tokenizer: PreTrainedTokenizerBase, pieces: Iterable[str]) -> Iterator[str]:
    """Do the same to a text that comes in pieces."""
    (spelled, longest), held = _specials(tokenizer), ""
    for piece in pieces:
        held += without_breaks(piece)  # a text that has them itself would say what is no special token
        held = spelled.sub(lambda found: found[0][0] + _BREAK + found[0][1:], held)
        done = max(0, len(held) - longest + 1)  # what follows may be the rest of a spelling
        if done:
            yield held[:done]
            held = held[done:]
    if held:
        yield held


def without_breaks(text: str) -> str:
    """Return a text as its reader wrote it."""
    return text.replace(_BREAK, "")


def decode(tokenizer: Any, ids: Iterable[int]) -> str:
    """Return the text of generated ids, as the model wrote it: no clean-up that would differ from word to word."""
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


class Decoder:
    """Turns tokens into text as they come: a character of several tokens comes with the last of them.

    Tokenizers such as SentencePiece's leave out the space before the first word that they decode, so tokens are decoded
    together with those before them.

    Args:
        tokenizer: The backbone's.
        before: Tokens of the text that these go on with.
    """

    def __init__(self, tokenizer: Any, before: Iterable[int] = ()) -> None:
        self.tokenizer, self._ids = tokenizer, [*before]
        self._start, self._read = 0, len(self._ids)

    def add(self, ids: Iterable[int], *, last: bool = False) -> str:
        """Take tokens, maybe the last ones, and return what of the text is certain now."""
        self._ids.extend(ids)
        new = self.added()
        if not new or (new.endswith(HALF_A_CHARACTER) and not last):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return new

    def added(self, *more: int) -> str:
        """Return what the tokens that are not text yet, and more, add to the text."""
        before = decode(self.tokenizer, self._ids[self._start : self._read])
        return decode(self.tokenizer, [*self._ids[self._start :], *more])[len(before) :]


def leading_special_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that the tokenizer puts before a text by default (bos), found by asking it."""
    plain = encode(tokenizer, "a")
    special = list(tokenizer.encode("a", add_special_tokens=True))
    for start in range(len(special) - len(plain) + 1):
        if special[start : start + len(plain)] == plain:
            return special[:start]
    return []


@dataclass
class TokenStream:
    """A text that is tokenised as it comes in; the tokens are those of the whole text."""

    LONGEST_PENDING: ClassVar[int] = GROWTH * WINDOW
    """Characters that may wait for what follows them."""
    tokenizer: PreTrainedTokenizerBase
    """Any tokenizer; no offsets are needed."""
    window: int = WINDOW
    """Characters tokenised at a time."""
    margin: int = 1 << 10
    """Characters on each side of a cut that have to agree."""
    context: str = ""
    """The end of a text that came before and whose tokens are known."""
    pending: str = ""
    """What followed it, and has no tokens yet."""

    def add(self, pieces: Iterable[str]) -> Iterator[list[int]]:
        """Take more of the text and yield the tokens that no later text can change."""
        wanted = self.window
        for piece in pieces:
            for start in range(0, len(piece), self.window):  # a piece may be the whole text
                self.pending += piece[start : start + self.window]
                while len(self.pending) >= wanted:
                    if (ids := self._cut(self.margin)) is None and wanted < GROWTH * self.window:
                        wanted += self.window
                        continue
                    wanted = self.window
                    if ids := self._forced_cut(self.margin) if ids is None else ids:
                        yield ids

    def hold(self) -> Iterator[list[int]]:
        """Yield the tokens of all but the last words, which wait for what follows; all of a text too short for that."""
        margin = min(HELD, len(self.pending) // 4)
        ids = self._cut(margin, within_words=margin == HELD)
        if ids is None and len(self.pending) > self.margin:
            ids = self._forced_cut(HELD)
        if ids is None and not self.context:
            ids = self.finish()
        if ids:
            yield ids

    def rest(self, text: str) -> list[int]:
        """Return the tokens of all that waits and of a last text."""
        return [*(token for block in self.add([text]) for token in block), *self.finish()]

    def followed(self, text: str) -> tuple[list[int], int]:
        """Return what `rest` does, and which of these tokens is the first that the last text has a part in."""
        alone, ids = replace(self).finish(), self.rest(text)
        return ids, shared(alone, ids)

    def finish(self) -> list[int]:
        """Return the tokens of all that waits: nothing follows, or what does is no text."""
        ids = _encode_after(self.tokenizer, self.context, self.pending)
        self.context, self.pending = (self.context + self.pending)[-self.margin :], ""
        return ids

    def _cut(self, margin: int, *, within_words: bool = True) -> list[int] | None:
        """Take what waits up to a cut in its second half that changes no token; None if no such place is found.

        A margin that is shorter than a word does not show that a cut within one is right.
        """
        text = self.pending
        first, last = max(len(text) // 2, margin), len(text) - margin
        word_starts = [match.start() for match in WORD_START.finditer(text, first, last)][-TRIES:]
        within = range(last, max(first, last - TRIES), -1) if within_words else ()
        for cut in [*reversed(word_starts), *within]:
            ids = _encode_after(self.tokenizer, self.context, text[:cut])
            before = _faithful_end(self.tokenizer, ids, self.context + text[:cut], margin)
            if before is None:
                continue
            before_ids = encode(self.tokenizer, before)
            if encode(self.tokenizer, before + text[cut : cut + margin])[: len(before_ids)] == before_ids:
                self.context, self.pending = before, text[cut:]
                return ids
        return None

    def _forced_cut(self, margin: int) -> list[int]:
        """Take all that waits but for the last `margin` characters."""
        text, cut = self.pending, len(self.pending) - margin
        ids = _encode_after(self.tokenizer, self.context, text[:cut])
        self.context, self.pending = text[cut - margin : cut], text[cut:]
        return ids


def _faithful_end(tokenizer: PreTrainedTokenizerBase, ids: list[int], text: str, margin: int) -> str | None:
    """The last `margin` or more characters of a text whose tokens, made without the rest, end as `ids`; or None.

    Starting inside a word or a group of digits changes the tokens for a while; a start is right if they agree at last.
    """
    earliest = max(len(text) - 2 * margin, 0)
    word_starts = [match.start() for match in WORD_START.finditer(text, earliest, len(text) - margin)][:TRIES]
    for start in [*word_starts, *range(earliest, min(earliest + TRIES, len(text) - 1))]:
        end_ids = encode(tokenizer, text[start:])
        agreeing = max(len(end_ids) // 2, 1)
        if end_ids[-agreeing:] == ids[-agreeing:]:
            return text[start:]
    return None


def _encode_after(tokenizer: PreTrainedTokenizerBase, context: str, text: str) -> list[int]:
    """Return the tokens of a text that follows another; if they cannot be told apart, those of the text alone."""
    context_ids = encode(tokenizer, context) if context else []
    ids = encode(tokenizer, context + text)
    return ids[len(context_ids) :] if ids[: len(context_ids)] == context_ids else encode(tokenizer, text)


def shared(ids: Iterable[int], others: Iterable[int]) -> int:
    """Return how many ids two lists begin with alike."""
    agree = [one == other for one, other in zip(ids, others, strict=False)]
    return (*agree, False).index(False)


# -- documents --------------------------------------------------------------------------------------------------------


@dataclass
class Document:
    """A text to read, or its token ids, and how much of it there is."""

    name: str
    pieces: Iterable[str] | None = None
    ids: Iterable[list[int]] | None = None
    size: int | None = None
    """Characters, bytes or tokens; None if unknown."""
    unit: str = "characters"

    def __post_init__(self) -> None:
        self.name = self.name.encode("utf-8", "replace").decode()  # the name of a file may be bytes that are no text

    def words(self, tokenizer: Any, *, plain: bool = False, raw: bool = False) -> Iterator[str]:
        """Yield its text as it is to be tokenised: trimmed unless `plain`, and `as_text` unless `raw`."""
        assert self.pieces is not None
        pieces: Iterator[str] = filter(None, self.pieces)
        pieces = pieces if plain else trimmed(pieces)
        pieces = pieces if raw else all_as_text(tokenizer, pieces)
        if (first := next(pieces, None)) is None:
            raise ValueError(f"{self.name} is empty; give a text to read")
        yield from chain([first], pieces)

    def count(self, tokenizer: Any) -> None:
        """Tokenise it all, so that its size is known in tokens; 8 bytes each are held."""
        stream = TokenStream(tokenizer)
        found = [one for block in stream.add(self.words(tokenizer)) for one in block] + stream.finish()
        self.pieces, self.ids, self.size, self.unit = None, [found], len(found), "tokens"


def open_document(source: Any, name: str | None = None) -> Document:
    """Return what a user gave to be read.

    A str is the path of a file if there is one of that name, else the text itself. Of an iterator the first item
    decides: pieces of a text, ids, or lists of ids.
    """
    if name is not None and not is_text(name):
        raise ValueError(f"name={name!r} is no text; give a name, or leave it out")
    if isinstance(source, str) and not _is_path(source):
        if not source.strip():
            raise ValueError("the text is empty; give something to read")
        return Document(name or "text", iter([_piece(source)]), size=len(source))
    if isinstance(source, (str, Path)):
        return open_file(source, name)
    if isinstance(source, Tensor):
        if source.ndim > 2 or (source.ndim == 2 and source.shape[0] != 1):
            raise ValueError(f"ids of shape {tuple(source.shape)} are no single text; give (N,) ids")
        source = source.flatten().tolist()
    size = len(source) if isinstance(source, (list, tuple, array)) else None
    if isinstance(source, (bytes, bytearray, Mapping, Set)) or not isinstance(source, Iterable):
        raise ValueError(
            f"{type(source).__name__} cannot be read; give a text, a path, an iterator of pieces, or token ids"
        )
    items = iter(source)
    if (first := next(items, None)) is None:
        raise ValueError("the text is empty; give something to read")
    items = chain([first], items)
    if isinstance(first, str):
        return Document(name or "text", map(_piece, items))
    return Document(name or "ids", ids=map(ids_of, items), size=size if isinstance(first, int) else None, unit="tokens")


def open_file(file: str | Path, name: str | None = None, setting: str = "") -> Document:
    """Return a file's text, a folder's, or that of standard input for `-`; messages put `setting` before the path."""
    if not str(file):  # which would be the folder where the command runs
        raise ValueError(f"{setting}{file!r} names no file; give its path, or . for the folder where you are")
    path = Path(os.path.expanduser(shipped.find(str(file))))
    if (pieces := pieces_of(path, setting, lambda one: open_file(one, setting=setting).pieces)) is not None:
        return Document(name or path.resolve().name, pieces)
    size = path.stat().st_size if path.is_file() else None
    called = name or ("standard input" if str(file) == "-" else path.name)
    return Document(called, read_text(file, setting=setting), size=size, unit="bytes")


def read_text(source: str | Path, block_chars: int = 1 << 20, setting: str = "--prompt-file ") -> Iterator[str]:
    """Read a UTF-8 text block by block; a byte-order mark is dropped, line ends become newlines.

    Args:
        source: Path of a file, or the name of a shipped text; `-` is standard input.
        block_chars: Characters per block; never more are held.
        setting: What error messages put before the path.

    Yields:
        Blocks of at most `block_chars` characters. The file is opened at once, not at the first block.
    """
    where: Any = sys.stdin.fileno() if str(source) == "-" else os.path.expanduser(shipped.find(str(source)))
    try:
        stream = open(where, encoding="utf-8-sig", closefd=not isinstance(where, int))  # noqa: SIM115
    except FileNotFoundError:
        raise ValueError(f"{setting}{source}: no such file; check the path, or use - for standard input") from None
    except IsADirectoryError:
        raise ValueError(f"{setting}{source}: that is a folder; give one text file") from None
    except OSError as error:
        raise ValueError(f"{setting}{source}: cannot be read ({error.strerror}); check its permissions") from None
    mode, read = os.fstat(stream.fileno()).st_mode, 0
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stream.isatty()):
        stream.close()
        raise ValueError(f"{setting}{source}: that is a device, which may have no end; give a file, or pipe a text in")

    def blocks() -> Iterator[str]:
        nonlocal read
        with stream:
            try:
                while block := stream.read(block_chars):
                    if not read and block.startswith("\0"):
                        raise ValueError(f"{setting}{source}: begins with NUL, as sparse files do; give a text")
                    read += len(block)
                    if read > _LONGEST_PIPE and not stat.S_ISREG(mode):
                        raise ValueError(
                            f"{setting}{source}: more than {_LONGEST_PIPE:,} characters came through a pipe; write "
                            "them to a file, and give that"
                        )
                    yield block
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{setting}{source}: not UTF-8 text ({error.reason}); if it is a text, convert it, for instance "
                    "with `iconv -t UTF-8`; of other files PDF, EPUB, DOCX and HTML are read, known by their endings"
                ) from None

    return blocks()


def trimmed(pieces: Iterable[str]) -> Iterator[str]:
    """Yield a text without the white space around it, as chat templates write it; no piece is empty."""
    held, started = "", False
    for piece in pieces:
        piece = held + (piece if started else piece.lstrip())
        body = piece.rstrip()
        held = piece[len(body) :]
        if body:
            started = True
            yield body


def is_text(value: Any) -> bool:
    """Return whether a tokenizer can read a value: half characters (surrogates) are no text."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _piece(item: Any) -> str:
    if not is_text(item):
        raise ValueError(f"a piece of the text is {repr(item)[:80]}, which is no text in Unicode; give texts only")
    return item  # type: ignore[no-any-return]


def _is_path(text: str) -> bool:
    if "\n" in text or len(text) > _LONGEST_PATH or not text.strip():
        return False
    if os.path.exists(os.path.expanduser(shipped.find(text))):
        return True
    # A mistyped name must not be read as a text of one line.
    one_word = len(text.split()) == 1
    return text.lower().endswith(_FILES) or (one_word and ("/" in text or os.sep in text))


# -- reading ----------------------------------------------------------------------------------------------------------


class ReadingBar:
    """A progress bar over a text; it counts what the text's size is known in, as far as its tokens have been read."""

    def __init__(self, document: Document, show: bool | str = True) -> None:
        notebook = any(cls.__name__ == "tqdm_notebook" for cls in tqdm.__mro__)
        disable = not show or (False if notebook else None)  # None: where nobody watches standard error
        desc = show if isinstance(show, str) else "reading"
        unit = {"bytes": "B", "characters": "chars", "tokens": "token"}[document.unit]
        self.bar = tqdm(total=document.size, unit=unit, unit_scale=True, desc=desc, disable=disable)
        self.unit, self.given, self.tokens = document.unit, 0, 0

    def pieces(self, pieces: Iterable[str]) -> Iterator[str]:
        """Pass a text on, and count it."""
        for piece in pieces:
            for start in range(0, len(piece), _SLICE):
                part = piece[start : start + _SLICE]
                self.given += len(part.encode("utf-8", "surrogatepass")) if self.unit == "bytes" else len(part)
                yield part

    def done(self, cache: RetentionCache) -> int:
        """Return how much a cache has read, in what the text's size is known in."""
        given = self.tokens if self.unit == "tokens" else self.given
        return int(given * min(1.0, cache.seen / max(self.tokens, 1)))

    def __call__(self, cache: RetentionCache) -> None:
        """Show how far a cache has got."""
        done = self.done(cache)
        self.bar.update(max(0, min(done, self.bar.total or done) - self.bar.n))

    def close(self, *, whole: bool) -> None:
        """Leave the bar as it is, full if all has been read."""
        if whole and self.bar.total is not None:
            self.bar.update(max(0, self.bar.total - self.bar.n))
        self.bar.close()
