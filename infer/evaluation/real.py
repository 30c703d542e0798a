"""`locret-eval --suite real`: how likely the right answers to people's questions are, from what was kept of real texts.

    locret-eval --suite real --model smollm2 --heads checkpoints/smollm2-heads --output runs/real

A text is read before any question about it is known; then each question is asked of a copy of what was kept, and the
answer that stands in the text is scored. Likelihood tells methods apart where a model is too small to write the answer:
everything kept and nothing read are two to three nats per token apart. All rows hold the same number of units.

Protocol: a text is cut into pieces of `--tokens` tokens. A share kept of S percent means that S percent of a piece's
tokens stay in every KV head once it is read, its newest ones included. Heads may be trained on the first 60 % of the
files with questions, as those of recipes/train/smollm2.yaml are. Only what stands behind that is asked here, and all of
`postgres_glossary`, of which nothing is ever trained on.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from locret import LongContextModel, scorers
from locret.base import method_spec
from locret.base.fields import Range, Refusal, check_ranges
from locret.base.files import locked, write_text
from locret.base.tables import markdown
from locret.cache.limits import check_pair
from locret.cli.command import parse_options, print_json, warnings_as_lines
from locret.conversation.document import encode, open_document
from locret.conversation.evidence import Likelihood, likelihood, likelihood_of, policy_of_share
from locret.conversation.turns import Transcript
from locret.data import real
from locret.infer.evaluation.eval_options import Numbers, listed, numbers, words
from locret.infer.evaluation.records import CONFIGURATION, check_output
from locret.infer.infer_options import ModelOptions
from locret.labels.labels import labels_of_answers
from locret.loading.options import ScorerOptions
from locret.policy.planned_bytes import share_of
from locret.policy.resolve import check_effect
from locret.scorers.chosen import chosen_heads, load_scorer
from locret.scorers.oracle import OracleScorer
from locret.scorers.retaining_heads import recommended_shares

HEADS, FULL, NOTHING, ORACLE = "locret", "full", "nothing", "oracle_agnostic"
_CALLED = {"oracle": ORACLE, "retaining_heads": HEADS}
_WHERE = ("revision", "dtype", "device", "adapter", "trust_remote_code", "attn_implementation")
"""How the backbone is loaded, besides what its weights become."""
METHODS = (
    f"{FULL},{NOTHING},{HEADS}+head_shares+spaced,{HEADS}+head_shares+spaced+recall,"
    f"{HEADS}+head_shares+spaced+diverse,expected_attention+head_shares+spaced,key_difference+head_shares+spaced,"
    f"random:sinks=4+head_shares+spaced,{HEADS},{HEADS}+recall,random:sinks=4,random,h2o,expected_attention,"
    f"key_difference,tova,snapkv,streaming,{ORACLE}"
)
TIER_SHARE, RECALLED = 25.0, 16
"""Of a text's tokens, the share that the second tier of `+recall` holds, in percent; and what each query recalls."""
RECORD, RESULTS, TABLE = "answers.jsonl", "results.json", "table.md"


@dataclass(frozen=True, kw_only=True)
class RealOptions:
    """What is asked, of which texts, and what stays of them."""

    suite: str
    """real."""
    output: str
    """Folder for the record of every answer, the results and their table; a run in it with these options goes on."""
    methods: str | list[str] = METHODS
    """Rows of the table: full, nothing, locret (--heads), any scorer, and oracle_agnostic (what answers look at)."""
    sets: str | list[str] = ",".join(real.SETS)
    """Sets of questions."""
    keep: str | list[float] = "50,25,12.5,6.25,3.1"
    """Shares of a text's tokens that stay in every KV head, in percent."""
    tokens: Numbers = "1024"
    """Lengths of the pieces that texts are cut into."""
    questions: int | None = None
    """Most questions about a piece; all if none."""
    pieces: int | None = None
    """Most pieces of a set; all if none."""
    chunk_size: int = 256
    """Tokens per forward pass."""
    local_len: int = 32
    """Newest tokens that always stay; at most an eighth of what stays."""
    overwrite: bool = False
    """Delete an earlier run in the output folder first."""
    json: bool = False
    """Print the results as one JSON object."""
    quiet: bool = False
    """Show no progress."""

    def __post_init__(self) -> None:
        for name in words(self.sets, "--sets"):
            if name not in real.SETS:
                raise ValueError(f"--sets {name} is unknown; choose one of {', '.join(real.SETS)}")
        self.shares()
        numbers(self.tokens, "--tokens", 64)
        check_ranges(self, dict.fromkeys(("questions", "pieces", "chunk_size", "local_len"), Range(1)))

    def shares(self) -> list[float]:
        return listed(self.keep, _percent, "--keep", "25,12.5, or 0.25%")

    def cells(self) -> list[Cell]:
        """Return what is measured, cheapest first within a length."""
        return [
            Cell(method, share, tokens)
            for tokens in numbers(self.tokens, "--tokens")
            for method in words(self.methods, "--methods")
            for share in ([None] if method in (FULL, NOTHING) else self.shares())
        ]


def _percent(text: str) -> float:
    found = float(100 * share_of(f"{text.removesuffix('%')}%"))
    if found <= 1 and not text.endswith("%"):
        raise ValueError(f"{text} could be a share or a percentage")
    return found


class Cell(NamedTuple):
    """One method, at one share, on pieces of one length."""

    method: str
    share: float | None
    """Percent; None where nothing is evicted."""
    tokens: int


def measure(options: RealOptions, model: ModelOptions, scorer: ScorerOptions) -> list[dict[str, Any]]:
    """Measure all cells that the record lacks, and return the records of all answers."""
    folder = Path(options.output)
    # There may be more methods, shares and lengths when a run goes on.
    free = ("methods", "keep", "tokens", "output", "overwrite", "json", "quiet")
    given = {name: value for name, value in asdict(options).items() if name not in free}
    settings, file = {**given, **_source(model, scorer)}, folder / RECORD
    check_output(str(folder), settings, resume=True, overwrite=options.overwrite)
    write_text(folder / CONFIGURATION, json.dumps(settings, indent=1) + "\n", parents=True)
    lines = [] if options.overwrite or not file.is_file() else file.read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines if line.endswith("}")]
    done = {_cell_of(one) for one in records if one["last"]}
    records = [one for one in records if _cell_of(one) in done]
    write_text(file, "".join(json.dumps(one) + "\n" for one in records))
    waiting = [cell for cell in options.cells() if cell not in done]
    if not waiting:
        return records
    where: dict[str, Any] = {name: getattr(model, name) for name in _WHERE} | model.given()
    reading = _Reading(LongContextModel.from_pretrained(model.model, scorer="random", **where), options, scorer)
    with tqdm(total=len(waiting), unit="cell", disable=True if options.quiet else None) as bar:
        for cell in waiting:
            bar.set_description(f"{cell.method} {'' if cell.share is None else f'{cell.share:g} %'} of {cell.tokens:,}")
            found = list[dict[str, Any]]()
            for answer in reading.answers(cell):
                found.append(answer)
                bar.set_postfix_str(f"{len(found)} answers")
            if not found:
                raise ValueError(f"no piece of {cell.tokens} tokens answers a question of its set; give more --tokens")
            found[-1]["last"] = True
            with file.open("a", encoding="utf-8") as stream:
                stream.writelines(json.dumps(one) + "\n" for one in found)
            records += found
            bar.update()
    return records


def _source(model: ModelOptions, scorer: ScorerOptions) -> dict[str, Any]:
    how = {"adapter": model.adapter} if model.adapter else {}
    plain = {"model": model.model, "revision": model.revision, "dtype": model.dtype, "heads": scorer.heads}
    return plain | how | model.given()


def _cell_of(record: dict[str, Any]) -> Cell:
    return Cell(record["method"], record["share"], record["tokens"])


@dataclass
class _Reading:
    """A backbone that reads pieces by every method."""

    lm: LongContextModel
    options: RealOptions
    scorer: ScorerOptions

    @cached_property
    def heads(self) -> Any:
        return load_scorer(self.scorer)[0]

    def answers(self, cell: Cell) -> Iterator[dict[str, Any]]:
        for name in words(self.options.sets, "--sets"):
            pieces = real.pieces(name, self.lm.tokenizer, cell.tokens)[: self.options.pieces]
            for number, piece in enumerate(pieces):
                asked, started = piece.asked[: self.options.questions], time.perf_counter()
                score, held = self.read(cell, piece, asked)
                about = {**cell._asdict(), "set": name, "piece": number, "read_seconds": time.perf_counter() - started}
                for index, one in enumerate(asked):
                    nats, hits, length = score(one)
                    answer = {"question": index, "nats": nats, "hits": hits, "answer_tokens": length}
                    yield {**about, **answer, "last": False, **held}

    def read(
        self, cell: Cell, piece: real.Piece, asked: Sequence[real.Asked]
    ) -> tuple[Callable[[real.Asked], Likelihood], dict[str, Any]]:
        """Read a piece; return what scores an answer about it, and what is held."""
        if cell.method == NOTHING:
            return self.alone, {"units": 0, "cache_bytes": 0}
        context = self.by(cell, piece, asked).read(piece.text, progress=False)
        memory = context.memory()
        held = {"units": memory.units, "cache_bytes": memory.actual}
        return (lambda one: likelihood(context, one.question, one.answer)), held

    def alone(self, one: real.Asked) -> Likelihood:
        """Score an answer to a question that is asked without any text."""
        before, behind = Transcript(self.lm.tokenizer, "chat").around(one.question)
        turn, answer = (encode(self.lm.tokenizer, text) for text in (before + behind.lstrip(), one.answer))
        return likelihood_of(self.lm.model, turn + answer, len(answer))

    @cached_property
    def whole(self) -> LongContextModel:
        """The model that keeps every unit."""
        return LongContextModel(self.lm.model, self.lm.tokenizer, FULL)

    def by(self, cell: Cell, piece: real.Piece, asked: Sequence[real.Asked]) -> LongContextModel:
        """Return the model with a method's scorer and policy."""
        if cell.method == FULL:
            return self.whole
        spec = method_spec.parse(cell.method, "--methods")
        if spec.name == ORACLE:
            chosen: Any = OracleScorer(labels=self.labels(piece, asked))
        elif spec.name != HEADS:
            chosen = scorers.make(spec, {})
        else:
            chosen = self.heads
        changes = dict(spec.changes)
        if changes.get("host_budget"):
            tier = {"host_budget": max(RECALLED, round(piece.tokens * TIER_SHARE / 100)), "recall": RECALLED}
            given = {name for modifier in spec.modifiers for name in modifier.options}
            changes |= {name: number for name, number in tier.items() if name not in given}
        if changes.get("head_budgets") == "shares" and self.scorer.heads is not None:
            changes["head_shares"] = recommended_shares(self.heads.config)  # all scorers in the same ones
        own = {"chunk_size": self.options.chunk_size, "local_len": self.options.local_len, **changes}
        kept = policy_of_share(piece.tokens, float(cell.share or 0) / 100, **own)
        return LongContextModel(self.lm.model, self.lm.tokenizer, chosen, kept)

    def labels(self, piece: real.Piece, asked: Sequence[real.Asked]) -> Tensor:
        """Return the labels of all right answers together; the end of a text is read with each question."""
        context, tokenizer = self.whole.read(piece.text, progress=False), self.lm.tokenizer
        text = [token for block in self.lm.tokens(open_document(piece.text, "piece")) for token in block]
        pairs = [(context.question_ids(one.question)[0], torch.tensor(encode(tokenizer, one.answer))) for one in asked]
        return labels_of_answers(self.lm.model, torch.tensor(text), pairs, "log_attention", True)


def summary(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per method, share, length and set, and one over all sets: nats and hits per token of an answer."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for one in records:
        for name in (one["set"], "all"):
            groups.setdefault((one["method"], one["share"], one["tokens"], name), []).append(one)
    rows = []
    for group, found in groups.items():
        count = sum(one["answer_tokens"] for one in found)
        nats = sum(one["nats"] for one in found) / count
        # The standard error of a ratio of sums: answers are drawn, not tokens.
        spread = sum((one["nats"] - nats * one["answer_tokens"]) ** 2 for one in found)
        measured = {"answers": len(found), "nats": nats, "error": math.sqrt(spread) / count}
        measured["hits"] = 100 * sum(one["hits"] for one in found) / count
        held = {"units": sum(one["units"] for one in found) / len(found)}
        held["cache_bytes"] = max(one["cache_bytes"] for one in found)
        rows.append(dict(zip(("method", "share", "tokens", "set"), group, strict=True)) | measured | held)
    return rows


def recovered(rows: Sequence[dict[str, Any]], row: dict[str, Any]) -> float | None:
    """Return how much of the distance from nothing to everything a row goes, in percent; None if an end is unknown."""
    ends = {
        one["method"]: one["nats"]
        for one in rows
        if one["share"] is None and (one["tokens"], one["set"]) == (row["tokens"], row["set"])
    }
    if not {FULL, NOTHING} <= set(ends):
        return None
    return 100 * (ends[NOTHING] - row["nats"]) / (ends[NOTHING] - ends[FULL])


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """Return the page of a run: for each length and set a row per method, a column per share."""
    lines: list[str] = []
    places = {(row["tokens"], row["set"]) for row in rows}
    for tokens, name in sorted(places, key=lambda one: (one[0], one[1] != "all")):
        own = [row for row in rows if (row["tokens"], row["set"]) == (tokens, name)]
        ends = ", ".join(f"{r['method']} {r['nats']:.2f} ({r['hits']:.0f} % hits)" for r in own if r["share"] is None)
        answers = max(row["answers"] for row in own)
        lines += [f"**{name}, pieces of {tokens:,} tokens**, {answers} answers; {ends}", ""]
        bounded = {(row["method"], row["share"]): row for row in own if row["share"] is not None}
        shares = sorted({share for _, share in bounded}, reverse=True)
        body = [
            [method, *(_cell_text(own, bounded.get((method, share))) for share in shares)]
            for method in dict.fromkeys(method for method, _ in bounded)
        ]
        lines += [*markdown(["kept", *(f"{share:g} %" for share in shares)], body), ""]
    return "\n".join(lines)


def _cell_text(rows: Sequence[dict[str, Any]], row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    won = recovered(rows, row)
    return f"{row['nats']:.2f} ± {row['error']:.2f}" + ("" if won is None else f" ({won:.0f} %)")


def command(argv: Sequence[str]) -> int:
    (options, model, scorer), _ = parse_options(
        "locret-eval",
        "Measure how likely right answers are from what was kept of real texts.",
        [RealOptions, ModelOptions, ScorerOptions],
        argv,
    )
    for name, value in {"scorer": scorer.scorer, "method": scorer.method}.items():
        if value is not None:
            raise Refusal(name, value, "is not for --suite real, which reads in one process by --methods; leave it out")
    # Whatever the methods are, so that more may follow, and shares are the same for all.
    scorer = replace(scorer, heads=chosen_heads(scorer.heads, model, usual=True))
    for method in words(options.methods, "--methods"):
        # What cannot be is refused before a model is loaded and the output folder is this run's.
        spec = method_spec.parse(method, "--methods")
        if spec.name == HEADS and scorer.heads is None:
            raise ValueError(f"--methods {method} needs trained heads; give --heads, or leave it out")
        if (spec.name in (HEADS, ORACLE) and spec.options) or (spec.name in (FULL, NOTHING) and method != spec.name):
            raise ValueError(f"--methods {method}: {spec.name} has no options here; write {spec.name}")
        if spec.name in _CALLED:
            raise ValueError(f"--methods {method} is called {_CALLED[spec.name]} here")
        policy = policy_of_share(1024, 0.5, **spec.changes)
        check_effect(spec.changes, policy, ())
        if spec.name not in (FULL, NOTHING, HEADS, ORACLE):
            check_pair(scorers.make(spec, {}), policy)
    folder = Path(os.path.expanduser(options.output))
    with locked(folder, f"--output {options.output}"):
        with warnings_as_lines("locret-eval", quiet=options.quiet):
            rows = summary(measure(options, model, scorer))
        write_text(folder / RESULTS, json.dumps({"source": _source(model, scorer), "rows": rows}, indent=1) + "\n")
        write_text(folder / TABLE, tables(rows))
    if options.json:
        print_json({"output": options.output, "rows": rows})
    else:
        sys.stdout.write(tables(rows))
    return 0
