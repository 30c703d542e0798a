"""Published tasks whose rows can be made rather than downloaded: for any tokenizer, at any length.

A made row has the fields of the published files, so one reader (`PublishedTask.read`) serves both.
"""

from __future__ import annotations

import os
import random
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locret.data.tasks.prompts import build_prompt
from locret.data.tasks.published.base import PublishedTask
from locret.data.tasks.published.loading import FileSamples, candidates
from locret.data.tasks.task import SAMPLES, MadeSamples, NoSamples, Sample, SampleSet, Selection, Wanted

if TYPE_CHECKING:
    from typing_extensions import Self

_LONG = 100_000
"""Tokens from which a prompt may stay a little shorter, which saves looking further."""


@dataclass(frozen=True, kw_only=True)
class RowMaker(PublishedTask):
    """A published task that can also make its rows.

    A row depends on its index, the seed, the length and the number of rows alone, so processes can share a task.
    """

    @abstractmethod
    def maker(
        self, tokenizer: Any, tokens: int | None, *, samples: int, seed: int, data_dir: Path | None
    ) -> Callable[[int], dict[str, Any]]:
        """Return what makes row `index` of `samples`; source texts are read here, once.

        Args:
            tokenizer: Any tokenizer; it only counts.
            tokens: Length of the whole prompt, chat template included, and the answer together (RULER's sequence
                length); the prompt fills what the answer leaves. None for the published sizes, where there are any.
            samples: Rows of the set.
            seed: Same seed, same rows.
            data_dir: Where source texts lie (essays, question sets); see the task.

        Raises:
            ValueError: If a source text is missing, or there is no published size.
        """

    def filled(
        self,
        tokenizer: Any,
        tokens: int,
        seed: int,
        row: Callable[[random.Random, int, int], dict[str, Any]],
        *,
        guess: int,
        least: int = 1,
        system: str = "",
        exact: bool = False,
    ) -> Callable[[int], dict[str, Any]]:
        """Return what makes row `index` as large as `tokens` allow, the answer included.

        Args:
            tokenizer: Counts.
            tokens: Length of the whole prompt and the answer.
            seed: Same seed, same rows.
            row: From a random stream, a row's index and a size to a row.
            guess: Size to look at first, see `largest`.
            least: Smallest size.
            system: The task's system turn.
            exact: Leave no token unused in very long prompts either, which are searched longer.
        """
        count, around = counter(tokenizer), frame_tokens(self, tokenizer, system) + self.max_new_tokens
        close = tokens // 2000 if tokens > _LONG and not exact else 0

        def make(index: int) -> dict[str, Any]:
            def at(size: int) -> dict[str, Any]:
                return row(random.Random(f"{self.name}/{seed}/{tokens}/{index}"), index, size)

            def cost(size: int) -> int:
                (sample,) = self.read(index, "", at(size))
                return count(sample.content + sample.lead) + around

            what = f"a row of {self.name}"
            return at(largest(cost, tokens, least=least, guess=guess, what=what, close=close))

        return make

    def sampler(
        self, tokenizer: Any, tokens: int | None, *, samples: int, seed: int, data_dir: Path | None = None
    ) -> Callable[[int], Sample]:
        """Return what makes the sample of row `index`; arguments and errors are those of `maker`."""
        make = self.maker(tokenizer, tokens, samples=samples, seed=seed, data_dir=data_dir)
        return lambda index: self.read(index, f"{self.name}:{index}", make(index))[0]

    def select(self, wanted: Wanted) -> Selection:
        """Return the rows of a local file, of each length where files have lengths, or make them.

        Raises:
            NoSamples: If rows are bad, or cannot be made.
            OSError: If a file cannot be read.
        """
        task, folders = self.shortened(wanted.max_new_tokens), wanted.folders
        there = not self.file.split("/")[0].isdigit() and folders is not None and task.is_here(folders)
        if wanted.max_prompt is not None:
            task, _ = self.fitted(None, wanted.max_prompt, wanted.max_new_tokens)
            if not there:
                task.check_lengths(wanted, wanted.max_prompt)
        try:
            if there:
                samples: dict[int, SampleSet] = {0: FileSamples(task.opened(wanted), wanted.samples)}
                return task.selection("file", samples, wanted, self.max_new_tokens)
            limit_from, samples = task.made(wanted)
            return task.selection(limit_from, samples, wanted, self.max_new_tokens)
        except ValueError as error:
            raise NoSamples(str(error)) from error

    def check_lengths(self, wanted: Wanted, max_prompt: int) -> None:
        """Refuse to cut prompts that are made to a length; rows of a file are cut.

        Raises:
            ValueError: If one may be longer than the user allows.
        """
        for tokens in wanted.lengths:
            if not 0 < tokens <= max_prompt and self.rows_of(tokens, wanted.folders) is None:
                size = f"to --lengths {tokens}" if tokens else "in their published sizes"
                raise ValueError(
                    f"--max-prompt {max_prompt} cannot cut prompts of {self.name}, which are made {size}; "
                    f"give --lengths {max_prompt} or less, or drop --max-prompt"
                )

    def made(self, wanted: Wanted) -> tuple[str, dict[int, SampleSet]]:
        """Return rows of every length, from files where there are some, and what their length comes from."""
        asked: dict[int, SampleSet] = {}
        for tokens in wanted.lengths:
            there = self.rows_of(tokens, wanted.folders)
            if there is not None:
                asked[tokens] = FileSamples(there.opened(wanted), wanted.samples)
            else:
                source = self._source(wanted.tokenizer(), tokens, wanted.folders)
                asked[tokens] = MadeSamples(self, tokens, wanted.samples or SAMPLES, wanted.seed, source)
        return "length", asked

    def rows_of(self, tokens: int, folders: Sequence[str] | None) -> Self | None:
        """Return the task of a local file with rows of a length, in RULER's older or newer layout; None without one."""
        spots = [f"{tokens}/{self.name.partition('/')[2]}{end}" for end in (".jsonl", "/validation.jsonl")]
        tasks = [replace(self, file=spot) for spot in spots]
        return next((task for task in tasks if folders is not None and task.is_here(folders)), None)

    def is_here(self, folders: Sequence[str]) -> bool:
        """Return whether a local copy has the task's rows."""
        spots = [spot.partition("!")[0] for spot in candidates(self)]
        return any((Path(os.path.expanduser(folder)) / spot).is_file() for folder in folders for spot in spots)

    def _source(self, tokenizer: Any, tokens: int, folders: Sequence[str] | None) -> Path | None:
        """Return the folder that has the texts rows are made from; None if they need none, or make do with our own."""
        options: list[Path | None] = (
            [None] if folders is None else [Path(os.path.expanduser(folder)) for folder in folders]
        )
        for option in options:
            try:
                self.maker(tokenizer, tokens or None, samples=1, seed=0, data_dir=option)
                return option
            except ValueError:
                if option is options[-1]:
                    raise
        raise AssertionError("there is at least one option")


def spread(samples: int, index: int, low: float = 0.0, high: float = 1.0) -> float:
    """Return where the needle of row `index` is: even from `low` to `high`, in the middle if there is one row."""
    return (low + high) / 2 if samples == 1 else low + (high - low) * index / (samples - 1)


def largest(cost: Callable[[int], int], limit: int, *, least: int, guess: int, what: str, close: int = 0) -> int:
    """Return the largest size whose cost is within the limit, for costs that grow about evenly (or stop growing).

    Args:
        cost: Tokens of a text of that size; computed rarely, since a text may have millions.
        limit: Tokens it may have.
        least: Smallest size that makes sense.
        guess: Where to look first; the same for all rows of a task, or a row would depend on the ones made before it.
        what: What `limit` limits, for the message.
        close: Tokens that may stay unused, which saves looking further.

    Raises:
        ValueError: If even the smallest size costs too much.
    """
    low, low_cost = least, cost(least)
    if low_cost > limit:
        raise ValueError(f"tokens={limit} cannot hold {what}, which takes at least {low_cost}; raise tokens")
    high, high_cost, size, looks = None, 0, max(guess, least + 1), 0
    while (high is None or high - low > 1) and limit - low_cost > close:
        found, looks = cost(size), looks + 1
        if found == low_cost and size >= 2 * low:  # there is no more text
            break
        if found <= limit:
            low, low_cost = size, found
        else:
            high, high_cost = size, found
        if high is None:  # aim a little beyond, so that the next look bounds the search from above
            size = max(low + 1, min(4 * low + 4, int(limit / max(low_cost / max(low, 1), 1e-9) * 1.01) + 1))
        elif looks > 8:  # costs are less even than thought
            size = (low + high) // 2
        else:
            each = max((high_cost - low_cost) / (high - low), 1e-9)
            size = min(max(low + 1, low + int((limit - low_cost) / each)), high - 1)
    return low


def counter(tokenizer: Any) -> Callable[[str], int]:
    """Return what counts a text's tokens, without special ones and without a warning about long texts."""
    return lambda text: len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def frame_tokens(task: PublishedTask, tokenizer: Any, system: str = "") -> int:
    """Return the tokens around a task's content: special ones, and those of system turn and chat template if it has."""
    template = "chat" if getattr(tokenizer, "chat_template", None) else "none"
    probe = Sample(content="Text.", targets=("",), reply="", system=system)
    return len(build_prompt(task, probe, tokenizer, template=template).ids) - counter(tokenizer)(probe.content)
