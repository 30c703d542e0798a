"""Tasks whose rows are generated rather than downloaded: for any tokenizer, at any length.

A generated row has the fields of the published files, so one reader (`PublishedTask.read`) serves both.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locret.data.tasks.published.base import Item, PublishedTask
from locret.data.tasks.published.prompts import build_prompt

Record = tuple[str, Mapping[str, Any]]
"""A row and its place, for messages."""


@dataclass(frozen=True, kw_only=True)
class GeneratedTask(PublishedTask):
    """A published task that can also make its rows."""

    def generate(
        self,
        tokenizer: Any,
        tokens: int | None,
        samples: int,
        *,
        seed: int = 0,
        data_dir: Path | None = None,
        only: Iterable[int] | None = None,
    ) -> Iterator[Record]:
        """Yield rows as the published files have them, each with its place "<task>:<index>".

        A row depends on its index, the seed, the length and the number of rows alone, so processes can share a task.

        Args:
            tokenizer: Any tokenizer; it only counts.
            tokens: Length of the whole prompt, chat template included, and the answer together (RULER's sequence
                length); the prompt fills what the answer leaves. None for the published sizes, where there are any.
            samples: Rows of the set.
            seed: Same seed, same rows.
            data_dir: Where source texts lie (essays, question sets); see the task.
            only: Indices of the rows to make; all if None.

        Raises:
            ValueError: If `tokens` cannot hold the shortest prompt, or a source text is missing.
        """
        if samples < 1:
            raise ValueError(f"samples={samples} leaves nothing to ask; give 1 or more")
        make = self.maker(tokenizer, tokens, samples=samples, seed=seed, data_dir=data_dir)
        for index in range(samples) if only is None else only:
            yield f"{self.name}:{index}", make(index)

    def item(self, record: Record) -> Item:
        """Return the item of one generated row; its id is the row's index."""
        place, row = record
        return self.read(int(place.rpartition(":")[2]), place, row)[0]

    @abstractmethod
    def maker(
        self, tokenizer: Any, tokens: int | None, *, samples: int, seed: int, data_dir: Path | None
    ) -> Callable[[int], dict[str, Any]]:
        """Return what makes row `index` of `samples`; source texts are read here, once.

        Raises:
            ValueError: If a source text is missing, or there is no published size.
        """


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
    probe = Item(id="", content="Text.", targets=("",), reply="", system=system)
    return len(build_prompt(task, probe, tokenizer, template=template).ids) - counter(tokenizer)(probe.content)
