"""RULER's needle tasks: keys with magic values in noise, in essays, or among other needles."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Literal

from locret.data.tasks.made import NOISE_LINE, Words, random_uuid, sentences
from locret.data.tasks.ruler.task import PROMPTS, Draft, Drafter, Making, RulerTask
from locret.data.tasks.ruler.vocabulary import vocabulary

DEPTHS = tuple(round(100 * step / 39) for step in range(40))
"""Where needles may stand in essays, in per cent of the sentences."""


def needles(
    haystack: Literal["noise", "essay", "needle"],
    *,
    key: Literal["word", "uuid"] = "word",
    value: Literal["number", "uuid"] = "number",
    keys: int = 1,
    values: int = 1,
    queries: int = 1,
) -> Callable[[RulerTask, Making], Drafter]:
    """Return what makes prompts whose haystack has so many lines (noise, needles) or words (essays).

    `values` are those of each key, and `queries` the keys asked for.
    """

    def drafter(task: RulerTask, of: Making) -> Drafter:
        words = vocabulary(task.words)
        source = Words(of.data_dir if haystack == "essay" else None, of.seed)

        def new_key(rng: random.Random) -> str:
            return words.key(rng) if key == "word" else random_uuid(rng)

        def new_value(rng: random.Random) -> str:
            return str(rng.randint(10**6, 10**7 - 1)) if value == "number" else random_uuid(rng)

        def sentence(own: str, its: str) -> str:
            return f"One of the special magic {value}s for {own} is: {its}."

        def other(rng: random.Random, taken: dict[str, list[str]]) -> str:
            # A line of the haystack with a key that is asked for would make the answer ambiguous.
            while (own := new_key(rng)) in taken:
                pass
            return sentence(own, new_value(rng))

        def draft(rng: random.Random, _: int, size: int) -> Draft:
            all_keys = [new_key(rng) for _ in range(max(keys, queries))]
            facts = {own: [new_value(rng) for _ in range(values)] for own in all_keys}
            hidden = [sentence(own, its) for own, found in facts.items() for its in found]
            rng.shuffle(hidden)
            asked = rng.sample(all_keys, queries)
            outputs = tuple(its for own in asked for its in facts[own])
            if haystack == "essay":
                text, depths = _in_essay(rng, hidden, source.first(size))
            else:
                lines = [NOISE_LINE if haystack == "noise" else other(rng, facts) for _ in range(size)]
                places = sorted(rng.sample(range(size), len(hidden)), reverse=True)
                for place, needle in zip(places, hidden, strict=True):
                    lines.insert(place, needle)
                text, depths = "\n".join(lines), tuple(place / size for place in places)
            query = asked[0] if len(asked) == 1 else ", ".join(asked[:-1]) + ", and " + asked[-1]
            prompt, prefix = PROMPTS["needle" if len(outputs) == 1 else "needles"]
            about = {"kind": value, "query": query}
            return Draft(prompt.format(text=text, **about), prefix.format(**about), outputs, depths)

        return draft

    return drafter


def _in_essay(rng: random.Random, needles: list[str], words: list[str]) -> tuple[str, tuple[float, ...]]:
    lines = sentences(" ".join(words))
    depths = sorted(rng.sample(DEPTHS, len(needles)))
    pieces, last = [], 0
    for depth, needle in zip(depths, needles, strict=True):
        place = len(lines) * depth // 100
        pieces += [*lines[last:place], needle]
        last = place
    return " ".join([*pieces, *lines[last:]]), tuple(depth / 100 for depth in depths)
