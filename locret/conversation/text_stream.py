"""Text of any size to tokens in bounded memory, with the same tokens as if it were tokenised whole.

A text may be cut where tokenising the text on both sides of the cut in one piece gives the same tokens as tokenising
up to the cut, and then beyond it. That is tested at every cut, with `margin` characters on each side; what follows one
is tokenised together with what precedes it, and the tokens of the latter dropped, so that nothing happens at a cut that
happens only at a text's start (a space put before the first word, say). No offsets are needed, so any tokenizer does.

Cuts are looked for before white space first, then anywhere. If a whole window has none (a word longer than that, in
which no cut can be proven), it grows up to `GROWTH` times, and is then cut regardless: memory stays bounded and no text
is lost, but the tokens next to that cut may differ.
"""

from __future__ import annotations

import os
import re
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from locret import shipped
from locret.conversation.templates import encode, leading_special_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GROWTH = 4
WINDOW = 1 << 17
"""Characters that are tokenised at a time."""
LONGEST_PENDING = GROWTH * WINDOW
"""Characters that may wait for what follows them."""
TRIES = (
    24  # cuts tried of each kind, and starts of the text before a cut: enough to fall on each phase of a digit group
)
HELD = 64
"""Characters at a text's end that wait for what follows; tokens are shorter, but for long runs of one character."""
WORD_START = re.compile(r"(?<=\S)(?=\s)")


def read_text(source: str | Path, block_chars: int = 1 << 20, setting: str = "--prompt-file ") -> Iterator[str]:
    """Read a UTF-8 text block by block; a byte-order mark is dropped, line ends become newlines.

    Args:
        source: Path of a file, or the name of a shipped text; `-` is standard input.
        block_chars: Characters per block; never more are held.
        setting: What error messages put before the path.

    Yields:
        Blocks of at most `block_chars` characters. The file is opened at once, not at the first block.

    Raises:
        ValueError: If the file is missing, a folder or not readable, or, while reading, not UTF-8.
    """
    stream = _open(source, setting)

    def blocks() -> Iterator[str]:
        with stream:
            try:
                while block := stream.read(block_chars):
                    yield block
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{setting}{source}: not UTF-8 text ({error.reason}); convert it, "
                    "for instance with `iconv -t UTF-8`"
                ) from None

    return blocks()


def _open(source: str | Path, setting: str) -> TextIO:
    if str(source) == "-":
        return open(sys.stdin.fileno(), encoding="utf-8-sig", closefd=False)
    try:
        return open(Path(os.path.expanduser(shipped.find(str(source)))), encoding="utf-8-sig")
    except FileNotFoundError:
        raise ValueError(f"{setting}{source}: no such file; check the path, or use - for standard input") from None
    except IsADirectoryError:
        raise ValueError(f"{setting}{source}: that is a folder; give one text file") from None
    except OSError as error:
        raise ValueError(f"{setting}{source}: cannot be read ({error.strerror}); check its permissions") from None


def token_stream(
    tokenizer: PreTrainedTokenizerBase,
    pieces: Iterable[str],
    *,
    add_special_tokens: bool = True,
    window: int = WINDOW,
    margin: int = 1 << 10,
) -> Iterator[list[int]]:
    """Tokenise a text that comes in pieces, holding a few windows of it at most.

    Args:
        tokenizer: Any tokenizer; no offsets are needed.
        pieces: The text, cut anywhere.
        add_special_tokens: Whether to begin with the tokenizer's leading special tokens (bos).
        window: Characters tokenised at a time, at least 4 `margin`.
        margin: Characters on each side of a cut that have to agree. Longer than any word, tokens are exact.

    Yields:
        Lists of token ids, none empty; concatenated they are the ids of the whole text without trailing special tokens.

    Raises:
        ValueError: If `window` is below 4 `margin`.
    """
    if margin < 1 or window < 4 * margin:
        raise ValueError(
            f"window={window} cannot hold cuts with margin={margin}; use window >= 4 * margin, margin >= 1"
        )
    return _token_stream(tokenizer, pieces, add_special_tokens, window, margin)


class Place(NamedTuple):
    """Where a character is among the tokens of a text."""

    first: int
    """Number of the first token that does not end before it."""
    after: int
    """Number of the first token that begins with it or later."""


class TokenStream:
    """A text that is tokenised as it comes in; the tokens are those of the whole text.

    Args:
        tokenizer: Any tokenizer; no offsets are needed.
        window: Characters tokenised at a time.
        margin: Characters on each side of a cut that have to agree.
        context: The end of a text that came before and whose tokens are known.
        pending: What followed it, and has no tokens yet.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        window: int = WINDOW,
        margin: int = 1 << 10,
        context: str = "",
        pending: str = "",
    ) -> None:
        self.tokenizer, self.window, self.margin = tokenizer, window, margin
        self.context, self.pending = context, pending
        self.taken = self.made = 0
        """Characters that have their tokens, and how many tokens those are."""
        self.found: dict[int, Place] = {}
        """Where the characters are that `locate` has asked for, as far as they have tokens."""
        self._wanted: set[int] = set()

    def locate(self, character: int) -> None:
        """Ask for the place of a character that has no token yet, counted from where this stream began."""
        assert character >= self.taken
        self._wanted.add(character)

    def add(self, pieces: Iterable[str]) -> Iterator[list[int]]:
        """Take more of the text and yield the tokens that no later text can change."""
        wanted = self.window
        for piece in pieces:
            for start in range(0, len(piece), self.window):  # a piece may be the whole text
                self.pending += piece[start : start + self.window]
                while len(self.pending) >= wanted:
                    block = _cut(self.tokenizer, self.context, self.pending, self.margin)
                    if block is None and wanted < GROWTH * self.window:
                        wanted += self.window
                        continue
                    block = block or _forced_cut(self.tokenizer, self.context, self.pending, self.margin)
                    wanted = self.window
                    yield from self._taken(block)

    def hold(self) -> Iterator[list[int]]:
        """Yield the tokens of all but the last words, which wait for the text that follows them."""
        margin = min(HELD, len(self.pending) // 4)
        block = _cut(self.tokenizer, self.context, self.pending, margin, within_words=margin == HELD)
        if block is None and len(self.pending) > self.margin:
            block = _forced_cut(self.tokenizer, self.context, self.pending, HELD)
        if block is not None:
            yield from self._taken(block)

    def rest(self, text: str) -> list[int]:
        """Return the tokens of all that waits and of a last text."""
        return [*(token for block in self.add([text]) for token in block), *self.finish()]

    def copy(self) -> TokenStream:
        """Return a stream that goes its own way."""
        state = {"context": self.context, "pending": self.pending}
        twin = TokenStream(self.tokenizer, window=self.window, margin=self.margin, **state)
        twin.taken, twin.made, twin.found, twin._wanted = self.taken, self.made, dict(self.found), set(self._wanted)
        return twin

    def finish(self) -> list[int]:
        """Return the tokens of all that waits: nothing follows, or what does is no text."""
        ids = _encode_after(self.tokenizer, self.context, self.pending)
        self._note(self.pending, ids)
        self.context, self.pending = (self.context + self.pending)[-self.margin :], ""
        return ids

    def _note(self, text: str, ids: list[int]) -> None:
        """Count a text and its tokens, which follow the context, and find what was asked for in it."""
        inside = [one for one in self._wanted if one < self.taken + len(text)]
        places = _places(self.tokenizer, self.context, text, ids, [one - self.taken for one in inside])
        for one, place in zip(inside, places, strict=True):
            self.found[one] = Place(self.made + place.first, self.made + place.after)
        self._wanted.difference_update(inside)
        self.taken, self.made = self.taken + len(text), self.made + len(ids)

    def _taken(self, block: _Block) -> Iterator[list[int]]:
        self._note(self.pending[: block.cut], block.ids)
        self.context, self.pending = block.context, self.pending[block.cut :]
        if block.ids:
            yield block.ids


def _token_stream(
    tokenizer: PreTrainedTokenizerBase, pieces: Iterable[str], add_special_tokens: bool, window: int, margin: int
) -> Iterator[list[int]]:
    if add_special_tokens and (special := leading_special_ids(tokenizer)):
        yield special
    stream = TokenStream(tokenizer, window=window, margin=margin)
    yield from stream.add(pieces)
    if ids := stream.finish():
        yield ids


def trimmed(pieces: Iterable[str], dropped: Callable[[int], object] = id) -> Iterator[str]:
    """Yield a text without the white space around it, as chat templates write it; no piece is empty.

    Args:
        pieces: The text.
        dropped: Called with numbers of characters in front that are left out.
    """
    held, started = "", False
    for piece in pieces:
        if not started:
            dropped(len(piece) - len(piece.lstrip()))
        piece = held + (piece if started else piece.lstrip())
        body = piece.rstrip()
        held = piece[len(body) :]
        if body:
            started = True
            yield body


class _Block(NamedTuple):
    """A text up to a cut: its tokens, and its end, with which the text after the cut is to be tokenised."""

    cut: int
    ids: list[int]
    context: str


def _cut(
    tokenizer: PreTrainedTokenizerBase, context: str, text: str, margin: int, *, within_words: bool = True
) -> _Block | None:
    """Cut a text in its second half where that changes no token; None if no such place is found.

    A margin that is shorter than a word does not show that a cut within one is right.
    """
    first, last = max(len(text) // 2, margin), len(text) - margin
    word_starts = [match.start() for match in WORD_START.finditer(text, first, last)][-TRIES:]
    within = range(last, max(first, last - TRIES), -1) if within_words else ()
    for cut in [*reversed(word_starts), *within]:
        ids = _encode_after(tokenizer, context, text[:cut])
        before = _faithful_end(tokenizer, ids, context + text[:cut], margin)
        if before is None:
            continue
        before_ids = encode(tokenizer, before)
        if encode(tokenizer, before + text[cut : cut + margin])[: len(before_ids)] == before_ids:
            return _Block(cut, ids, before)
    return None


def _forced_cut(tokenizer: PreTrainedTokenizerBase, context: str, text: str, margin: int) -> _Block:
    cut = len(text) - margin
    return _Block(cut, _encode_after(tokenizer, context, text[:cut]), text[cut - margin : cut])


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
    """Tokens of a text that follows another; if they cannot be told apart, those of the text alone."""
    context_ids = encode(tokenizer, context) if context else []
    ids = encode(tokenizer, context + text)
    if ids[: len(context_ids)] == context_ids:
        return ids[len(context_ids) :]
    return encode(tokenizer, text)


def _places(
    tokenizer: PreTrainedTokenizerBase, context: str, text: str, ids: list[int], characters: list[int]
) -> list[Place]:
    """Return where characters of a text are among its tokens, which follow a context."""
    if not characters:
        return []
    if not tokenizer.is_fast:  # no offsets: what is the same with and without what follows, or comes before
        return [
            Place(
                _agreeing(_encode_after(tokenizer, context, text[:one]), ids),
                len(ids) - _agreeing(encode(tokenizer, text[one:])[::-1], ids[::-1]),
            )
            for one in characters
        ]
    before = len(encode(tokenizer, context)) if context else 0
    skipped, whole = context, encode(tokenizer, context + text)
    if whole[before:] != ids:  # they could not be told apart
        skipped, before = "", 0
    arguments: dict[str, Any] = {"add_special_tokens": False, "return_offsets_mapping": True, "verbose": False}
    offsets = tokenizer(skipped + text, **arguments)["offset_mapping"][before:]
    starts, ends = ([pair[side] - len(skipped) for pair in offsets] for side in range(2))
    return [Place(bisect_right(ends, one), bisect_left(starts, one)) for one in characters]


def _agreeing(ids: list[int], others: list[int]) -> int:
    agree = [one == other for one, other in zip(ids, others, strict=False)]
    return (*agree, False).index(False)
