"""A demonstration in three minutes on a CPU: a real model reads a real text, and is asked about it from what was kept.

    locret demo

SmolLM2-135M-Instruct reads a page of SQLite's manual three times: with everything kept, with retaining heads, and with
the newest units only, in the same bytes. Each answers the same questions, which were unknown while it read. Then the
text is drawn with kept words dark and forgotten ones pale.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locret.base.fields import check_threads
from locret.cli.command import parse_options, print_json, run

if TYPE_CHECKING:
    from locret import Context, LongContextModel

MODEL, HEADS, TEXT = "smollm2", "checkpoints/smollm2-heads", "recipes/infer/sqlite_limits.txt"
QUESTIONS = {
    "What is the default maximum depth of an expression tree?": "1000",
    "What is the default maximum number of terms in a compound SELECT statement?": "500",
    "What is the default maximum trigger recursion depth?": "1000",
    "What is the theoretical maximum number of rows in a table?": "264|1844674",
    "What is the maximum page size?": "65536",
    "When was this page last modified?": "2022-01-20",
    "Which interface lowers limits at run-time?": "sqlite3_limit",
}
"""What is asked, and what a right answer holds: of twenty questions that were tried, all that the model answers with
everything kept."""
LONGEST = 28
"""Tokens of an answer."""


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """What the demonstration reads, and how much of it stays."""

    model: str = MODEL
    """Backbone."""
    heads: str = HEADS
    """Its retaining heads."""
    text: str = TEXT
    """Text to read."""
    question: list[str] | None = None
    """What to ask of another text; --question TEXT for each."""
    keep: float = 25.0
    """Share of the text's tokens that stays in every KV head, in percent."""
    output: str = "runs/demo"
    """Folder for the drawn text, kept.html and kept.png; those of an earlier demonstration are replaced."""
    threads: int | None = None
    """CPU threads; those that PyTorch takes if none."""
    json: bool = False
    """Print one JSON object at the end."""

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 100:
            raise ValueError(f"--keep {self.keep:g} is not a share of a text; give percents such as 25")
        if self.text != TEXT and not self.question:
            raise ValueError(f"--text {self.text} needs questions of its own; add --question TEXT for each")
        if self.threads is not None:
            if self.threads < 1:
                raise ValueError(f"--threads {self.threads} is too small; give 1 or more")
            check_threads(self.threads)


def ask(lm: LongContextModel, text: str, questions: Sequence[str]) -> tuple[Context, float, dict[str, str], int | None]:
    """Read a text one way and ask about it; return what was kept, seconds, answers, and how many are known right."""
    started = time.perf_counter()
    context = lm.read(text, name=Path(text).name)
    seconds = time.perf_counter() - started
    answers = {one: " ".join(context.ask(one, max_new_tokens=LONGEST).split()) for one in questions}
    known = [QUESTIONS[one] for one in questions if one in QUESTIONS]
    right = [bool(re.search(rf"(?<!\d)(?:{one})", said)) for one, said in zip(known, answers.values(), strict=False)]
    return context, seconds, answers, sum(right) if len(known) == len(questions) else None


def command(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration; return 0."""
    (options,), _ = parse_options("locret demo", (__doc__ or "").split("\n")[0], [DemoOptions], argv)
    import torch

    from locret import LongContextModel, shipped
    from locret.conversation.evidence import policy_of_share
    from locret.infer import kept_page
    from locret.pictures import can_draw

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    path, questions = shipped.find(options.text), options.question or list(QUESTIONS)
    sys.stderr.write(f"loading {options.model}\n")
    lm = LongContextModel.from_pretrained(options.model, heads=options.heads)
    words = Path(path).read_text(encoding="utf-8")
    tokens = len(lm.tokenizer(words, verbose=False)["input_ids"])
    chunk = 512 if tokens >= 2048 else 256
    kept = policy_of_share(tokens, options.keep / 100, chunk_size=chunk)
    own = replace(kept, head_budgets="shares") if lm.scorer.head_shares else kept
    ways: dict[str, tuple[Any, Any]] = {
        "everything": ("full", {"chunk_size": chunk}),
        "retaining heads": (lm.scorer, own),
        "newest only": ("streaming", kept),
    }
    found = {}
    for name, (scorer, policy) in ways.items():
        context, seconds, _, right = found[name] = ask(
            LongContextModel(lm.model, lm.tokenizer, scorer, policy), path, questions
        )
        said = "" if right is None else f", {right} of {len(questions)} answers right"
        held = float(kept_page.share_of_heads(context.cache).sum())
        sys.stderr.write(
            f"{name}: {held:,.0f} of {context.cache.seen:,} units per KV head, "
            f"{context.memory().actual / 2**20:.1f} MiB, read in {seconds:.0f} s{said}\n"
        )
    share = kept_page.share_of_heads(found["retaining heads"][0].cache)
    note = f"{options.keep:g} % of the units. The darker a word, the more of the heads hold it."
    pieces = kept_page.marked(words, share, lm.tokenizer, lm.template)
    drawn = ["kept.html", "kept.png"] if can_draw("kept.png") else ["kept.html"]
    for name in drawn:
        kept_page.write(Path(options.output, name), pieces, f"What heads kept of {Path(path).name}", note)
    if options.json:
        rows = {
            name: {"bytes": context.memory().actual, "right": right, "answers": answers}
            for name, (context, _, answers, right) in found.items()
        }
        print_json({"tokens": tokens, "rows": rows, "output": options.output})
        return 0
    for question in questions:
        print(f"\n{question}")
        for name, (_, _, answers, _) in found.items():
            print(f"  {name:<16} {answers[question]}")
    print(f"\nthe text with what heads kept of it: {', '.join(drawn)} in {options.output}")
    return 0


if __name__ == "__main__":
    run(command, prog="locret demo")
