"""Hides statements in filler, so that the whole chat prompt has exactly the wanted length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from locret.data.text.filler import Filler

# Two tokens of the embedded vocabulary each: they fill a text to its exact length.
_SHORT_SENTENCES = ("Yes.", "No.", "So.", "Here.", "There.")


def count_tokens(tokenizer: Any, text: str) -> int:
    """Return the tokens of a piece of text, without special tokens."""
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def prompt_length(tokenizer: Any, content: str) -> int:
    """Return the tokens of the whole chat prompt with one user turn."""
    messages = [{"role": "user", "content": content}]
    return len(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])


def hide(
    tokenizer: Any,
    statements: Sequence[str],
    depths: Sequence[float],
    *,
    filler: Filler,
    tokens: int,
    around: Callable[[str], str],
) -> str:
    """Return a text in which statement i starts at share `depths[i]` of the filler, as long as the prompt allows.

    Args:
        tokenizer: Any tokenizer with a chat template.
        statements: What to hide; statements at one place keep their order.
        depths: For each statement 0 (first sentence) to 1 (last sentence).
        filler: Where the other sentences come from.
        tokens: Length of the whole chat prompt (text, what is around it, template), never exceeded.
        around: Gives the user's turn that a text belongs to; only its length counts here.

    Raises:
        ValueError: Where a depth is outside 0 to 1, or the statements and the question alone are longer than `tokens`.
    """
    for depth in depths:
        if not 0 <= depth <= 1:
            raise ValueError(f"depth={depth} is outside the text; give a number from 0 (start) to 1 (end)")
    sentences: list[str] = []

    def length() -> int:
        return prompt_length(tokenizer, around(_insert(sentences, statements, depths)))

    used = length()
    if used > tokens:
        raise ValueError(f"tokens={tokens} cannot hold the facts and the question, which take {used}; raise tokens")
    while used < tokens:
        sentences.append(filler.sentence())
        used += count_tokens(tokenizer, " " + sentences[-1])
    while (used := length()) > tokens:
        sentences.pop()
    while tokens - used >= (cost := count_tokens(tokenizer, " " + (short := filler.rng.choice(_SHORT_SENTENCES)))):
        sentences.append(short)
        used += cost
    if used < tokens and sentences:  # one token is missing: "Yes." becomes "And yes."
        sentences[-1] = f"And {sentences[-1][0].lower()}{sentences[-1][1:]}"
    filler.rng.shuffle(sentences)  # or short sentences would mark the end of every text
    while length() > tokens:  # only tokenizers that join tokens across sentences need this
        sentences.pop()
    return _insert(sentences, statements, depths)


def _insert(sentences: Sequence[str], statements: Sequence[str], depths: Sequence[float]) -> str:
    """Put each statement before the sentence at its share of the characters."""
    total = sum(len(sentence) + 1 for sentence in sentences)
    waiting = sorted(range(len(statements)), key=lambda index: depths[index])
    pieces: list[str] = []
    written = 0
    for sentence in sentences:
        while waiting and depths[waiting[0]] * total <= written:
            pieces.append(statements[waiting.pop(0)])
        pieces.append(sentence)
        written += len(sentence) + 1
    pieces.extend(statements[index] for index in waiting)
    return " ".join(pieces)
