"""Drills for what questions about texts teach too slowly.

These are chains of variables, several numbers of one key, sums, cities, the order of numbers, counts, where a way ends,
and who moved last.

A drill is a row of bare statements, and after it as many answers as there are statements to ask about. Loss is on the
answers' values alone, so that most tokens that bear loss need the very step that is drilled.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from transformers import PreTrainedTokenizerFast

from locret.data.tasks.generated.base import Draw, Planted
from locret.data.tasks.generated.multivalue import MultiValue
from locret.data.tasks.generated.variable_tracking import VariableTracking
from locret.data.tasks.world.keys import CITIES
from locret.data.tasks.world.reasoning import Count
from locret.data.tasks.world.stories import MOVES
from locret.data.text.embedded_tokenizer import COUNTRY_OF, NAMES, PEOPLE, ROOMS, VARIABLES

Pieces = list[tuple[str, bool]]
"""Pieces of an answer, and whether their tokens bear loss."""
USUAL = ("chains", "chains", "values", "values", "values", "values", "sums", "cities", "cities")
"""What is drilled where a stage does not say: the hardest most often."""


def drill(
    rng: random.Random, tokenizer: PreTrainedTokenizerFast, tokens: int, names: Sequence[str] = USUAL
) -> tuple[list[int], list[bool], str]:
    """Return the ids of one drill of about `tokens` tokens, which of them are to be predicted, and the drill's name.

    It is one of `names`, drawn as often as it is named there.
    """
    make = DRILLS[rng.choices(names)[0]]
    one = len(_encode(tokenizer, *make(random.Random(0), 1))[0])
    two = len(_encode(tokenizer, *make(random.Random(0), 2))[0])
    most = {chains: len(VARIABLES) // 3, values: len(NAMES), cities: len(CITIES), counts: 7, ends: len(NAMES)}.get(
        make, tokens
    )
    count = 1 + max(tokens - one, 0) // (two - one)
    ids, mask = _encode(tokenizer, *make(rng, min(count, most)))
    return ids, mask, make.__name__


def chains(rng: random.Random, count: int) -> tuple[str, Pieces]:
    """Return `count` chains of assignments in an order that defines before it uses, and their variables."""
    task, draw = VariableTracking(chains=count), Draw(rng, "train", all_keys=True)
    planted = task.plant(draw)
    depths = task.arranged([rng.random() for _ in planted.statements])
    statements = [text for _, text in sorted(zip(depths, planted.statements, strict=True))]
    return " ".join(statements), _after_colons(rng, planted)


def values(rng: random.Random, keys: int) -> tuple[str, Pieces]:
    """Return the needles of `keys` keys with four numbers each, in any order, and the numbers in ascending order."""
    draw = Draw(rng, "train", all_keys=True)
    # Of the numbers of three digits, ten begin with the same two.
    task = MultiValue(others=0, digits=rng.choice((3, 3, 7)) if keys <= 10 else 7)
    plants = [task.plant(draw) for _ in range(keys)]
    statements = [statement for plant in plants for statement in plant.statements]
    rng.shuffle(statements)
    questions = tuple(question for plant in plants for question in plant.questions)
    return " ".join(statements), _after_colons(rng, Planted(statements=(), questions=questions))


def sums(rng: random.Random, equations: int) -> tuple[str, Pieces]:
    """Return `equations` sums of at most 15 with their results; there is no text to read."""
    pieces: Pieces = []
    for _ in range(equations):
        total = rng.randrange(16)
        first = rng.randint(0, total)
        pieces += [(f"{first} + {total - first} =", False), (f"{total}.", True)]
    return "", pieces


def cities(rng: random.Random, count: int) -> tuple[str, Pieces]:
    """Return `count` countries with their cities; there is no text to read."""
    return "", [
        piece for city in rng.sample(CITIES, count) for piece in ((COUNTRY_OF[city], False), (f"{city}.", True))
    ]


def descents(rng: random.Random, count: int) -> tuple[str, Pieces]:
    """Return `count` numbers of two digits, each with the three below it; there is no text to read."""
    starts = [rng.randint(13, 99) for _ in range(count)]
    return "", [piece for n in starts for piece in ((f"{n},", False), (f"{n - 1}, {n - 2}, {n - 3}.", True))]


def orders(rng: random.Random, count: int) -> tuple[str, Pieces]:
    """Return `count` rows of numbers of two digits, each again in ascending order; there is no text to read."""
    pieces: Pieces = []
    for _ in range(count):
        row = rng.sample(range(10, 100), 5)
        pieces += [(f"{' '.join(map(str, row))}:", False), (f"{' '.join(map(str, sorted(row)))}.", True)]
    return "", pieces


def counts(rng: random.Random, kinds: int) -> tuple[str, Pieces]:
    """Return what goes by, `kinds` of it up to five times each, and how many times each did."""
    planted = Count(kinds=kinds).plant(Draw(rng, "train"))
    pieces: Pieces = []
    for question in rng.sample(planted.questions, kinds):
        (times,) = question.targets
        pieces += [(question.reply.partition(f" {times} ")[0], False), (f"{times} times.", True)]
    return " ".join(planted.statements), pieces


def ends(rng: random.Random, count: int) -> tuple[str, Pieces]:
    """Return `count` steps from place to place, every second one back, and what comes after each place."""
    places = rng.sample(NAMES, count)
    steps = [(f"From {place} go", rng.choice((f"to {rng.choice(NAMES)}.", "back."))) for place in places]
    pieces = [piece for known, found in rng.sample(steps, count) for piece in ((known, False), (found, True))]
    return " ".join(f"{known} {found}" for known, found in steps), pieces


def moves(rng: random.Random, count: int) -> tuple[str, Pieces]:
    """Return `count` moves of some people, one after the other, and the last one of each of them."""
    people = rng.sample(PEOPLE, min(max(count // 4, 1), len(PEOPLE)))
    said = [(rng.choice(people), f"{rng.choice(MOVES)} to the {rng.choice(ROOMS)}.") for _ in range(count)]
    last = dict(said)
    pieces = [piece for person in rng.sample([*last], len(last)) for piece in ((person, False), (last[person], True))]
    return " ".join(f"{person} {move}" for person, move in said), pieces


def _after_colons(rng: random.Random, planted: Planted) -> Pieces:
    """Return all replies in any order, with loss on what follows a colon and a space, up to its comma or full stop."""
    pieces: Pieces = []
    for question in rng.sample(planted.questions, len(planted.questions)):
        for part in re.findall(r"[^,.]+[,.]", question.reply):
            known, _, found = part.rpartition(": ")
            pieces += [(f"{known.strip()}:", False), (found, True)]
    return pieces


DRILLS = {make.__name__: make for make in (chains, values, sums, cities, descents, orders, counts, ends, moves)}


def _encode(tokenizer: PreTrainedTokenizerFast, text: str, pieces: Pieces) -> tuple[list[int], list[bool]]:
    messages = [{"role": "user", "content": text}]
    ids = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])
    mask = [False] * len(ids)
    for piece, bears_loss in pieces:
        new = tokenizer(piece, add_special_tokens=False)["input_ids"]
        ids += new
        mask += [bears_loss] * len(new)
    return ids, mask
