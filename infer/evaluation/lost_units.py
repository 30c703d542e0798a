"""Why heads lose: which units the agnostic oracle keeps and they do not, and which answers come back with them.

    python -m locret.infer.evaluation.lost_units --tasks multikey,lookalikes/needles --budget 32 --output runs/lost

Texts are read before their questions, and each question is asked on a fork. An answer is right where every token of the
true reply is the most likely one after those before it, which one pass tells. Then the scores of one layer, or of one
KV head, are replaced by the oracle's labels while the text is read, and the same questions are asked again.
"""

# L layers, K KV heads, D document tokens, C kept units

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from locret import RetentionCache, RetentionPolicy, prefill
from locret.backbone.chunk import Chunk
from locret.backbone.passes import keeping_step
from locret.cache.reader import answering
from locret.cli.command import parse_options, print_json, warnings_as_lines
from locret.data import tasks
from locret.data.tasks import Sample
from locret.data.tasks.generated.base import GeneratedTask
from locret.data.tasks.prompts import build_prompt
from locret.files import write_text
from locret.infer.evaluation.methods import Setup
from locret.infer.evaluation.shared_text import SharedText, reply_ids
from locret.pictures import can_draw
from locret.scorers import RetainingHeadScorer
from locret.tables import markdown

KINDS = ("answer", "key", "question word", "other number", "punctuation", "other word")
"""A token is the first of these that fits: part of what some question asks for; of a word that some questions have and
others do not; of a word that all questions have; with a digit; without letter or digit; anything else."""


@dataclass(frozen=True, kw_only=True)
class LostUnitsOptions:
    """Which heads are compared with the agnostic oracle, on which texts, and within which budget."""

    model: str = "checkpoints/tiny"
    """Backbone."""
    heads: str = "checkpoints/tiny-heads"
    """Retaining heads for it."""
    tasks: str | list[str] = field(default_factory=lambda: ["multikey", "lookalikes/needles"])
    """Tasks whose texts are made here and know all their questions."""
    tokens: int = 1024
    """Length of each prompt."""
    samples: int = 4
    """Texts of each task."""
    questions: int = 8
    """Most questions asked of a text; labels are those of all."""
    budget: int = 32
    """Units per KV head."""
    chunk_size: int = 512
    """Prompt tokens per forward pass."""
    local_len: int = 32
    """Last tokens of the document, which stay besides the budget."""
    by: Literal["layers", "heads"] = "layers"
    """What the oracle's labels replace: the scores of one layer at a time, or of one KV head."""
    seed: int = 0
    """Of the texts."""
    output: str | None = None
    """Folder for lost_units.json and lost_units.png."""
    json: bool = False
    """Print the record instead of tables."""

    def __post_init__(self) -> None:
        for name in ("tokens", "samples", "questions"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)} leaves nothing to ask; give 1 or more")
        if self.budget + self.local_len >= self.tokens:
            raise ValueError(
                f"--budget {self.budget} and --local-len {self.local_len} hold all of --tokens {self.tokens}, so "
                "nothing is lost; lower --budget"
            )
        if self.output is not None and Path(self.output).exists() and not Path(self.output).is_dir():
            raise ValueError(f"--output {self.output} is a file; name a folder")
        if not self.names():
            raise ValueError("--tasks names nothing; give at least one, such as multikey")
        for name in self.names():
            if not isinstance(tasks.get(name), GeneratedTask):
                raise ValueError(
                    f"--tasks {name} does not say which questions there are of its texts; take tasks that are made here"
                )

    def names(self) -> list[str]:
        """Return the names of the tasks, each once."""
        given = self.tasks.split(",") if isinstance(self.tasks, str) else self.tasks
        return list(dict.fromkeys(name.strip() for name in given if name.strip()))


@dataclass(frozen=True, kw_only=True, eq=False)
class Replaced(RetainingHeadScorer):
    """Retaining heads, some of whose scores are the oracle's labels."""

    name: ClassVar[str] = "replaced"

    labels: Tensor
    """(L, K, D) of the agnostic oracle."""
    taken: frozenset[tuple[int, int]]
    """Numbers of layers, among those with full attention, and KV heads that score by labels."""
    layers: tuple[int, ...]
    """Indices of the layers with full attention."""

    def __post_init__(self) -> None:
        """Check nothing: no user has written this."""

    def score(self, chunk: Chunk) -> Tensor:
        """Return scores (1, K, L)."""
        scores = super().score(chunk)
        nth, positions = self.layers.index(chunk.layer_idx), chunk.positions.reshape(-1)
        labels = self.labels[nth, : scores.shape[1]]
        known = labels[:, positions.clamp(max=labels.shape[1] - 1)].masked_fill(positions >= labels.shape[1], -1e9)
        own = torch.tensor([(nth, head) in self.taken for head in range(scores.shape[1])], device=scores.device)
        return torch.where(own[None, :, None], known.to(scores.device), scores)


@dataclass(frozen=True)
class Asked:
    """A text, and what is asked of it."""

    document_1D: Tensor
    pairs: tuple[tuple[Tensor, Tensor], ...]
    """Ids of what follows the document for each question, and of its answer."""
    labels: Tensor
    """(L, K, D) of the agnostic oracle."""
    kinds: tuple[str, ...]
    """Of each document token."""


def made(setup: Setup, task: GeneratedTask, options: LostUnitsOptions) -> Iterator[Asked]:
    """Yield the texts of a task.

    Raises:
        ValueError: If a text cannot be made at that length.
    """
    tokenizer = setup.tokenizer
    for index in range(options.samples):
        sample = text_of(task, tokenizer, options, index)
        text = SharedText(setup, task, sample)
        ids_1D, pairs = torch.empty(0), []
        for question in sample.asked[: options.questions]:
            one = sample.asking(question)
            ids = torch.tensor([build_prompt(task, one, tokenizer).ids], device=text.labels.device)
            ids_1D = ids[:, : text.document]
            pairs.append((ids[:, text.document :], reply_ids(tokenizer, one.reply, ids.device)))
        kinds = kinds_of(tokenizer, ids_1D[0].tolist(), [(q.text, q.targets) for q in sample.asked])
        yield Asked(ids_1D, tuple(pairs), text.labels, tuple(kinds))


def text_of(task: GeneratedTask, tokenizer: Any, options: LostUnitsOptions, index: int) -> Sample:
    """Return one text.

    Raises:
        ValueError: If it cannot be made at that length.
    """
    try:
        return task.sample(
            tokenizer, options.tokens, depth=task.depth(index, options.samples), seed=f"lost/{options.seed}/{index}"
        )
    except ValueError as error:
        raise ValueError(
            f"text {index + 1} of {options.samples} of {task.name} does not fit --tokens {options.tokens} ({error})"
        ) from error


def kinds_of(tokenizer: Any, ids: Sequence[int], asked: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """Return which of `KINDS` each token of a document is.

    Args:
        tokenizer: The backbone's.
        ids: Of the document.
        asked: Text and right values of every question.
    """
    words = [set(re.findall(r"\w+", question)) for question, _ in asked]
    every = set.intersection(*words) if words else set()
    answers = _places(tokenizer, ids, {target for _, targets in asked for target in targets})
    keys, common = (_places(tokenizer, ids, found) for found in (set().union(*words) - every, every))
    kinds = []
    for place, text in enumerate(tokenizer.decode([one]) for one in ids):
        if place in answers:
            kinds.append("answer")
        elif place in keys:
            kinds.append("key")
        elif place in common:
            kinds.append("question word")
        elif any(letter.isdigit() for letter in text):
            kinds.append("other number")
        else:
            kinds.append("other word" if any(letter.isalnum() for letter in text) else "punctuation")
    return kinds


def _places(tokenizer: Any, ids: Sequence[int], targets: set[str]) -> set[int]:
    """Return where in a document the tokens of some values stand."""
    found = set[int]()
    for text in {spelt for target in targets for spelt in (target, f" {target}")}:
        wanted = tokenizer(text, add_special_tokens=False)["input_ids"]
        for start in range(len(ids) - len(wanted) + 1):
            if list(ids[start : start + len(wanted)]) == wanted:
                found |= set(range(start, start + len(wanted)))
    return found


@torch.no_grad()
@keeping_step
def right(model: nn.Module, cache: RetentionCache, question: Tensor, answer: Tensor) -> bool:
    """Return whether each token of a reply, but for its end, is the most likely one on a fork of what was kept."""
    fork = cache.copy()
    with answering(model, fork):
        ids = torch.cat([question, answer[:, :-1]], dim=1)
        logits = model(input_ids=ids, past_key_values=fork, use_cache=True, logits_to_keep=answer.shape[1]).logits
    return bool((logits[0].argmax(-1) == answer[0])[:-1].all())


class Comparison:
    """Counts what heads and oracle keep of the texts of one task, and which answers are right.

    Args:
        setup: The backbone, its tokenizer and the heads.
        policy: How texts are read.
        by: "layers" or "heads".
    """

    def __init__(self, setup: Setup, policy: RetentionPolicy, by: str) -> None:
        assert setup.heads is not None
        self.setup, self.policy = setup, policy
        self.layers = tuple(setup.heads.layers)
        self.kv_heads = [setup.heads.config.shape(layer).num_kv_heads for layer in self.layers]
        self.pairs = [(nth, head) for nth, count in enumerate(self.kv_heads) for head in range(count)]
        self.parts = {
            (f"layer {self.layers[nth]}" if by == "layers" else f"layer {self.layers[nth]} head {head}"): frozenset(
                one for one in self.pairs if one == (nth, head) or (by == "layers" and one[0] == nth)
            )
            for nth, head in self.pairs
        }
        self.answers: Counter[str] = Counter()
        self.common: dict[tuple[int, int], float] = dict.fromkeys(self.pairs, 0.0)
        self.missed: dict[int, Counter[str]] = {nth: Counter() for nth in range(len(self.layers))}
        self.spare: dict[int, Counter[str]] = {nth: Counter() for nth in range(len(self.layers))}
        self.texts = self.questions = 0

    def add(self, asked: Asked) -> None:
        """Read a text in every way, and ask its questions."""
        everything = frozenset(self.pairs)
        heads, oracle = self._ask("heads", asked, frozenset()), self._ask("oracle", asked, everything)
        for name, part in self.parts.items():
            self._ask(f"heads, {name} of the oracle", asked, part)
            self._ask(f"oracle, {name} of the heads", asked, everything - part)
        local = asked.document_1D.shape[1] - self.policy.local_len
        for nth, head in self.pairs:
            ours, theirs = (
                {place for place in one.kept_positions(self.layers[nth])[0, head].tolist() if 0 <= place < local}
                for one in (heads, oracle)
            )
            self.common[nth, head] += len(ours & theirs) / max(1, len(theirs))
            self.missed[nth].update(asked.kinds[place] for place in theirs - ours)
            self.spare[nth].update(asked.kinds[place] for place in ours - theirs)
        self.texts, self.questions = self.texts + 1, self.questions + len(asked.pairs)

    def _ask(self, name: str, asked: Asked, taken: frozenset[tuple[int, int]]) -> RetentionCache:
        assert self.setup.heads is not None
        scorer = Replaced(heads=self.setup.heads, labels=asked.labels, taken=taken, layers=self.layers)
        cache = RetentionCache(self.setup.model, scorer, self.policy)
        prefill(self.setup.model, asked.document_1D, cache)
        self.answers[name] += sum(right(self.setup.model, cache, *pair) for pair in asked.pairs)
        return cache

    def record(self) -> dict[str, Any]:
        """Return shares of the questions and of the units, and counts of units per text and layer by kind of token."""
        per = {
            name: {self.layers[nth]: counts for nth, counts in found.items()} for name, found in self._by_kind().items()
        }
        return {
            "texts": self.texts,
            "questions": self.questions,
            "right": {name: self.answers[name] / self.questions for name in self.answers},
            "in_common": {
                str(self.layers[nth]): [self.common[nth, head] / self.texts for head in range(count)]
                for nth, count in enumerate(self.kv_heads)
            },
            **{name: {str(layer): counts for layer, counts in found.items()} for name, found in per.items()},
        }

    def _by_kind(self) -> dict[str, dict[int, dict[str, float]]]:
        """Return units per text and KV head."""
        return {
            name: {
                nth: {kind: counts[kind] / self.texts / self.kv_heads[nth] for kind in KINDS}
                for nth, counts in found.items()
            }
            for name, found in (("missed", self.missed), ("spare", self.spare))
        }


def measure(options: LostUnitsOptions) -> dict[str, Any]:
    """Return the record of all tasks.

    Raises:
        ValueError: If something is missing or does not match.
    """
    from locret import LongContextModel

    policy = RetentionPolicy(budget=options.budget, chunk_size=options.chunk_size, local_len=options.local_len)
    loaded = LongContextModel.from_pretrained(options.model, heads=options.heads, policy=policy)
    scorer = loaded.scorer
    assert isinstance(scorer, RetainingHeadScorer)
    setup = Setup(loaded.model, loaded.tokenizer, scorer.prepare(loaded.model), options.seed)
    for name in options.names():  # what cannot be made is refused before the first is asked
        task = tasks.get(name)
        assert isinstance(task, GeneratedTask)
        for index in range(options.samples):
            text_of(task, loaded.tokenizer, options, index)
    found = {}
    for name in options.names():
        task, comparison = tasks.get(name), Comparison(setup, policy, options.by)
        assert isinstance(task, GeneratedTask)
        for asked in tqdm(made(setup, task, options), desc=name, total=options.samples, unit="text", disable=None):
            comparison.add(asked)
        found[name] = comparison.record()
    named = ("model", "heads", "tokens", "samples", "questions", "seed", "by")
    asked_for = {name: getattr(options, name) for name in named}
    return {"options": asked_for, "policy": policy.to_dict(), "tasks": found}


def tables(record: Mapping[str, Any]) -> str:
    """Return the record for people: right answers by what was replaced, and units by kind of token."""
    lines: list[str] = []
    for task, found in record["tasks"].items():
        lines += [f"{task}: {found['questions']} questions about {found['texts']} texts", ""]
        whole = {name: share for name, share in found["right"].items() if ", " not in name}
        lines += markdown(["right (%)", *whole], [["all scores", *(f"{100 * share:.0f}" for share in whole.values())]])
        parts = [
            name.removeprefix("heads, ").removesuffix(" of the oracle")
            for name in found["right"]
            if name.startswith("heads, ")
        ]
        rows = []
        for part in parts:
            mended, broken = (
                found["right"][f"{own}, {part} of the {other}"]
                for own, other in (("heads", "oracle"), ("oracle", "heads"))
            )
            layer, _, head = part.removeprefix("layer ").partition(" head ")
            shares = found["in_common"][layer]
            common = shares[int(head)] if head else sum(shares) / len(shares)
            rows.append([part, *(f"{100 * share:.0f}" for share in (common, mended, broken))])
        header = ["replaced", "units in common (%)", "heads, this one of the oracle", "oracle, this one of the heads"]
        lines += ["", *markdown(header, rows), ""]
        rows = [
            [f"layer {layer}, {name}", *(f"{found[name][layer][kind]:.1f}" for kind in KINDS)]
            for layer in found["missed"]
            for name in ("missed", "spare")
        ]
        lines += [*markdown(["units per KV head", *KINDS], rows), ""]
    return "\n".join(lines)


def command(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write record and picture; return 0.

    Raises:
        ValueError: For what the user must change.
        OSError: If a file cannot be written.
    """
    title = "Which units heads lose that the agnostic oracle keeps, and which answers with them."
    (options,), _ = parse_options("locret.infer.evaluation.lost_units", title, [LostUnitsOptions], argv)
    with warnings_as_lines("locret.infer.evaluation.lost_units", quiet=False):
        draws = options.output is not None and can_draw("the picture")
    record = measure(options)
    if options.output is not None:
        folder = Path(options.output)
        write_text(folder / "lost_units.json", json.dumps(record, indent=1) + "\n", parents=True)
        if draws:
            from locret.infer.evaluation.lost_units_figure import draw

            draw(record, folder / "lost_units.png")
    if options.json:
        print_json(record)
    else:
        sys.stdout.write(tables(record))
    return 0


if __name__ == "__main__":
    from locret.cli.command import run

    run(command, prog="locret.infer.evaluation.lost_units")
