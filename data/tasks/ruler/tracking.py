"""RULER's variable tracking: chains of assignments in noise, after one worked example."""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from locret.data.tasks.ruler.task import Draft, Drafter, RulerTask, Setting
from locret.data.text.essays import NOISE_LINE

_PROMPT = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{text}\n"
    "Question: Find all variables that are assigned the value {value} in the text above."
)
_PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned the "
    "value {value}, they are: "
)
_EXAMPLE_TOKENS = 500
"""Length of the worked example, room for its answer included."""


@dataclass(frozen=True, kw_only=True)
class Tracking(RulerTask):
    """One variable tracking task."""

    chains: int = 1
    hops: int = 4
    opening: ClassVar[str] = " Answer: According to the chain(s) "
    unit: ClassVar[int] = 25

    @property
    def least(self) -> int:  # type: ignore[override]
        """The shortest text: a line of noise for each assignment, and one more."""
        return self.hops + 2

    def drafter(self, setting: Setting) -> tuple[Drafter, str]:
        """Return what writes a prompt; all of a task's prompts begin with the same worked example."""
        example = self.example(random.Random(f"example/{setting.seed}"), setting.count, setting.answer_tokens)
        return (lambda rng, _, size: self.draft(rng, size, example)), ""

    def draft(self, rng: random.Random, size: int, example: str) -> Draft:
        """Return a prompt with `size` lines of noise, after the worked example."""
        prompt, prefix, names, depths = self._ask(rng, size, letters=5)
        return Draft(example + prompt, prefix, tuple(names), depths)

    def example(self, rng: random.Random, count: Callable[[str], int], answer_tokens: int) -> str:
        """Return a worked example of at most 500 tokens: names of three letters, so that none occurs in the task."""
        state = rng.getstate()
        found = ""
        for size in range(self.least, 100, 5):
            rng.setstate(state)
            prompt, prefix, names, _ = self._ask(rng, size, letters=3)
            longer = f"{prompt}{prefix} {' '.join(names)}\n\n"
            if found and count(longer) + answer_tokens > _EXAMPLE_TOKENS:
                break
            found = longer
        return found

    def _ask(self, rng: random.Random, size: int, letters: int) -> tuple[str, str, list[str], tuple[float, ...]]:
        names: list[str] = []
        while len(names) < self.chains * (self.hops + 1):
            if (name := "".join(rng.choices(string.ascii_uppercase, k=letters))) not in names:
                names.append(name)
        lines, wanted, asked = [NOISE_LINE] * size, "", names[: self.hops + 1]
        shares: tuple[float, ...] = ()
        for first in range(0, len(names), self.hops + 1):
            chain = names[first : first + self.hops + 1]
            value = str(rng.randint(10000, 99999))
            statements = [f"VAR {chain[0]} = {value}"]
            statements += [f"VAR {name} = VAR {before} " for before, name in zip(chain, chain[1:], strict=False)]
            places = sorted(rng.sample(range(len(lines)), len(statements)))
            if not wanted:
                wanted, shares = value, tuple(place / len(lines) for place in places)
            for shift, (place, statement) in enumerate(zip(places, statements, strict=True)):
                lines.insert(place + shift, statement)
        prompt = _PROMPT.format(text="\n".join(lines), value=wanted)
        return prompt, _PREFIX.format(count=self.hops + 1, value=wanted), asked, shares
