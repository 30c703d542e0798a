"""Drills for what questions about texts teach too slowly: hops between names, several numbers of one key, sums.

A drill is a row of bare statements, and after it as many answers as there are statements to ask about. Loss is on the
answers' values alone, so that most tokens that bear loss need the very step that is drilled.
"""

from __future__ import annotations

import random

from transformers import PreTrainedTokenizerFast

from locret.data.embedded_tokenizer import COLORS, NAMES, VARIABLES
from locret.data.tasks.base import Draw
from locret.data.tasks.multikey import needle
from locret.data.tasks.multivalue import MultiValue

Pieces = list[tuple[str, bool]]
"""Pieces of an answer, and whether their tokens bear loss."""
_WORDS = (*NAMES, *VARIABLES, *dict.fromkeys(COLORS))


def drill(rng: random.Random, tokenizer: PreTrainedTokenizerFast, tokens: int) -> tuple[list[int], list[bool], str]:
    """Return the ids of one drill of about `tokens` tokens, which of them are to be predicted, and the drill's name."""
    make = rng.choice((hops, hops, chains, values, values, sums))
    one = len(_encode(tokenizer, *make(random.Random(0), 1))[0])
    two = len(_encode(tokenizer, *make(random.Random(0), 2))[0])
    most = {hops: len(_WORDS) // 2, chains: len(VARIABLES) // 3, values: len(NAMES)}.get(make, tokens)
    count = 1 + max(tokens - one, 0) // (two - one)
    ids, mask = _encode(tokenizer, *make(rng, min(count, most)))
    return ids, mask, make.__name__


def hops(rng: random.Random, pairs: int) -> tuple[str, Pieces]:
    """Return `pairs` assignments of one name to another, and each pair the other way round."""
    words = rng.sample(_WORDS, 2 * pairs)
    both = list(zip(words[::2], words[1::2], strict=True))
    text = " ".join(f"VAR {name} = VAR {source}." for name, source in both)
    pieces = [piece for name, source in both for piece in ((f"{source},", False), (f"{name}.", True))]
    return text, _shuffled(rng, pieces)


def chains(rng: random.Random, count: int) -> tuple[str, Pieces]:
    """Return `count` chains of assignments in an order that defines before it uses, and their variables."""
    draw = Draw(rng, "train", all_keys=True)
    statements: list[tuple[float, str]] = []
    pieces: Pieces = []
    for _ in range(count):
        value, names = draw.number(5), [draw.variable() for _ in range(3)]
        sources = (value, *(f"VAR {name}" for name in names[:-1]))
        places = sorted(rng.random() for _ in names)
        statements += [
            (place, f"VAR {name} = {source}.") for place, name, source in zip(places, names, sources, strict=True)
        ]
        pieces += [(f"are assigned the value {value} are:", False), (f"{', '.join(names)}.", True)]
    return " ".join(text for _, text in sorted(statements)), _shuffled(rng, pieces)


def values(rng: random.Random, keys: int) -> tuple[str, Pieces]:
    """Return the needles of `keys` keys with four numbers each, in any order, and the numbers in ascending order."""
    draw = Draw(rng, "train", all_keys=True)
    task = MultiValue(others=0, digits=rng.choice((3, 3, 7)))
    statements: list[str] = []
    pieces: Pieces = []
    for _ in range(keys):
        question = task.plant(draw).questions[0]
        key = question.text.partition(" for ")[2].split()[0]
        statements += [needle(key, number) for number in question.targets]
        start, colon, listed = question.reply.partition(":")
        pieces += [(start + colon, False), (listed.strip(), True)]
    rng.shuffle(statements)
    return " ".join(statements), _shuffled(rng, pieces)


def sums(rng: random.Random, equations: int) -> tuple[str, Pieces]:
    """Return `equations` sums of at most 15 with their results; there is no text to read."""
    pieces: Pieces = []
    for _ in range(equations):
        total = rng.randrange(16)
        first = rng.randint(0, total)
        pieces += [(f"{first} + {total - first} =", False), (f"{total}.", True)]
    return "", pieces


def _shuffled(rng: random.Random, pieces: Pieces) -> Pieces:
    """Return the pairs of pieces in another order."""
    pairs = list(zip(pieces[::2], pieces[1::2], strict=True))
    return [piece for pair in rng.sample(pairs, len(pairs)) for piece in pair]


def _encode(tokenizer: PreTrainedTokenizerFast, text: str, pieces: Pieces) -> tuple[list[int], list[bool]]:
    messages = [{"role": "user", "content": text}]
    ids = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])
    mask = [False] * len(ids)
    for piece, bears_loss in pieces:
        new = tokenizer(piece, add_special_tokens=False)["input_ids"]
        ids += new
        mask += [bears_loss] * len(new)
    return ids, mask
