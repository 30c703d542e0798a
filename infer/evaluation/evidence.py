"""Does an answer know what it may have forgotten? What it says, against full attention and against what is right.

    python -m locret.infer.evaluation.evidence --model checkpoints/tiny --heads checkpoints/tiny-heads

A text is read within a budget, before its question is known, and asked. What the answer then says is held against

* full attention: which share of the attention of the same answer's queries, over a cache of everything, falls on units
  that the bounded cache evicted. A bin of answers with that against what was estimated is a point of the calibration;
* what is right: how well a signal tells wrong answers from right ones (the area under its ROC curve: the chance that a
  wrong one has the larger value), what a flag finds, and how often it is a false alarm. Beside the lost attention stand
  what everybody has, the answer's entropy and margin, and what needs no question, the predicted share of what is gone;
* where the evidence is: whether the passages that are named hold it, and what reading them again does to the answer,
  against passages found by the attention to what is held, by the words of the question, at random, and the right one.
"""

# J segments, N query heads, K KV heads, R queries, n tokens of the text

from __future__ import annotations

import json
import math
import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from tqdm.auto import tqdm

from locret.cli.command import parse_options, print_json, warnings_as_lines
from locret.data.tasks import Sample
from locret.data.tasks.generated.base import GeneratedTask
from locret.files import write_text
from locret.infer.evaluation.composing import generated, made_samples
from locret.pictures import can_draw
from locret.tables import markdown

SIGNALS = {
    "lost": "lost attention",
    "predicted": "predicted share of what is gone",
    "spread": "lost attention outside the first passage",
    "entropy": "mean entropy of the answer",
    "unsure": "1 - least margin of the answer",
    "changed": "the answer changes when passages are read again",
}
"""What may tell a wrong answer; larger means worse."""
ARMS = {
    "ledger": "the passages of the ledger",
    "attention": "those with most attention to what is held",
    "words": "those with the question's rarest words",
    "random": "random ones",
    "right": "the one that holds the evidence",
}
"""What is read again."""
MARGINS = (0.3, 0.5, 0.7, 0.9, 0.95)
"""Least margins of an answer below which it could be flagged."""
BINS = 6
_FIRST = "Estimated and true lost attention, right answers before and after three passages are read again:"
BEGIN, END = "<!-- measured -->\n", "<!-- end of what was measured -->"


@dataclass(frozen=True, kw_only=True)
class EvidenceOptions:
    """What is read, within which budgets, and what is asked."""

    model: str = "checkpoints/tiny"
    """Backbone."""
    heads: str = "checkpoints/tiny-heads"
    """Retaining heads for it."""
    tokens: list[int] = field(default_factory=lambda: [2048])
    """Lengths of the texts in tokens."""
    budgets: list[int] = field(default_factory=lambda: [24, 48, 96])
    """Units per KV head; the local tokens come on top."""
    tasks: list[str] = field(default_factory=lambda: ["multikey", "lookalikes/keys", "lookalikes/needles"])
    """Generated tasks whose answer is one value that stands in the text."""
    samples: int = 20
    """Questions per task, length and budget, each about a text of its own."""
    ledger: int = 256
    """Segments of the ledger."""
    seed: int = 0
    """Of the samples."""
    output: str | None = None
    """Write PATH.json, PATH.png and the tables, cell by cell: into PATH.md where that is a page with a place for them,
    else as PATH.md; without it the tables go to standard output."""
    json: bool = False
    """Print one JSON object instead of tables."""

    def __post_init__(self) -> None:
        if self.samples < 1 or self.ledger < 2 or any(budget < 8 for budget in self.budgets):
            raise ValueError(
                f"--samples {self.samples} --ledger {self.ledger} --budgets {self.budgets}: give at least 1, 2 and 8"
            )
        if not (self.budgets and self.tokens and self.tasks):
            raise ValueError("--tokens, --budgets and --tasks: one of them names nothing; give at least one of each")
        for tokens, budget in product(self.tokens, self.budgets):
            if budget + self.policy(budget).local_len >= tokens:
                raise ValueError(
                    f"--budgets {budget} and its {self.policy(budget).local_len} local tokens hold all of --tokens "
                    f"{tokens}, so nothing is lost; lower --budgets"
                )
        if self.output is not None:
            _check_output(self.output)

    def policy(self, budget: int) -> Any:
        """Return the policy of a budget."""
        from locret import RetentionPolicy

        return RetentionPolicy(budget=budget, ledger=self.ledger)

    def cells(self) -> list[tuple[str, int, int]]:
        """Return task, length and budget of everything that is asked, each once."""
        return list(dict.fromkeys(product(self.tasks, self.tokens, self.budgets)))


class Measuring:
    """Asks one question, looks again in every way, and compares.

    Args:
        lm: The model, which reads within the budget and keeps a ledger.
        seed: Of random passages.
    """

    def __init__(self, lm: Any, seed: int) -> None:
        self.lm, self._random = lm, random.Random(seed)

    def ask(self, task: GeneratedTask, sample: Sample) -> dict[str, Any] | None:
        """Return what is said of one answer and what is so; None if its evidence is no one place in the text."""
        from locret.conversation.evidence import passages_of, watched

        text, longest = sample.content[: sample.span[1]], task.max_new_tokens
        context = self.lm.read(text, progress=False)
        ids = self.read_ids(text)
        where = place(ids, self.lm.tokenizer, sample.targets)
        if where is None:
            return None
        entropy = _Entropy()
        first, watch = watched(context, sample.question, longest, {"logits_processor": [entropy]})
        true, evidence_gone = self.full_attention(context, ids, sample, first.text, where)
        size = first.passages[0].end - first.passages[0].start if first.passages else 1
        starts = range(len(ids) - size)
        if len(starts) < 3:
            raise ValueError(
                f"--ledger {self.lm.policy.ledger}: a passage of {size} tokens is nearly all of a text of {len(ids)}; "
                "raise --ledger or --tokens"
            )
        chosen = {
            "ledger": first.passages,
            "attention": passages_of(watch.found(), watch.width, len(ids)),
            "words": self._by_words(ids, sample.question, size),
            "random": self._at(self._random.sample(starts, 3), size),
            "right": self._at([around(where, size, len(ids))], size),
        }
        answers = {
            name: context.reread(sample.question, text, replace(first, passages=passages), longest).text
            for name, passages in chosen.items()
        }
        lost = [one.lost for one in first.passages]
        return {
            "right": task.score(first.text, sample) == 1,
            "lost": first.lost,
            "true": true,
            "evidence_gone": evidence_gone,
            "predicted": _predicted(context.cache.governed),
            "spread": 1 - lost[0] / float(watch.lost().sum()) if lost else 0.0,
            "entropy": entropy.mean,
            "unsure": 1 - first.margin,
            "flagged": first.flagged,
            "changed": answers["ledger"].strip() != first.text.strip(),
            "named": {name: _holds(passages, where) for name, passages in chosen.items()},
            "again": {name: task.score(answer, sample) == 1 for name, answer in answers.items()},
        }

    def read_ids(self, text: str) -> list[int]:
        """Return the token ids of a text as it is read."""
        from locret.conversation.document import open_document

        return [token for block in self.lm.tokens(open_document(text)) for token in block]

    def full_attention(
        self, context: Any, ids: Sequence[int], sample: Sample, answer: str, where: tuple[int, int]
    ) -> tuple[float, float]:
        """Return shares of full attention, over all layers and query heads, that fall on units which are gone.

        Args:
            context: What the bounded cache kept.
            ids: Tokens that were read.
            sample: The question and its right answer.
            answer: The answer that was given.
            where: The tokens of the evidence.

        Returns:
            Of all attention of the queries of the given answer; and of the attention that the queries of the right
            answer pay to the evidence.
        """
        gone = _gone(context.cache, len(ids))
        question = context.question_ids(sample.question)[0].tolist()
        shares = []
        for text, span in ((answer, None), (sample.reply, where)):
            reply = self.lm.tokenizer(text, add_special_tokens=False).input_ids or [question[-1]]
            shares.append(_share_gone(self.lm.model, [*ids, *question, *reply], len(reply), gone, span))
        return shares[0], shares[1]

    def _at(self, starts: Sequence[int], size: int) -> tuple[Any, ...]:
        from locret.conversation.evidence import Passage

        return tuple(Passage(start=start, end=start + size, lost=0.0) for start in starts)

    def _by_words(self, ids: Sequence[int], question: str, size: int) -> tuple[Any, ...]:
        """Return the passages that share most of the question's tokens, each weighed by how rare it is in the text."""
        counts, asked = Counter(ids), set(self.lm.tokenizer(question, add_special_tokens=False).input_ids)
        step = max(1, size // 3)

        def weight(start: int) -> float:
            shared = asked & set(ids[start : start + size])
            return sum(math.log(len(ids) / counts[token]) for token in shared)

        order = sorted(range(0, max(1, len(ids) - size + 1), step), key=weight, reverse=True)
        apart: list[int] = []
        for start in order:
            if len(apart) < 3 and all(abs(start - other) >= size for other in apart):
                apart.append(start)
        return self._at(apart, size)


class _Entropy:
    """Notes the entropy of every token of an answer."""

    def __init__(self) -> None:
        self._found: list[float] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        logs = scores[0].float().log_softmax(-1)
        self._found.append(float(-(logs.exp() * logs.clamp_min(-1e4)).sum()))
        return scores

    @property
    def mean(self) -> float:
        """Nats per token."""
        return fmean(self._found)


def place(ids: Sequence[int], tokenizer: Any, targets: Sequence[str]) -> tuple[int, int] | None:
    """Return the first and past-the-end token of the only place that states the only value; None if there is none."""
    text = tokenizer.decode(ids)
    if len(targets) != 1 or text.count(targets[0]) != 1:
        return None
    first = text.index(targets[0])
    return _token_at(ids, tokenizer, first), _token_at(ids, tokenizer, first + len(targets[0]) - 1) + 1


def around(where: tuple[int, int], size: int, tokens: int) -> int:
    """Return where a passage of a size begins that has a place in its middle, or as near to it as the text allows."""
    return max(0, min((sum(where) - size) // 2, tokens - size))


def _token_at(ids: Sequence[int], tokenizer: Any, character: int) -> int:
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(tokenizer.decode(ids[: middle + 1])) > character else (middle + 1, high)
    return low


def _gone(cache: Any, tokens: int) -> list[Any]:
    """Return (K, n) bool for every layer: which units of the text are in no tier."""
    import torch

    gone = []
    for layer in cache.governed:
        stores = [layer.store] + ([layer.host.store] if layer.host is not None and layer.host.fill else [])
        mask = torch.ones(len(layer.store.held("positions")[0]), tokens + 1, dtype=torch.bool)
        for store in stores:
            positions = store.held("positions")[0].long()
            mask.scatter_(1, torch.where((positions >= 0) & (positions < tokens), positions, tokens), False)
        gone.append(mask[:, :tokens])
    return gone


def _share_gone(
    model: Any, ids: Sequence[int], replied: int, gone: Sequence[Any], where: tuple[int, int] | None
) -> float:
    """Return the share of full attention that falls on what is gone: of all, or of that to the tokens `where`."""
    import torch

    from locret.backbone.learned_sinks import attention_weights, by_kv_head
    from locret.labels.labels import observe

    first, tokens = len(ids) - replied - 1, gone[0].shape[1]
    lost, paid = list[float](), list[float]()

    def see(layer: Any) -> None:
        heads = layer.key.shape[1]
        queries = layer.query[0, :, first:-1].float().unflatten(0, (heads, -1))
        logits = queries @ layer.key[0, :, None].float().transpose(-1, -2) * layer.scaling
        if layer.softcap is not None:
            logits = layer.softcap * torch.tanh(logits / layer.softcap)
        later = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(first + 1)
        weights = attention_weights(logits.masked_fill(later, -torch.inf), by_kv_head(layer.learned_sinks, heads))
        mask = gone[len(lost)].clone()
        span = slice(*(where or (0, tokens)))
        missed = (weights[..., :tokens] * mask[:, None, None])[..., span]
        lost.append(float(missed.sum()))
        paid.append(float(weights[..., span].sum()) if where else float(weights[..., 0].numel()))

    observe(model, torch.tensor([list(ids)]), see)
    return sum(lost) / max(sum(paid), 1e-9)


def _predicted(layers: Sequence[Any]) -> float:
    """Return the share of all predicted attention that was predicted for what is gone, a mean over heads."""
    shares = []
    for layer in layers:
        held, gone = layer.ledger.masses(layer.store, None)
        shares += (gone.sum(1) / (gone + held).sum(1)).tolist()
    return fmean(shares)


def _holds(passages: Sequence[Any], where: tuple[int, int]) -> bool:
    return any(one.start <= where[0] and where[1] <= one.end for one in passages)


def roc_area(values: Sequence[float], wrong: Sequence[bool]) -> float | None:
    """Return the chance that a wrong answer has a larger value than a right one, ties for half; None without both."""
    worse = [value for value, is_wrong in zip(values, wrong, strict=True) if is_wrong]
    better = [value for value, is_wrong in zip(values, wrong, strict=True) if not is_wrong]
    if not worse or not better:
        return None
    wins = sum((one > other) + (one == other) / 2 for one in worse for other in better)
    return round(wins / len(worse) / len(better), 4)


def summary(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what some answers come to."""
    wrong = [not one["right"] for one in answers]
    gone = [one["evidence_gone"] > 0.5 for one in answers]
    return {
        "answers": len(answers),
        "right": _mean(one["right"] for one in answers),
        "evidence_gone": _mean(gone),
        "lost": _mean(one["lost"] for one in answers),
        "true": _mean(one["true"] for one in answers),
        "error": _mean(abs(one["lost"] - one["true"]) for one in answers),
        "tells_wrong": {name: roc_area([one[name] for one in answers], wrong) for name in SIGNALS},
        "tells_gone": {name: roc_area([one[name] for one in answers], gone) for name in SIGNALS},
        "flags": {name: _flag([one[name] for one in answers], wrong) for name in ("flagged", "changed")},
        "margins": {str(most): _flag([1 - one["unsure"] < most for one in answers], wrong) for most in MARGINS},
        "named": {name: _mean(one["named"][name] for one in answers) for name in ARMS},
        "again": {name: _again(answers, name) for name in ARMS},
    }


def _flag(raised: Sequence[bool], wrong: Sequence[bool]) -> dict[str, Any]:
    """Return how many wrong answers a flag is raised for, and how many right ones."""
    found = sum(flag and bad for flag, bad in zip(raised, wrong, strict=True))
    return {"wrong": sum(wrong), "found": found, "right": len(wrong) - sum(wrong), "false_alarms": sum(raised) - found}


def _again(answers: Sequence[Mapping[str, Any]], arm: str) -> dict[str, Any]:
    """Return the share of right answers after passages were read again, and how many that mended and broke."""
    return {
        "right": _mean(one["again"][arm] for one in answers),
        "mended": sum(one["again"][arm] and not one["right"] for one in answers),
        "broken": sum(one["right"] and not one["again"][arm] for one in answers),
    }


def _mean(values: Any) -> float:
    return round(fmean(map(float, values)), 4)


def calibration(answers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return bins of equally many answers by what was estimated: mean estimate, mean truth, and how many."""
    order = sorted(answers, key=lambda one: one["lost"])
    edges = [len(order) * step // BINS for step in range(BINS + 1)]
    parts = [order[start:end] for start, end in zip(edges, edges[1:], strict=False) if end > start]
    return [
        {"lost": _mean(a["lost"] for a in p), "true": _mean(a["true"] for a in p), "answers": len(p)} for p in parts
    ]


def correlation(answers: Sequence[Mapping[str, Any]]) -> float | None:
    """Return Pearson's correlation of estimated and true lost attention; None where one does not vary."""
    from statistics import StatisticsError
    from statistics import correlation as pearson

    try:
        return round(pearson([one["lost"] for one in answers], [one["true"] for one in answers]), 4)
    except StatisticsError:
        return None


def measure(options: EvidenceOptions) -> Iterator[dict[str, Any]]:
    """Yield the record after every task, length and budget, with what has been asked so far.

    Raises:
        ValueError: If something is missing or does not match.
    """
    import torch

    from locret import LongContextModel

    torch.set_num_threads(1)
    first = LongContextModel.from_pretrained(options.model, heads=options.heads, budget=options.budgets[0])
    tasks, cells = {name: generated(name) for name in options.tasks}, options.cells()
    samples = {
        (name, tokens): made_samples(tasks[name], first.tokenizer, tokens, options.samples, options.seed)
        for name, tokens, _ in cells
    }
    rows, every = [], list[dict[str, Any]]()
    with tqdm(total=len(cells) * options.samples, desc="asking", disable=None) as bar:
        for name, tokens, budget in cells:
            policy = options.policy(budget)
            lm = LongContextModel(first.model, first.tokenizer, first.scorer, policy)
            lm._knows_little = False  # what the embedded backbone is for is what is asked here
            measuring, found = Measuring(lm, options.seed), []
            for sample in samples[name, tokens]:
                found.append(measuring.ask(tasks[name], sample))
                bar.update()
            answers = [one for one in found if one is not None]
            if not answers:
                raise ValueError(f"--tasks {name}: its answers are no one value that stands once in the text; drop it")
            every += answers
            rows.append({"task": name, "tokens": tokens, "budget": budget, **summary(answers)})
            yield {
                "samples": options.samples,
                "seed": options.seed,
                "ledger": options.ledger,
                "policy": policy.to_dict(),
                "all": {**summary(every), "correlation": correlation(every), "calibration": calibration(every)},
                "rows": rows,
                "points": [
                    [round(one["lost"], 4), round(one["true"], 4), one["right"], round(1 - one["unsure"], 4)]
                    for one in every
                ],
            }


def tables(record: Mapping[str, Any]) -> str:
    """Return the record as tables for people."""
    every = record["all"]
    parts = [_FIRST, ""]
    titles = ["task", "tokens", "budget", "lost", "true", "right", *(f"again: {name}" for name in ARMS)]
    parts += markdown(titles, [_row(row) for row in [*record["rows"], every]])
    parts += ["", "What tells a wrong answer, and that the evidence is gone (area under the ROC curve):", ""]
    shown = [
        [title, *(_area(every[which][name]) for which in ("tells_wrong", "tells_gone"))]
        for name, title in SIGNALS.items()
    ]
    parts += markdown(["signal", "answer is wrong", "evidence is gone"], shown)
    parts += ["", "Flags, and what is read again:", ""]
    flags = [
        [name, f"{one['found']} of {one['wrong']}", f"{one['false_alarms']} of {one['right']}"]
        for name, one in (
            *every["flags"].items(),
            *((f"least margin below {most}", one) for most, one in every["margins"].items()),
        )
    ]
    parts += [*markdown(["flag", "wrong answers found", "false alarms"], flags), ""]
    again = [
        [title, f"{100 * every['named'][name]:.0f}", *(f"{every['again'][name][key]}" for key in ("mended", "broken"))]
        for name, title in ARMS.items()
    ]
    parts += markdown(["passages", "hold the evidence (%)", "answers mended", "broken"], again)
    return "\n".join(parts) + "\n"


def _check_output(output: str) -> None:
    """Refuse files that hold something else than such a record, its tables or a page with a place for them.

    Raises:
        ValueError: Naming the file.
    """
    record, page, picture = (Path(f"{output}.{ending}") for ending in ("json", "md", "png"))
    try:
        text = page.read_text(encoding="utf-8") if page.is_file() else ""
    except UnicodeDecodeError:
        text = "no text of ours"
    begin = text.find(BEGIN)
    own = {
        page: not text or text.startswith(_FIRST) or -1 < begin < text.find(END),
        record: not record.exists() or (record.is_file() and _is_record(record)),
        picture: not picture.exists() or (picture.is_file() and record.is_file()),
    }
    for path, is_own in own.items():
        if not is_own or path.is_dir():
            raise ValueError(f"--output {output}: {path} holds something else than this command writes; choose another")


def _is_record(path: Path) -> bool:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and {"ledger", "points", "all", "rows"} <= found.keys()


def on_page(page: str, measured: str) -> str:
    """Return a page with other tables in their place, which two comments mark; the tables alone if it has none."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    return f"{before}{begin}\n{measured}{end}{after}" if end else measured


def _row(row: Mapping[str, Any]) -> list[str]:
    head = [row["task"], f"{row['tokens']:,}", str(row["budget"])] if "task" in row else ["all", "", ""]
    shares = [row["lost"], row["true"], row["right"], *(row["again"][name]["right"] for name in ARMS)]
    return [*head, *(f"{100 * share:.0f}" for share in shares)]


def _area(area: float | None) -> str:
    return "" if area is None else f"{area:.2f}"


def command(argv: Sequence[str] | None = None) -> int:
    """Measure, and write or print the record; return 0.

    Raises:
        ValueError: For what the user must change.
        OSError: If a file cannot be written.
    """
    title = "Does an answer know what it may have forgotten?"
    (options,), _ = parse_options("locret.infer.evaluation.evidence", title, [EvidenceOptions], argv)
    with warnings_as_lines("locret.infer.evaluation.evidence", quiet=False):
        draws = options.output is not None and can_draw("the picture")
    for record in measure(options):
        if options.output is not None:
            write_text(f"{options.output}.json", json.dumps(record, indent=1) + "\n", parents=True)
            page = Path(f"{options.output}.md")
            write_text(
                page, on_page(page.read_text(encoding="utf-8") if page.is_file() else "", tables(record)), parents=True
            )
            if draws:
                from locret.infer.evaluation import evidence_figure

                evidence_figure.draw(record, f"{options.output}.png")
    if options.json:
        print_json(record)
    elif options.output is None:
        sys.stdout.write(tables(record))
    else:
        sys.stdout.write("".join(f"{options.output}.{ending}\n" for ending in ("json", "md", *(["png"] * draws))))
    return 0


if __name__ == "__main__":
    from locret.cli.command import run

    run(command, prog="locret.infer.evaluation.evidence")
