"""How a published protocol shortens a prompt that is too long: its middle, in tokens, or words of its document."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Token = TypeVar("Token")
WORD_STEP = 250
"""L-Eval keeps this many words fewer each time a document is still too long."""


def cut_middle(tokens: Sequence[Token], limit: int) -> list[Token]:
    """Return the first and the last `limit // 2` tokens of a longer prompt, or all of a shorter one.

    An odd limit loses one token, as in the official scripts of InfiniteBench and LongBench.

    Args:
        tokens: Token ids, special ones included.
        limit: Tokens allowed, 2 or more.

    Raises:
        ValueError: For a limit that keeps nothing.
    """
    if limit < 2:
        raise ValueError(f"limit={limit} leaves no tokens of the prompt; raise it to 2 or more")
    if len(tokens) <= limit:
        return list(tokens)
    half = limit // 2
    return [*tokens[:half], *tokens[-half:]]


def cut_words(document: str, limit: int, count: Callable[[str], int], *, from_start: bool = False) -> str:
    """Return a document with so few words that it has at most `limit` tokens: L-Eval's rule.

    It keeps the first `limit` words, then 250 fewer each time until the tokens fit (from 500 words on half as many,
    so that small limits work too; the published ones never get there). Words are what single spaces separate, so line
    breaks stay inside words.

    Args:
        document: The text.
        limit: Tokens allowed.
        count: Tokens of a text as the tokenizer counts by default, special ones included.
        from_start: Keep the last words instead, as for code.

    Raises:
        ValueError: If even the last words left are too long, as in a text without spaces.
    """
    words = document.split(" ")
    keep = limit
    cut = document
    while count(cut) > limit:
        if keep == 0:
            raise ValueError(
                f"a document of {len(document):,} characters has too few spaces to be cut by words to limit={limit:,} "
                "tokens; raise limit or leave the row out"
            )
        cut = " ".join(words[-keep:] if from_start else words[:keep])
        keep = max(keep - WORD_STEP, keep // 2)
    return cut
