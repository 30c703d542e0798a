"""Prompts of any length as streams of token ids, in bounded memory: a needle in a haystack, and R.Number at 10 million.

The prompts are those of `niah` and `infinitebench_generated`. A text is written in blocks, tokenised as it comes, and
never held whole; `locret.prefill` reads such a stream chunk by chunk.

Paper:     Locret (arXiv 2410.01805), Section 5.2: R.Number of 10 * 1024 * 1024 tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from locret.conversation.templates import leading_special_ids
from locret.conversation.text_stream import token_stream
from locret.conversation.transcript import render_prompt
from locret.data.tasks.published.infinitebench_generated import TASKS, draw_answer, needle_line, question
from locret.data.tasks.published.niah import ANSWER, NEEDLE, QUESTION, SYSTEM
from locret.data.tasks.published.row_maker import counter
from locret.data.text.essays import NOISE_LINE, essay_sentences

TEN_MILLION = 10 * 1024 * 1024
_BLOCK = 64
"""Sentences or lines per piece of text."""
_SENTINEL = "LocretHaystack7f3a9c"


@dataclass(frozen=True)
class LongPrompt:
    """A prompt that is read once, from its start to its end."""

    ids: Iterator[list[int]]
    """Lists of token ids, none of them long; see `token_stream`."""
    answer: str
    depth: float
    """Where the needle is, from 0 to 1."""
    haystack: str
    """"noise", "essays" or "filler"."""


def stream_number(
    tokenizer: Any, tokens: int = TEN_MILLION, *, depth: float = 0.5, seed: int = 0, form: str = "number_string"
) -> LongPrompt:
    """Return R.Number (or R.PassKey) as a stream, in the published prompt to complete, without a chat template.

    Args:
        tokenizer: Any tokenizer.
        tokens: Length of the prompt, special tokens included. It is reached to within one noise line, and not exceeded,
            if a tokenizer gives every line the same tokens, as all tokenizers that split at white space do.
        depth: Where the needle is, from 0 (first line) to 1 (last).
        seed: Same seed, same prompt.
        form: "number_string" or "passkey".

    Raises:
        ValueError: For a depth outside 0 to 1, or a length that holds no line of noise.
    """
    _check(depth)
    answer, count = draw_answer(form, random.Random(f"stream/{form}/{seed}/{tokens}")), counter(tokenizer)
    task = next(task for task in TASKS if task.form == form)
    row = {"context": _SENTINEL, "input": question(form), "answer": [answer]}
    before, after = task.read(0, "", row)[0].content.split(_SENTINEL)
    needle, line = f"{needle_line(form, answer)} ", f"{NOISE_LINE} "
    each = (count(line * 2 * _BLOCK) - count(line * _BLOCK)) / _BLOCK
    around = len(leading_special_ids(tokenizer)) + count(before + line + needle + line + after) - 2 * each
    size = int((tokens - around) / each)
    if size < 1:
        raise ValueError(f"tokens={tokens} holds no line of noise besides needle and question; raise tokens")
    text = chain([before], _noise(line, needle, size, round(depth * size)), [after])
    return LongPrompt(token_stream(tokenizer, text), answer, depth, "noise")


def _noise(line: str, needle: str, size: int, place: int) -> Iterator[str]:
    block = line * _BLOCK
    for lines, then in ((place, needle), (size - place, "")):
        for _ in range(lines // _BLOCK):
            yield block
        yield line * (lines % _BLOCK) + then


def stream_needle(
    tokenizer: Any,
    tokens: int = 1 << 20,
    *,
    depth: float = 0.5,
    seed: int = 0,
    data_dir: Path | None = None,
    template: str = "chat",
    passkey: bool = False,
) -> LongPrompt:
    """Return a needle in a haystack as a stream.

    Args:
        tokenizer: Any tokenizer.
        tokens: Length of the prompt, template included. Sentences are counted one block at a time, so a tokenizer that
            joins tokens across blocks makes the prompt a little shorter.
        depth: Where the needle is, from 0 (start) to 1 (end), in tokens.
        seed: Same seed, same prompt.
        data_dir: Where the essays lie, see `essays.read_essays`; filler if None.
        template: "chat", "original" or "none", as in `locret.conversation.templates`.
        passkey: Hide a pass key instead of the sandwich.

    Raises:
        ValueError: For a depth outside 0 to 1, a length that needle and question alone exceed, missing essays, or a
            tokenizer without a chat template.
    """
    _check(depth)
    answer, needle, asked = ANSWER, NEEDLE, QUESTION
    if passkey:
        answer, asked = draw_answer("passkey", random.Random(f"stream/needle/{seed}/{tokens}")), question("passkey")
        needle = f"\n{needle_line('passkey', answer)}\n"
    frame = render_prompt(
        tokenizer, question=f"Read the document and answer: {asked}", system=SYSTEM, template=template
    )
    count = counter(tokenizer)
    special = len(leading_special_ids(tokenizer)) if frame.add_special_tokens else 0
    room = tokens - special - sum(map(count, (frame.prefix, needle, frame.suffix)))
    if room < 1:
        raise ValueError(f"tokens={tokens} cannot hold needle and question, which take {tokens - room}; raise tokens")
    text = _hidden(essay_sentences(data_dir, seed), needle, room, round(depth * room), count)
    ids = token_stream(tokenizer, frame.around(text), add_special_tokens=frame.add_special_tokens)
    return LongPrompt(ids, answer, depth, "filler" if data_dir is None else "essays")


def _hidden(sentences: Iterator[str], needle: str, room: int, place: int, count: Callable[[str], int]) -> Iterator[str]:
    """Yield sentences of `room` tokens in all, with the needle before the one that crosses `place`."""
    used, waiting, glue = 0, True, ""
    while True:
        # Near the needle and the end sentences come one by one, elsewhere by the block.
        near = min((place if waiting else room) - used, room - used) < 200 * _BLOCK
        piece = glue + " ".join(next(sentences) for _ in range(1 if near else _BLOCK))
        cost = count(piece)
        if waiting and used + cost > place:
            waiting, glue = False, ""
            yield needle
            piece = piece.removeprefix(" ")
        if used + cost > room:
            return
        used, glue = used + cost, " "
        yield piece


def _check(depth: float) -> None:
    if not 0 <= depth <= 1:
        raise ValueError(f"depth={depth} is outside the text; give a number from 0 (start) to 1 (end)")
