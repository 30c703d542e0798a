"""InfiniteBench's retrieval tasks at any length: R.PassKey, R.Number and R.KV, generated as its own script does.

Paper:     arXiv 2402.13718, Section 3.
Source:    OpenBMB/InfiniteBench, data/construct_synthetic_dataset.py; the layout and spaces of the Hub files.
Deviates:  needles stand evenly from the first line to the last over the rows, in as many places as there are rows
           (published: 59 places, 10 rows each). Keys and values of R.KV are random uuids (published: those of
           lost-in-the-middle).
"""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from locret.data.tasks.made import NOISE_LINE
from locret.data.tasks.published.base import Making, RowMaker, spread
from locret.data.tasks.published.infinitebench import TASKS as PUBLISHED
from locret.data.tasks.published.infinitebench import InfiniteBenchTask

_LINES, _PAIRS = 5220, 2500
"""Noise lines of the published PassKey and Number, and pairs of KV."""
_KINDS = {
    "passkey": ("The pass key is {0}. Remember it. {0} is the pass key.", "What is the pass key?"),
    "number_string": (
        "The sequence of digits is {0}. Remember it. {0} is the sequence of digits.",
        "What is the sequence of digits?",
    ),
}


def needle(form: str, rng: random.Random) -> tuple[str, str, str]:
    """Return the line that hides a pass key of five digits or a sequence of ten, what is asked, and the answer.

    A sequence begins as five digits; then, five times, a copy of one of its digits is put next to it, so digits repeat
    and the sequence has to be read exactly.
    """
    digits = [rng.choice("0123456789") for _ in range(5)]
    for _ in range(5 if form == "number_string" else 0):
        place = rng.randrange(len(digits))
        digits.insert(place, digits[place])
    line, question = _KINDS[form]
    return line.format("".join(digits)), question, "".join(digits)


@dataclass(frozen=True, kw_only=True)
class MadeInfiniteBench(RowMaker, InfiniteBenchTask):
    """A published task whose rows are made; a prompt has its length from the start and is never cut."""

    settable: ClassVar[tuple[str, ...]] = ("max_new_tokens",)

    def maker(self, of: Making) -> Callable[[int], dict[str, Any]]:
        """Return what makes row `index`. No source texts are needed."""
        least, published = (2, _PAIRS) if self.form == "kv_retrieval" else (1, _LINES)

        def row(rng: random.Random, index: int, size: int) -> dict[str, Any]:
            return self._row(rng, index, size, spread(of.samples, index))

        if of.tokens is None:
            return lambda index: row(self.stream(of, index), index, published)
        return self.filled(of, row, guess=max(least, of.tokens // 25), least=least)

    def _row(self, rng: random.Random, index: int, size: int, depth: float) -> dict[str, Any]:
        if self.form == "kv_retrieval":
            pairs = {_uuid(rng): _uuid(rng) for _ in range(size)}
            key = list(pairs)[round(depth * (size - 1))]
            asked = f'\nKey: "{key}"\nThe value associated with the specified key is: '
            context, answer = f"JSON data:\n{json.dumps(pairs)}", pairs[key]
        else:
            line, asked, answer = needle(self.form, rng)
            lines = [NOISE_LINE] * size
            lines.insert(round(depth * size), line)
            context = "".join(f"{line} " for line in lines)
        return {"id": index, "context": context, "input": asked, "answer": [answer], "options": [], "depth": depth}


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


TASKS = tuple(
    MadeInfiniteBench(
        name=f"infinitebench_generated/{task.form}",
        source=task.source,
        metric=task.metric,
        max_new_tokens=task.max_new_tokens,
        chat=task.chat,
        file=task.file,
        form=task.form,
    )
    for task in PUBLISHED
    if task.form in ("passkey", "number_string", "kv_retrieval")
)
