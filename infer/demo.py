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
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from locret.cli.command import bars_on_terminals, parse_options, run

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
SHARE = 0.25
"""Of the text's tokens that stays in every KV head."""
LONGEST = 28
"""Tokens of an answer."""


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Where it goes. Texts and questions of your own are for locret-infer and locret-context."""

    output: str = "runs/demo"
    """Folder for the drawn text, kept.html and kept.png; those of an earlier demonstration are replaced."""


def command(argv: Sequence[str] | None = None) -> int:
    (options,), _ = parse_options("locret demo", (__doc__ or "").split("\n")[0], [DemoOptions], argv)

    from locret import LongContextModel, shipped
    from locret.conversation.evidence import policy_of_share
    from locret.infer import kept_page
    from locret.pictures import retention_of

    path = shipped.find(TEXT)
    sys.stderr.write(f"loading {MODEL}\n")
    with bars_on_terminals():
        lm = LongContextModel.from_pretrained(MODEL, heads=HEADS)
    words = Path(path).read_text(encoding="utf-8")
    tokens = len(lm.tokenizer(words, verbose=False)["input_ids"])
    chunk = 512 if tokens >= 2048 else 256
    kept = policy_of_share(tokens, SHARE, chunk_size=chunk)
    own = replace(kept, head_budgets="shares", spacing=16) if lm.scorer.head_shares else kept
    ways: dict[str, tuple[Any, Any]] = {
        "everything": ("full", {"chunk_size": chunk}),
        "retaining heads": (lm.scorer, own),
        "newest only": ("streaming", kept),
    }
    said, shares = {}, {}
    for name, how in ways.items():
        started = time.perf_counter()
        context = LongContextModel(lm.model, lm.tokenizer, *how).read(path)
        seconds = time.perf_counter() - started
        said[name] = {one: " ".join(context.ask(one, max_new_tokens=LONGEST).split()) for one in QUESTIONS}
        right = [one for one, known in QUESTIONS.items() if re.search(rf"(?<!\d)(?:{known})", said[name][one])]
        shares[name] = kept_page.share_of_heads(retention_of(context.cache))
        sys.stderr.write(
            f"{name}: {float(shares[name].sum()):,.0f} of {context.cache.seen:,} units per KV head, "
            f"{context.kept_bytes / 2**20:.1f} MiB kept, read in {seconds:.0f} s, "
            f"{len(right)} of {len(QUESTIONS)} answers right\n"
        )
    for question in QUESTIONS:
        print(f"\n{question}")
        for name, answers in said.items():
            print(f"  {name:<16} {answers[question]}")
    note = f"{SHARE:.0%} of the units. The darker a word, the more of the heads hold it."
    pieces = kept_page.marked(words, shares["retaining heads"], lm.tokenizer, lm.template)
    drawn = ["kept.html", "kept.png"] if find_spec("matplotlib") else ["kept.html"]
    for file in drawn:
        kept_page.write(Path(options.output, file), pieces, f"What heads kept of {Path(path).name}", note)
    print(f"\nthe text with what heads kept of it: {', '.join(drawn)} in {options.output}")
    return 0


if __name__ == "__main__":
    run(command, prog="locret demo")
