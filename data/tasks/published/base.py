"""What a published benchmark's task is: rows that others wrote or that are made alike, in its authors' prompt."""

from __future__ import annotations

import json
import random
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from typing_extensions import Self

from locret.data.tasks import rows
from locret.data.tasks.prompts import build_prompt
from locret.data.tasks.rows import Row
from locret.data.tasks.task import SAMPLES, NoSamples, Sample, SampleSet, Selection, Task, Wanted

_TEMPLATE_ROOM, _QUESTION_ROOM = 128, 1024
"""Tokens left for turns around a prompt, and for turns and question around a document that alone is counted."""
_LONG = 100_000
"""Tokens from which a prompt may stay a little shorter, which saves looking further."""
Metric = Callable[[str, Sample], float]
"""The score of a generated text, from 0 to 1."""


def prompts_of(benchmark: str) -> Any:
    """Return the texts that a benchmark's authors prescribe, which lie beside its file."""
    return json.loads(Path(__file__).with_name(f"{benchmark}_prompts.json").read_text(encoding="utf-8"))


def over(metric: Callable[[str, Sequence[str]], float]) -> Metric:
    """Return a task's metric from one that takes all references at once."""
    return lambda said, sample: metric(said, sample.targets)


def first(metric: Callable[[str, str], float]) -> Metric:
    """Return a task's metric from one that takes a reference, the first."""
    return lambda said, sample: metric(said, sample.targets[0])


def best(metric: Callable[[str, str], float]) -> Metric:
    """Return a task's metric from one that takes a reference: the best over all."""
    return lambda said, sample: max((metric(said, target) for target in sample.targets), default=0.0)


@dataclass(frozen=True, kw_only=True)
class PublishedTask(Task):
    """A task of a published benchmark: one file of rows, each with one or several questions."""

    settable: ClassVar[tuple[str, ...]] = ("max_new_tokens", "limit")

    file: str
    """Where the rows lie in the published layout, relative to a local copy (`--data-dir`)."""
    repo: str = ""
    """Data set repository on the Hub; empty if it is not there."""
    revision: str = ""
    """Commit that the repository is pinned to."""
    hub_file: str = ""
    """Where the rows lie in that repository; `file` if empty. "data.zip!a.jsonl" is a file inside an archive."""
    scored: Metric | None = None
    """The metric, where `score` is no more than that."""

    @abstractmethod
    def read(self, row: Row) -> list[Sample]:
        """Return the samples of a row; a bad one is refused."""

    def score(self, prediction: str, sample: Sample) -> float:
        assert self.scored is not None
        return self.scored(prediction, sample)

    def sample_of(self, row: Row, head: str, document: str, tail: str, targets: tuple[str, ...], **more: Any) -> Sample:
        """Return the sample of a row: a document between two texts, and what is right."""
        span = len(head), len(head) + len(document)
        facts = {"id": str(row.number), "reply": targets[0], "span": span, **more}
        return Sample(content=head + document + tail, targets=targets, **facts)

    def items(self, found: Iterable[Row]) -> Iterator[Sample]:
        for row in found:
            yield from self.read(row)

    def select(self, wanted: Wanted) -> Selection:
        """Return the asked rows of the task's file, with prompts that fit the backbone; errors are `Task.select`'s."""
        task, limit_from = self.fitted(wanted)
        found = rows.open_rows(task, wanted.folders, wanted.samples)
        return task.selection(limit_from, {task.limit or 0: found}, wanted, self.max_new_tokens)

    def fitted(self, wanted: Wanted) -> tuple[Self, str]:
        """Return the task with prompts that fit the backbone or the user's limit, and where that is from."""
        task, most = self.shortened(wanted.max_new_tokens), wanted.max_prompt
        if most is not None:
            # A protocol that cuts nothing leaves it to the user where.
            cut = "middle" if task.truncation == "none" else task.truncation
            return replace(task, limit=most, truncation=cut, bound=most), "--max-prompt"
        if wanted.positions is None or task.truncation == "none":
            return task, "protocol" if task.limit else "none"
        room = _QUESTION_ROOM if task.truncation == "words" else _TEMPLATE_ROOM if task.chat else 0
        fits = wanted.positions - task.max_new_tokens - room
        if task.limit is not None and task.limit <= fits:
            return task, "protocol"
        if fits < 2:
            raise ValueError(
                f"task {task.name}: {task.max_new_tokens:,} new tokens leave no room for a prompt within the "
                f"{wanted.positions:,} positions of this backbone; lower --max-new-tokens, or give --max-prompt"
            )
        return replace(task, limit=fits), "backbone"

    def shortened(self, max_new_tokens: int | None) -> Self:
        """Return the task with answers that are no longer than the user wants; its protocol's may be shorter."""
        if max_new_tokens is None:
            return self
        return replace(self, max_new_tokens=min(self.max_new_tokens, max_new_tokens))

    def selection(self, limit_from: str, samples: Mapping[int, SampleSet], wanted: Wanted, longest: int) -> Selection:
        """Return samples of the task by length with everything that their results depend on besides the backbone;
        `longest` is the protocol's longest answer.
        """
        facts = {
            "version": self.version,
            **{name: getattr(self, name) for name in self.settable},
            "form": wanted.template if self.chat else "completion",
            "limit": self.limit,
            "limit_from": limit_from,
            "max_new_tokens": self.max_new_tokens,
            "shortened": self.max_new_tokens < longest,
            "data": [own.facts for own in samples.values()],
            "asked": {str(tokens): len(own.chosen) for tokens, own in samples.items()},
            "of": self.size,
            "questions": self.questions,
        }
        return Selection(self, samples, facts)


class Making(NamedTuple):
    """What rows are made for."""

    tokenizer: Any
    """Any; it only counts."""
    tokens: int | None = None
    """Length of the whole prompt, chat template included, and the answer together (RULER's sequence length); the prompt
    fills what the answer leaves. None for the published sizes, where there are any."""
    samples: int = 1
    seed: int = 0
    """Same seed, same rows."""
    data_dir: Path | None = None
    """Where source texts lie (essays, question sets); see the task."""

    def count(self, text: str) -> int:
        """Return the tokens of a text, without special ones and without a warning about long texts."""
        return len(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


@dataclass(frozen=True, kw_only=True)
class RowMaker(PublishedTask):
    """A published task that can also make its rows, for any tokenizer, at any length.

    A made row has the fields of the published files, so one reader (`read`) serves both. It depends on its index, the
    seed, the length and the number of rows alone, so processes can share a task.
    """

    needs_length: ClassVar[bool] = False
    """Whether there are no published sizes."""

    @abstractmethod
    def maker(self, of: Making) -> Callable[[int], dict[str, Any]]:
        """Return what makes row `index`; source texts are read here, once, and refused if missing."""

    def filled(
        self,
        of: Making,
        row: Callable[[random.Random, int, int], dict[str, Any]],
        *,
        guess: int,
        least: int = 1,
        system: str = "",
    ) -> Callable[[int], dict[str, Any]]:
        """Return what makes row `index` as large as the length allows, the answer included.

        `row` makes one of a random stream, its index and a size; `guess` is looked at first, see `largest`.
        """
        assert of.tokens is not None
        tokens, around = of.tokens, self.around(of, system)

        def make(index: int) -> dict[str, Any]:
            def at(size: int) -> dict[str, Any]:
                return row(self.stream(of, index), index, size)

            def cost(size: int) -> int:
                (sample,) = self.read(Row(index, "", at(size)))
                return of.count(sample.content + sample.lead) + around

            close = tokens // 2000 if tokens > _LONG else 0
            return at(largest(cost, tokens, least=least, guess=guess, what=f"a row of {self.name}", close=close))

        return make

    def stream(self, of: Making, index: int) -> random.Random:
        """Return the random stream of a row."""
        return random.Random(f"{self.name}/{of.seed}/{of.tokens}/{index}")

    def around(self, of: Making, system: str = "") -> int:
        """Return the tokens of an answer, and of special ones, system turn and template around a content."""
        template = "chat" if getattr(of.tokenizer, "chat_template", None) else "none"
        probe = Sample(content="Text.", targets=("",), reply="", system=system)
        ids = build_prompt(self, probe, of.tokenizer, template=template).ids
        return len(ids) - of.count(probe.content) + self.max_new_tokens

    def sampler(self, of: Making) -> Callable[[int], Sample]:
        """Return what makes the sample of row `index`; errors are those of `maker`."""
        if of.tokens is None and self.needs_length:
            raise ValueError(f"tokens: {self.name} has no length of its own; give one, such as 4096")
        make = self.maker(of)
        return lambda index: self.read(Row(index, f"{self.name}:{index}", make(index)))[0]

    def stand_in(self, data_dir: Path | None) -> str:
        """Return in a word or two what stands in for published texts that are not there; empty if nothing does."""
        return ""

    def select(self, wanted: Wanted) -> Selection:
        """Return the rows of a local file, of each length where files have lengths, or make them."""
        task, folders = self.shortened(wanted.max_new_tokens), wanted.folders
        if wanted.max_prompt is not None:
            task, _ = self.fitted(wanted)
        try:
            if folders is not None and not self.file.split("/")[0].isdigit() and rows.local(self, folders):
                limit_from, samples = "file", {0: rows.open_rows(task, folders, wanted.samples)}
            else:
                limit_from, samples = task.made(wanted)
            return task.selection(limit_from, samples, wanted, self.max_new_tokens)
        except ValueError as error:
            raise NoSamples(str(error)) from error

    def made(self, wanted: Wanted) -> tuple[str, dict[int, SampleSet]]:
        """Return rows of every length, from files where there are some, and what their length comes from."""
        found: dict[int, SampleSet] = {}
        for tokens in wanted.lengths:
            if (there := self.rows_of(tokens, wanted.folders)) is not None:
                found[tokens] = rows.open_rows(there, wanted.folders, wanted.samples)
                continue
            if wanted.max_prompt is not None and not 0 < tokens <= wanted.max_prompt:
                raise ValueError(
                    f"--max-prompt {wanted.max_prompt} cannot cut prompts of {self.name}, which are made "
                    f"{f'to --lengths {tokens}' if tokens else 'in their published sizes'}; give --lengths "
                    f"{wanted.max_prompt} or less, or drop --max-prompt"
                )
            of = Making(wanted.tokenizer(), tokens or None, wanted.samples or SAMPLES, wanted.seed)
            found[tokens] = self._with_texts(of, wanted.folders)
        return "length", found

    def rows_of(self, tokens: int, folders: Sequence[str] | None) -> Self | None:
        """Return the task of a local file with rows of a length, in RULER's older or newer layout; None without one."""
        spots = [f"{tokens}/{self.name.partition('/')[2]}{end}" for end in (".jsonl", "/validation.jsonl")]
        tasks = [replace(self, file=spot) for spot in spots]
        return next((task for task in tasks if folders is not None and rows.local(task, folders)), None)

    def _with_texts(self, of: Making, folders: Sequence[str] | None) -> SampleSet:
        """Return samples of the folder that has the texts rows are made from, if any is given."""
        *others, last = [None] if folders is None else [Path(folder).expanduser() for folder in folders]
        for option in others:
            with suppress(ValueError):
                return self.set_of(of._replace(data_dir=option))
        return self.set_of(of._replace(data_dir=last))

    def set_of(self, of: Making) -> SampleSet:
        """Return the samples that are made; each depends on its number, seed and length alone."""
        own = self.stand_in(of.data_dir)
        return SampleSet(
            task=self,
            chosen=range(of.samples),
            sample=self.sampler(of),
            facts={"generated": True, "seed": of.seed, "texts": own or (of.data_dir and of.data_dir.name)},
            made=True,
            stand_in=own,
        )


def spread(samples: int, index: int, low: float = 0.0, high: float = 1.0) -> float:
    """Return where the needle of row `index` is: even from `low` to `high`, in the middle if there is one row."""
    return (low + high) / 2 if samples == 1 else low + (high - low) * index / (samples - 1)


def largest(cost: Callable[[int], int], limit: int, *, least: int, guess: int, what: str, close: int = 0) -> int:
    """Return the largest size whose cost is within the limit, for costs that grow about evenly (or stop growing).

    `cost` gives the tokens of a text of a size, rarely, since a text may have millions. `guess`, where to look first,
    is the same for all rows of a task, or a row would depend on the ones made before it. `close` tokens may be left.
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
