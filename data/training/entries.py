"""Texts with entries that look alike, each of which may be asked for: keys with values, as in logs, settings, tables.

Heads that learn from prose alone forget such entries first, because no sentence makes one of them likelier to be asked
for than another. With these rows among those of prose, heads for Qwen2.5-Coder-0.5B-Instruct kept more of RULER's
needles (docs/numbers.md); words and forms are not RULER's.
"""

from __future__ import annotations

import random
import re
import uuid
from collections.abc import Sequence

_THINGS = (
    *("access code", "serial number", "phone extension", "order number", "room", "shelf mark", "batch number"),
    *("invoice", "licence key", "port", "account", "part number", "ticket", "locker", "case number"),
)
_FORMS = (
    *("The {thing} of {key} is {value}.", "{key} has the {thing} {value}.", "For {key}, the {thing} is {value}."),
    *("Remember: the {thing} for {key} is {value}.", "{key} was given {thing} {value}.", "{key}: {value}"),
    *("{key} = {value}", '"{key}": "{value}",', "{key}\t{value}", "| {key} | {value} |", "<{key}>{value}</{key}>"),
    "set {key} to {value}",
)
_QUESTIONS = ("What is the {thing} of {key}?", "Give the {thing} for {key}.", "Which {thing} belongs to {key}?")
_ANSWER = "The {thing} of {key} is {value}."
_COUNTS = (2, 4, 8, 16, 32)
_ASKED_AT_ONCE = 16
_CHARACTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ0123456789"


def _identifier(draw: random.Random) -> str:
    return str(uuid.UUID(int=draw.getrandbits(128)))


def _key(kind: int, words: Sequence[str], draw: random.Random) -> str:
    one, other = draw.choice(words), draw.choice(words)
    kinds = (one, f"{one}-{other}", f"{one}_{other}{draw.randint(1, 99)}", f"{one} {other}".title(), _identifier(draw))
    return kinds[kind]


def _value(kind: int, words: Sequence[str], draw: random.Random) -> str:
    kinds = (
        str(draw.randint(10**3, 10**8)),
        _identifier(draw),
        draw.choice(words),
        f"{draw.randint(1980, 2030)}-{draw.randint(1, 12):02}-{draw.randint(1, 28):02}",
        "".join(draw.choices(_CHARACTERS, k=draw.randint(5, 10))),
    )
    return kinds[kind]


def with_entries(piece: str, words: Sequence[str], draw: random.Random) -> tuple[str, list[list[dict[str, str]]]]:
    """Return a text with entries, and questions for them with their answers, in groups that are asked at once.

    Args:
        piece: The text that they are put between the sentences of; a third of them is a list of as many characters.
        words: What keys and values are made of.
        draw: Source of all choices.
    """
    kinds, form, thing = (draw.randrange(5), draw.randrange(5)), draw.choice(_FORMS), draw.choice(_THINGS)
    alone = draw.random() < 1 / 3
    count = max(8, len(piece) // 70) if alone else draw.choice(_COUNTS)
    entries = dict[str, list[str]]()
    for _ in range(count):
        values = 1 if alone or count > 8 else draw.choice((1, 1, 1, 2, 4))
        entries[_key(kinds[0], words, draw)] = [_value(kinds[1], words, draw) for _ in range(values)]
    lines = [form.format(key=key, value=value, thing=thing) for key, values in entries.items() for value in values]
    if not alone:
        sentences = re.split(r"(?<=[.!?])\s+", piece)
        for line in lines:
            sentences.insert(draw.randint(0, len(sentences)), line)
        lines = sentences
    asked = [
        {
            "question": draw.choice(_QUESTIONS).format(thing=thing, key=key),
            "answer": draw.choice((_ANSWER, form)).format(thing=thing, key=key, value=", ".join(entries[key])),
        }
        for key in draw.sample(list(entries), min(len(entries), 1 + _ASKED_AT_ONCE))
    ]
    return draw.choice("\n ").join(lines), [asked[:1], *([asked[1:]] if asked[1:] else [])]
