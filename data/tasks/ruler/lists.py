"""RULER's variable tracking (a chain of assignments in noise) and aggregation (most common words of a list, most
frequent words of a coded text).
"""

from __future__ import annotations

import random
import string
from itertools import count

from locret.data.tasks.made import NOISE_LINE
from locret.data.tasks.ruler.task import PROMPTS, Draft, Drafter, Making, RulerTask
from locret.data.tasks.ruler.vocabulary import vocabulary

HOPS = 4
_EXAMPLE_TOKENS = 500
"""Length of the worked example of variable tracking, room for its answer included."""
SHORT, COMMON = 4096, 10
"""Below this length RULER repeats words less often; words that appear often."""
_PROBES, LEAST = 8, 12
"""Smallest prompts that are looked at: words have as many tokens as a tokenizer gives them; their different words."""
ALPHA, LETTERS, ASKED = 2.0, 6, 3
"""Of the Zipf law; of a coded word; coded words that are asked for."""


def tracking(task: RulerTask, of: Making) -> Drafter:
    """Return what makes prompts with so many lines of noise; all begin with the same worked example.

    Its names have three letters, so that none occurs in the task.
    """
    example = ""
    for size in range(HOPS + 2, 100, 5):
        prompt, prefix, names, _ = _chain(random.Random(f"example/{of.seed}"), size, letters=3)
        longer = f"{prompt}{prefix} {' '.join(names)}\n\n"
        if example and of.count(longer) + task.max_new_tokens > _EXAMPLE_TOKENS:
            break
        example = longer

    def draft(rng: random.Random, _: int, size: int) -> Draft:
        own = _chain(rng, size, letters=5)
        return own._replace(prompt=example + own.prompt)

    return draft


def _chain(rng: random.Random, size: int, letters: int) -> Draft:
    names: list[str] = []
    while len(names) < HOPS + 1:
        if (name := "".join(rng.choices(string.ascii_uppercase, k=letters))) not in names:
            names.append(name)
    lines, value = [NOISE_LINE] * size, str(rng.randint(10000, 99999))
    statements = [f"VAR {names[0]} = {value}"]
    statements += [f"VAR {name} = VAR {before} " for before, name in zip(names, names[1:], strict=False)]
    places = sorted(rng.sample(range(size), len(statements)))
    for shift, (place, statement) in enumerate(zip(places, statements, strict=True)):
        lines.insert(place + shift, statement)
    prompt, prefix = PROMPTS["vt"]
    shares = tuple(place / size for place in places)
    said = prefix.format(count=HOPS + 1, value=value)
    return Draft(prompt.format(text="\n".join(lines), value=value), said, tuple(names), shares)


def common_words(task: RulerTask, of: Making) -> Drafter:
    """Return what makes prompts about so many different words, of which ten appear often and all others rarely, after
    one worked example of 40 words, or 20 where a length or tokenizer leaves little room.
    """
    words, tokens, (form, prefix) = vocabulary(task.words), of.tokens or 0, PROMPTS["cwe"]

    def listed(rng: random.Random, size: int, often: int, rarely: int) -> tuple[str, list[str]]:
        drawn = words.distinct(rng, size)
        entries = drawn[:COMMON] * often + drawn[COMMON:] * rarely
        rng.shuffle(entries)
        return _numbered(entries), drawn[:COMMON]

    def draft(rng: random.Random, _: int, size: int, *, short: bool = False) -> Draft:
        shown, said = listed(rng, *((20, 3, 1) if short else (40, 10, 3)))
        asked, outputs = listed(rng, size, *((6, 1) if short else (30, 3)))
        prompt = f"{form.format(list=shown)}{prefix} {_numbered(said)}\n{form.format(list=asked)}"
        return Draft(prompt, prefix, tuple(outputs))

    probes = [draft(random.Random(number), 0, LEAST).prompt for number in range(_PROBES)]
    short = tokens < SHORT or max(map(of.count, probes)) >= 0.9 * tokens
    return lambda rng, index, size: draft(rng, index, size, short=short)


def _numbered(words: list[str]) -> str:
    return " ".join(f"{place}. {word}" for place, word in enumerate(words, 1))


def frequent_words(task: RulerTask, of: Making) -> Drafter:
    """Return what makes prompts whose coded text has about so many words, the most frequent one noise shown as dots.

    Word k appears size / (k^alpha zeta(alpha)) times; each count is rounded down, and words that would not appear are
    left out.
    """
    total, (form, prefix) = _zeta(ALPHA), PROMPTS["fwe"]

    def draft(rng: random.Random, _: int, size: int) -> Draft:
        names, text = ["..."], list[str]()
        for rank in count(1):
            times = int(size / (rank**ALPHA * total))
            if not times:
                break
            while rank > len(names):
                if (name := "".join(rng.choices(string.ascii_lowercase, k=LETTERS))) not in names:
                    names.append(name)
            text += [names[rank - 1]] * times
        rng.shuffle(text)
        return Draft(form.format(text=" ".join(text)), prefix, tuple(names[1 : ASKED + 1]))

    return draft


def _zeta(alpha: float, terms: int = 1000) -> float:
    """Return the sum of 1/k^alpha over all k: terms one by one, the rest by the Euler-Maclaurin formula."""
    head = sum(rank**-alpha for rank in range(1, terms))
    return head + terms ** (1 - alpha) / (alpha - 1) + terms**-alpha / 2
