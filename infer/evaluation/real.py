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

import copy
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locret.base.files import LOCK, locked, write_text
from locret.base.tables import markdown
from locret.cli.command import parse_options, print_json
from locret.conversation.evidence import Likelihood, likelihood, likelihood_of, policy_of_share
from locret.conversation.text import encode
from locret.data import real
from locret.infer.infer_options import PlacedModelOptions
from locret.loading.options import ScorerOptions

if TYPE_CHECKING:
    from torch import Tensor

    from locret import LongContextModel

HEADS, FULL, NOTHING, ORACLE = "locret", "full", "nothing", "oracle_agnostic"
METHODS = (
    f"{FULL},{NOTHING},{HEADS}+head_shares,{HEADS},{HEADS}+recall,random:sinks=4+head_shares,key_difference+head_shares,"
    "expected_attention+head_shares,random:sinks=4,random,h2o,expected_attention,key_difference,tova,snapkv,streaming,"
    f"{ORACLE}"
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
    tokens: str | int | list[int] = "1024"
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
        if self.suite != "real":
            raise ValueError(f"--suite {self.suite} is unknown; choose real")
        for name in self.names("sets"):
            if name not in real.SETS:
                raise ValueError(f"--sets {name} is unknown; choose one of {', '.join(real.SETS)}")
        if not all(part.strip("+") for part in self.names("methods")):
            raise ValueError("--methods is empty; name one, such as locret")
        if not all(0 < share <= 100 for share in self.shares()):
            raise ValueError(f"--keep {self.keep} is not a share of a text; give percents such as 25,12.5")
        if not all(length >= 64 for length in self.lengths()):
            raise ValueError(f"--tokens {self.tokens} is too short for a piece of a text; give 64 or more")
        for name in ("questions", "pieces", "chunk_size", "local_len"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} {value} is too small; give 1 or more")

    def names(self, field: str) -> list[str]:
        """Return the parts of `methods`, `sets`, `keep` or `tokens`."""
        given = getattr(self, field)
        return [str(part).strip() for part in (given if isinstance(given, list) else str(given).split(",")) if part]

    def shares(self) -> list[float]:
        """Return the shares, in percent.

        Raises:
            ValueError: If one is no number.
        """
        return [float(part) for part in self.names("keep")]

    def lengths(self) -> list[int]:
        """Return the lengths of pieces, in tokens.

        Raises:
            ValueError: If one is no number.
        """
        return [int(part) for part in self.names("tokens")]


@dataclass(frozen=True)
class Cell:
    """One method, at one share, on pieces of one length."""

    method: str
    share: float | None
    """Percent; None where nothing is evicted."""
    tokens: int


def cells(options: RealOptions) -> Iterator[Cell]:
    """Yield what is measured, cheapest first within a length."""
    for tokens in options.lengths():
        for method in options.names("methods"):
            for share in [None] if method in (FULL, NOTHING) else options.shares():
                yield Cell(method, share, tokens)


def _cell_of(record: dict[str, Any]) -> Cell:
    return Cell(record["method"], record["share"], record["tokens"])


def measure(options: RealOptions, model: PlacedModelOptions, scorer: ScorerOptions) -> list[dict[str, Any]]:
    """Measure all cells that the record lacks, and return the records of all answers.

    Raises:
        ValueError: If the folder holds a run with other options, or a method cannot be made.
        OSError: If it cannot be written.
    """
    from tqdm import tqdm

    from locret import LongContextModel

    folder = Path(options.output)
    settings = {
        **asdict(replace(options, output="", overwrite=False, json=False, quiet=False)),
        **_source(model, scorer),
    }
    records = _begun(folder, settings, options.overwrite)
    done = {_cell_of(one) for one in records if one["last"]}
    records = [one for one in records if _cell_of(one) in done]
    write_text(folder / RECORD, "".join(json.dumps(one) + "\n" for one in records))
    waiting = [cell for cell in cells(options) if cell not in done]
    if not waiting:
        return records
    lm = LongContextModel.from_pretrained(
        model.model,
        scorer="random",
        revision=model.revision,
        dtype=model.dtype,
        device=model.device,
        gguf_file=model.gguf_file,
    )
    with tqdm(total=len(waiting), unit="cell", disable=True if options.quiet else None) as bar:
        for cell in waiting:
            bar.set_description(f"{cell.method} {'' if cell.share is None else f'{cell.share:g} %'} of {cell.tokens:,}")
            found = list(_cell(lm, cell, options, scorer))
            found[-1]["last"] = True
            with (folder / RECORD).open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(one) + "\n" for one in found)
            records += found
            bar.update()
    return records


def _source(model: PlacedModelOptions, scorer: ScorerOptions) -> dict[str, Any]:
    return {"model": model.model, "revision": model.revision, "dtype": model.dtype, "heads": scorer.heads}


def _begun(folder: Path, settings: dict[str, Any], overwrite: bool) -> list[dict[str, Any]]:
    """Return what a folder holds of this run; settle what it is about.

    Raises:
        ValueError: If it holds another run.
    """
    config = folder / "config.json"
    if config.is_file() and not overwrite:
        found = json.loads(config.read_text(encoding="utf-8"))
        known = json.loads(json.dumps(settings))
        # More methods and shares go on with a run; anything else is another one.
        different = [
            name for name in known if name not in ("methods", "keep", "tokens") and found.get(name) != known[name]
        ]
        if different:
            raise ValueError(
                f"--output {folder} holds a run with {different[0]}={found.get(different[0])!r}, not "
                f"{known[different[0]]!r}; choose another folder, or add --overwrite"
            )
    elif not config.is_file() and any(path.name != LOCK for path in folder.iterdir()):
        raise ValueError(f"--output {folder} holds other files; choose another folder")
    write_text(config, json.dumps(settings, indent=1) + "\n", parents=True)
    record = folder / RECORD
    if overwrite or not record.is_file():
        return []
    lines = record.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def _cell(lm: LongContextModel, cell: Cell, options: RealOptions, scorer: ScorerOptions) -> Iterator[dict[str, Any]]:
    """Yield a record of every answer."""
    for name in options.names("sets"):
        for number, piece in enumerate(real.pieces(name, lm.tokenizer, cell.tokens)[: options.pieces]):
            asked, started = piece.asked[: options.questions], time.perf_counter()
            score, held = _read(lm, cell, piece, asked, options, scorer)
            seconds = time.perf_counter() - started
            for index, one in enumerate(asked):
                nats, hits, length = score(one)
                yield {
                    "method": cell.method,
                    "share": cell.share,
                    "tokens": cell.tokens,
                    "set": name,
                    "piece": number,
                    "question": index,
                    "nats": nats,
                    "hits": hits,
                    "answer_tokens": length,
                    "read_seconds": seconds,
                    "last": False,
                    **held,
                }


def _read(
    lm: LongContextModel,
    cell: Cell,
    piece: real.Piece,
    asked: Sequence[real.Asked],
    options: RealOptions,
    scorer: ScorerOptions,
) -> tuple[Callable[[real.Asked], Likelihood], dict[str, Any]]:
    """Read a piece; return what scores an answer about it, and what is held."""
    if cell.share is not None:
        context = _with_method(lm, cell, piece, asked, options, scorer).read(piece.text, progress=False)
        memory = context.memory()
        held = {"units": memory.units, "cache_bytes": memory.actual}
        return (lambda one: likelihood(context, one.question, one.answer)), held
    from transformers import DynamicCache

    from locret.infer.evaluation.answering import bytes_of

    cache, ids = (DynamicCache(), _opening(lm, piece)) if cell.method == FULL else (None, [])
    if cache is not None:
        likelihood_of(lm.model, ids, 1, cache)  # reads it; its last token's likelihood is of no interest

    def score(one: real.Asked) -> Likelihood:
        answer = encode(lm.tokenizer, one.answer)
        turn = _turn(lm, one.question, alone=cache is None) + answer
        return likelihood_of(lm.model, turn, len(answer), copy.deepcopy(cache))

    return score, {"units": len(ids), "cache_bytes": 0 if cache is None else bytes_of(cache)}


def _with_method(
    lm: LongContextModel,
    cell: Cell,
    piece: real.Piece,
    asked: Sequence[real.Asked],
    options: RealOptions,
    scorer: ScorerOptions,
) -> LongContextModel:
    """Return the model with a method's scorer and policy."""
    from locret import LongContextModel, scorers
    from locret.base import method_spec
    from locret.scorers.oracle import OracleScorer
    from locret.scorers.retaining_heads import recommended_shares

    spec = method_spec.parse(cell.method, "--methods")
    if spec.name == ORACLE:
        chosen: Any = OracleScorer(labels=_labels(lm, piece, asked))
    elif spec.name == HEADS:
        if scorer.heads is None:
            raise ValueError(f"--methods {cell.method} needs trained heads; give --heads, or leave it out")
        chosen = _heads(scorer)
    else:
        chosen = scorers.make(spec, {})
    changes = {key: value for key, value in spec.changes.items() if key != "positions"}
    if changes.get("host_budget"):
        changes |= {"host_budget": max(RECALLED, round(piece.tokens * TIER_SHARE / 100)), "recall": RECALLED}
    if changes.get("head_budgets") == "shares" and spec.name != HEADS:
        changes["head_shares"] = recommended_shares(_heads(scorer).config, "head_shares")  # what scores alone are worth
    kept = policy_of_share(
        piece.tokens,
        float(cell.share or 0) / 100,
        chunk_size=options.chunk_size,
        local_len=options.local_len,
        **changes,
    )
    return LongContextModel(lm.model, lm.tokenizer, chosen, kept)


_LOADED: dict[str, Any] = {}


def _heads(scorer: ScorerOptions) -> Any:
    from locret.scorers.chosen import load_scorer

    if str(scorer.heads) not in _LOADED:
        _LOADED[str(scorer.heads)] = load_scorer(scorer)[0]
    return _LOADED[str(scorer.heads)]


def _opening(lm: LongContextModel, piece: real.Piece) -> list[int]:
    from locret.conversation.text import open_document

    return [token for block in lm.tokens(open_document(piece.text, "piece")) for token in block]


def _turn(lm: LongContextModel, question: str, *, alone: bool = False) -> list[int]:
    """Return the tokens of a question that follows a text, or of one that is asked without any."""
    mark = "LocretQuestion"
    written = lm.tokenizer.apply_chat_template(
        [{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=True
    )
    before, after = written.split(mark)
    return encode(lm.tokenizer, f"{before}{question}{after}" if alone else f"\n\n{question}{after}")


def _labels(lm: LongContextModel, piece: real.Piece, asked: Sequence[real.Asked]) -> Tensor:
    import torch

    from locret.labels.many_answers import labels_of_answers

    pairs = [(torch.tensor(_turn(lm, one.question)), torch.tensor(encode(lm.tokenizer, one.answer))) for one in asked]
    return labels_of_answers(lm.model, torch.tensor(_opening(lm, piece)), pairs, "log_attention", True)


def summary(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per method, share, length and set, and one over all sets: nats and hits per token of an answer."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for one in records:
        for name in (one["set"], "all"):
            groups.setdefault((one["method"], one["share"], one["tokens"], name), []).append(one)
    rows = []
    for (method, share, tokens, name), found in groups.items():
        count = sum(one["answer_tokens"] for one in found)
        nats = sum(one["nats"] for one in found) / count
        # The standard error of a ratio of sums: answers are drawn, not tokens.
        spread = sum((one["nats"] - nats * one["answer_tokens"]) ** 2 for one in found)
        rows.append(
            {
                "method": method,
                "share": share,
                "tokens": tokens,
                "set": name,
                "answers": len(found),
                "nats": nats,
                "error": math.sqrt(spread) / count,
                "hits": 100 * sum(one["hits"] for one in found) / count,
                "units": sum(one["units"] for one in found) / len(found),
                "cache_bytes": max(one["cache_bytes"] for one in found),
            }
        )
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
    for tokens, name in sorted(
        {(row["tokens"], row["set"]) for row in rows}, key=lambda one: (one[0], one[1] != "all")
    ):
        own = [row for row in rows if (row["tokens"], row["set"]) == (tokens, name)]
        shares = sorted({row["share"] for row in own if row["share"] is not None}, reverse=True)
        ends = {row["method"]: row for row in own if row["share"] is None}
        said = ", ".join(f"{m} {r['nats']:.2f} ({r['hits']:.0f} % hits)" for m, r in ends.items())
        answers = max(row["answers"] for row in own)
        lines += [f"**{name}, pieces of {tokens:,} tokens**, {answers} answers; {said}", ""]
        body = []
        for method in dict.fromkeys(row["method"] for row in own if row["share"] is not None):
            cell = [method]
            for share in shares:
                found = [row for row in own if (row["method"], row["share"]) == (method, share)]
                if not found:
                    cell.append("")
                    continue
                won = recovered(own, found[0])
                cell.append(
                    f"{found[0]['nats']:.2f} ± {found[0]['error']:.2f}" + ("" if won is None else f" ({won:.0f} %)")
                )
            body.append(cell)
        lines += [*markdown(["kept", *(f"{share:g} %" for share in shares)], body), ""]
    return "\n".join(lines)


def command(argv: Sequence[str]) -> int:
    """Run the suite and return its exit code.

    Raises:
        ValueError: For anything the user must change.
        OSError: If a Hub or a disk fails.
    """
    (options, model, scorer), _ = parse_options(
        "locret-eval",
        "Measure how likely right answers are from what was kept of real texts.",
        [RealOptions, PlacedModelOptions, ScorerOptions],
        argv,
    )
    from locret.scorers.chosen import chosen_heads

    scorer = replace(scorer, heads=chosen_heads(scorer.heads, model.model))
    folder = Path(os.path.expanduser(options.output))
    with locked(folder, f"--output {options.output}"):
        rows = summary(measure(options, model, scorer))
        write_text(folder / RESULTS, json.dumps({"source": _source(model, scorer), "rows": rows}, indent=1) + "\n")
        write_text(folder / TABLE, tables(rows))
    if options.json:
        print_json({"output": options.output, "rows": rows})
    else:
        sys.stdout.write(tables(rows))
    return 0
