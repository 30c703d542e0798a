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
from pathlib import Path
from typing import Any, ClassVar

from locret.data.tasks.published.infinitebench import TASKS as PUBLISHED
from locret.data.tasks.published.infinitebench import InfiniteBenchTask
from locret.data.tasks.published.row_maker import RowMaker, spread
from locret.data.text.essays import NOISE_LINE

LINES = {8192: 326, 16384: 652, 32768: 1305, 65536: 2610, 131072: 5220, 262144: 10440}
"""Noise lines of the published lengths; the published PassKey and Number have 5220."""
_LINES, _PAIRS = LINES[131072], 2500
_KINDS = {
    "passkey": ("The pass key is {0}. Remember it. {0} is the pass key.", "What is the pass key?"),
    "number_string": (
        "The sequence of digits is {0}. Remember it. {0} is the sequence of digits.",
        "What is the sequence of digits?",
    ),
}


def needle_line(form: str, answer: str) -> str:
    """Return the line that hides the answer of "passkey" or "number_string"."""
    return _KINDS[form][0].format(answer)


def question(form: str) -> str:
    """Return what "passkey" or "number_string" asks."""
    return _KINDS[form][1]


def draw_answer(form: str, rng: random.Random) -> str:
    """Return a pass key of five digits, or a sequence of ten.

    A sequence begins as five digits; then, five times, a copy of one of its digits is put next to it, so digits repeat
    and the sequence has to be read exactly.
    """
    digits = [rng.choice("0123456789") for _ in range(5)]
    for _ in range(5 if form == "number_string" else 0):
        place = rng.randrange(len(digits))
        digits.insert(place, digits[place])
    return "".join(digits)


@dataclass(frozen=True, kw_only=True)
class MadeInfiniteBench(RowMaker, InfiniteBenchTask):
    """A published task whose rows are made; a prompt has its length from the start and is never cut."""

    settable: ClassVar[tuple[str, ...]] = ("max_new_tokens",)
    single_needle: ClassVar[bool] = True  # type: ignore[misc]

    def maker(
        self, tokenizer: Any, tokens: int | None, *, samples: int, seed: int, data_dir: Path | None
    ) -> Callable[[int], dict[str, Any]]:
        """Return what makes row `index`; see `RowMaker.maker`. No source texts are needed."""
        least, published = (2, _PAIRS) if self.form == "kv_retrieval" else (1, _LINES)

        def row(rng: random.Random, index: int, size: int) -> dict[str, Any]:
            return self._row(rng, index, size, spread(samples, index))

        if tokens is None:
            return lambda index: row(random.Random(f"{self.name}/{seed}/{tokens}/{index}"), index, published)
        return self.filled(tokenizer, tokens, seed, row, guess=max(least, tokens // 25), least=least)

    def _row(self, rng: random.Random, index: int, size: int, depth: float) -> dict[str, Any]:
        if self.form == "kv_retrieval":
            context, asked, answer = _pairs(rng, size, depth)
        else:
            answer, asked = draw_answer(self.form, rng), question(self.form)
            lines = [NOISE_LINE] * size
            lines.insert(round(depth * size), needle_line(self.form, answer))
            context = "".join(f"{line} " for line in lines)
        return {"id": index, "context": context, "input": asked, "answer": [answer], "options": [], "depth": depth}


def _pairs(rng: random.Random, size: int, depth: float) -> tuple[str, str, str]:
    pairs = {_uuid(rng): _uuid(rng) for _ in range(size)}
    asked = list(pairs)[round(depth * (size - 1))]
    quest = f'\nKey: "{asked}"\nThe value associated with the specified key is: '
    return f"JSON data:\n{json.dumps(pairs)}", quest, pairs[asked]


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
    if task.name.partition("/")[2] in ("passkey", "number_string", "kv_retrieval")
)
