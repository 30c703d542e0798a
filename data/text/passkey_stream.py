"""A text of any size that hides one pass key, written piece by piece in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator

from locret.data.tasks import get
from locret.data.tasks.generated.base import Draw, Question
from locret.data.text.filler import Filler, FillerOptions, generator

_BLOCK = 64
"""Sentences per piece."""


def stream_passkey(
    depth: float = 0.5, seed: int = 0, *, sentences: int = 1_000_000, filler: FillerOptions | None = None
) -> tuple[Iterator[str], Question]:
    """Return the pieces of a text and the question about it.

    Args:
        depth: Where the pass key is, from 0 (start) to 1 (end).
        seed: Same seed, same text; the stream is that of the split "eval".
        sentences: Filler sentences in the text, about nine tokens of the embedded tokenizer each.
        filler: What the text around the key looks like.

    Returns:
        An iterator of strings of about 64 sentences whose concatenation is the text, and the question with its answer.

    Raises:
        ValueError: For a depth outside 0 to 1, or a text without sentences.
    """
    if not 0 <= depth <= 1:
        raise ValueError(f"depth={depth} is outside the text; give a number from 0 (start) to 1 (end)")
    if sentences < 1:
        raise ValueError(f"sentences={sentences} leaves no text; give 1 or more")
    rng = generator(seed, "eval", "stream", sentences, depth)
    planted = get("passkey").plant(Draw(rng, "eval"))
    source = Filler(rng, filler)

    def pieces() -> Iterator[str]:
        place = round(depth * sentences)
        for start in range(0, sentences, _BLOCK):
            block: list[str] = []
            for index in range(start, min(start + _BLOCK, sentences)):
                if index == place:
                    block.extend(planted.statements)
                block.append(source.sentence())
            if place == sentences <= start + _BLOCK:
                block.extend(planted.statements)
            yield (" " if start else "") + " ".join(block)

    return pieces(), planted.questions[0]
