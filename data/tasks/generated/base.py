"""What a generated task is: what it hides in a text, what it asks, and how an answer is scored.

It plants statements in filler and asks for one of them; everything else (length, depth, split, chat template) is the
same for all. The question always comes after the text.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from locret.data.tasks.task import SAMPLES, MadeSamples, Question, Sample, Selection, Task, Wanted
from locret.data.text.filler import Filler, Split, generator
from locret.data.text.haystack import hide
from locret.data.text.words import NAMES, VARIABLES


@dataclass(frozen=True, kw_only=True)
class Planted:
    """Statements to hide in a text, and the questions that can be asked of them."""

    statements: tuple[str, ...]
    questions: tuple[Question, ...]


def asked_about(introduction: str, text: str, question: str) -> tuple[str, int]:
    """Return a user's turn, the question on its own line after the document, and where the document ends in it."""
    document = f"{introduction}\n{text}" if introduction else text
    return f"{document}\n{question}", len(document)


class Draw:
    """A seeded source of what statements are about; no name or number is drawn twice for one text.

    Names and variables are halved between the splits, so heads are never trained on the keys they are evaluated with.
    """

    def __init__(self, rng: random.Random, split: Split):
        self.rng = rng
        half = slice(0 if split == "train" else 1, None, 2)
        self._names = rng.sample(NAMES[half], len(NAMES[half]))
        rng.sample(VARIABLES[half], len(VARIABLES[half]))  # so that the rest of a text stays what it was
        self._numbers: set[str] = set()

    def name(self) -> str:
        """Return a name that is used by no other statement of the text.

        Raises:
            ValueError: When there is none left.
        """
        if not self._names:
            raise ValueError("one text cannot hold that many keys: all names of this split are taken; ask for fewer")
        return self._names.pop()

    def number(self, digits: int) -> str:
        """Return a number of `digits` digits, different from all drawn before, that does not begin with 0.

        Raises:
            ValueError: When there is none left.
        """
        low, high = 10 ** (digits - 1), 10**digits
        if sum(len(number) == digits for number in self._numbers) == high - low:
            raise ValueError(f"one text cannot hold that many numbers of {digits} digits; ask for fewer")
        while (number := str(self.rng.randrange(low, high))) in self._numbers:
            pass
        self._numbers.add(number)
        return number


@dataclass(frozen=True, kw_only=True)
class GeneratedTask(Task):
    """A task whose texts are made here: any tokenizer, any length, no data."""

    pictured: ClassVar[bool] = True

    introduction: str = ""
    """What the text begins with."""

    def __post_init__(self) -> None:
        for name, value in self.options().items():
            if type(value) is not int or value < 1:
                raise ValueError(f"task {self.name}: {name}={value!r} must be a whole number, 1 or more")

    @abstractmethod
    def plant(self, draw: Draw) -> Planted:
        """Return the statements of one text and the questions about them; the first one is asked in evaluation."""

    @property
    def family(self) -> str:
        """Return "generated": it needs no data, whatever its name begins with."""
        return "generated"

    @property
    def single_needle(self) -> bool:
        """Whether the first statement holds the whole answer to the question that is asked, at the depth chosen."""
        planted = self.plant(Draw(random.Random(0), "eval"))
        return bool(planted.statements) and all(
            target in planted.statements[0] for target in planted.questions[0].targets
        )

    def sample(
        self,
        tokenizer: Any,
        tokens: int | None = None,
        *,
        depth: float | None = None,
        seed: int | str = 0,
        split: Split = "eval",
    ) -> Sample:
        """Return one sample whose whole chat prompt has at most `tokens` tokens, and as many as sentences allow.

        Args:
            tokenizer: Any tokenizer with a chat template.
            tokens: Length of the chat prompt.
            depth: Where the first statement is, from 0 (start of the text) to 1 (end); drawn if None. The others'
                depths are drawn.
            seed: Same seed, same sample.
            split: "eval" or "train": their texts and keys never coincide.

        Raises:
            ValueError: For a depth outside 0 to 1, or `tokens` too few for statements and question.
        """
        if tokens is None:
            raise ValueError(f"tokens: {self.name} has no length of its own; give one, such as 4096")
        rng = generator(seed, split, self.name, tokens)
        planted = self.plant(Draw(rng, split))
        depths = [rng.random() for _ in planted.statements]
        depths = depths if depth is None else [depth, *depths[1:]][: len(depths)]
        asked = planted.questions[0]
        text = hide(
            tokenizer,
            planted.statements,
            depths,
            filler=Filler(rng),
            tokens=tokens,
            around=lambda text: asked_about(self.introduction, text, asked.text)[0],
        )
        content, end = asked_about(self.introduction, text, asked.text)
        return Sample(
            content=content,
            question=asked.text,
            targets=asked.targets,
            reply=asked.reply,
            depths=tuple(depths),
            span=(0, end),
            asked=planted.questions,
        )

    def depth(self, index: int, samples: int) -> float:
        """Return where the first statement of sample `index` is, from 0 to 1: even over the samples."""
        return (index + 0.5) / samples

    def sampler(
        self, tokenizer: Any, tokens: int | None, *, samples: int, seed: int, data_dir: Path | None = None
    ) -> Callable[[int], Sample]:
        """Return what makes sample `i` of `samples`."""
        return lambda i: self.sample(tokenizer, tokens, depth=self.depth(i, samples), seed=f"{seed}/{i}")

    def select(self, wanted: Wanted) -> Selection:
        """Return samples of every length."""
        task, longest, count = self, dict[str, Any](), wanted.samples or SAMPLES
        if wanted.max_new_tokens is not None:
            longest = {"max_new_tokens": wanted.max_new_tokens}
            task = replace(self, max_new_tokens=wanted.max_new_tokens)
        samples = {tokens: MadeSamples(task, tokens, count, wanted.seed) for tokens in wanted.lengths}
        return Selection(task, samples, {"version": self.version, **self.options(), **longest})

    def check(self, tokenizer: Any) -> None:
        """Refuse a tokenizer that cannot express the task's words and numbers.

        Raises:
            ValueError: Naming what does not survive encoding and decoding.
        """
        planted = self.plant(Draw(random.Random(0), "eval"))
        asked = planted.questions[0]
        for text in (*planted.statements, asked.text, asked.reply):
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            decoded = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            if decoded.split() != text.split():
                raise ValueError(
                    f"task {self.name} cannot be expressed by this tokenizer: {text!r} comes back as {decoded!r}; "
                    "leave the task out or use another backbone"
                )
