"""A demonstration in minutes on a CPU: train retaining heads, then compare them with everything else within one budget.

    locret demo

Asks the embedded backbone about a shipped text first, within seconds. Then trains heads of its own with `locret-train`,
and runs `locret-eval` on texts of many times the budget: the full cache, the trained heads, untrained ones, and what
keeps the first and last tokens. Ends with the table and the pictures. Exits 1 if the trained heads do not keep what the
full cache finds.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locret import shipped
from locret.cli import interrupts
from locret.cli.command import parse_options, run
from locret.data import tasks
from locret.data.training.question_rows import question_rows, write_rows
from locret.field_values import check_threads
from locret.files import write_text

MODEL, HEADS, TEXT = "checkpoints/tiny", "checkpoints/tiny-heads", "recipes/infer/pass_key.txt"
QUESTION = "What is the pass key?"


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """What the demonstration trains and reads."""

    model: str = MODEL
    """Backbone; the embedded one."""
    output: str = "runs/demo"
    """Folder for rows, heads, logs, results and pictures; an earlier demonstration in it is replaced."""
    recipe: str = "recipes/train/tiny.yaml"
    """How to train; its policy is the one that texts are read with."""
    evaluation: str = "recipes/eval/demo.yaml"
    """What is compared, and on which texts."""
    heads: str | None = None
    """Heads to use instead of training some."""
    rows: int = 80
    """Generated texts to train on."""
    steps: int = 80
    """Training steps; far fewer than the recipe's, and enough for easy texts."""
    row_tokens: int = 1024
    """Length of each text."""
    samples: int = 3
    """Texts to read per task."""
    required: float = 0.5
    """Share of the full cache's score that trained heads must keep; also more than untrained ones do."""
    threads: int = 1
    """CPU threads; a backbone this small gains nothing from more."""

    def __post_init__(self) -> None:
        for name in ("rows", "steps", "samples", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)} is too small; give 1 or more")
        check_threads(self.threads)


def first_answer() -> None:
    """Ask about the shipped text with the shipped heads, and print the answer with the bytes that it took."""
    from locret import LongContextModel
    from locret.backbone.adapters import compute_dtype
    from locret.conversation.long_context_model import EMBEDDED_KNOWS

    print(f"reading {TEXT} with the heads that come with the package", flush=True)
    lm = LongContextModel.from_pretrained(MODEL, heads=HEADS)
    with warnings.catch_warnings():
        # What this backbone is for is what the demonstration shows.
        warnings.filterwarnings("ignore", message=re.escape(EMBEDDED_KNOWS))
        context = lm.read(TEXT)
        answer = context.ask(QUESTION)
    backbone, tokens = lm.backbone, context.cache.seen
    shapes = map(backbone.shape, range(backbone.num_layers))
    numbers = sum(shape.num_kv_heads * shape.unit_dim for shape in shapes)
    full = tokens * numbers * compute_dtype(lm.model).itemsize
    print(f"{QUESTION} {answer}")
    print(
        f"{tokens:,} tokens in {context.memory().peak / 2**20:.1f} MiB of cache; keeping all of them takes "
        f"{full / 2**20:.1f} MiB. Next: heads of our own, and what they keep compared with other methods.",
        flush=True,
    )


def train(options: DemoOptions, tokenizer: Any) -> str:
    """Train heads on generated rows with the `locret-train` command and return their folder.

    Raises:
        ValueError: If the command fails; it has said why.
    """
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    rows, heads = folder / "rows.json", folder / "training"
    write_rows(list(question_rows(tokenizer, options.rows, [options.row_tokens], seed=1)), rows)
    flags = ["--model", options.model, "--dataset", str(rows), "--steps", str(options.steps), "--output", str(heads)]
    flags += ["--warmup-steps", str(min(10, options.steps - 1)), "--log-every", "10"]
    flags += ["--eval-rows", "0"]  # what the heads are worth is what the evaluation says
    _call("locret-train", "locret.train.command", ["--config", options.recipe, *flags, "--overwrite"], options.threads)
    return str(heads)


def evaluate(options: DemoOptions, heads: str) -> dict[str, Any]:
    """Compare with the `locret-eval` command and return its results.

    Raises:
        ValueError: If the command fails; it has said why.
    """
    output = Path(options.output) / "evaluation"
    flags = ["--model", options.model, "--heads", heads, "--samples", str(options.samples), "--output", str(output)]
    line = ["--config", options.evaluation, *flags, "--overwrite"]
    _call("locret-eval", "locret.infer.evaluation.command", line, options.threads)
    results: dict[str, Any] = json.loads((output / "results.json").read_text(encoding="utf-8"))
    return results


def _call(name: str, module: str, arguments: Sequence[str], threads: int) -> None:
    print(f"$ {name} {' '.join(arguments)}", flush=True)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    if interrupts.call([sys.executable, "-m", module, *arguments], env=environment):
        raise ValueError(f"{name} failed, so there is nothing to show; see above")


def typed(name: str) -> str:
    """Return how to type a command here: with its folder if that is next to this Python, but not on PATH."""
    script = Path(sys.executable).with_name(name)
    return name if shutil.which(name) or not script.exists() else shlex.quote(os.path.relpath(script))


def shares(results: dict[str, Any]) -> dict[str, float]:
    """Return the mean score of every method over tasks and lengths, 0 to 100."""
    scores: dict[str, list[float]] = {}
    for cell in results["cells"]:
        scores.setdefault(cell["method"], []).append(cell["score"])
    return {method: sum(values) / len(values) for method, values in scores.items()}


def verdict(scores: dict[str, float], required: float) -> str | None:
    """Return what is wrong with the scores, None if trained heads keep enough."""
    kept, full, untrained = scores["locret"], scores["full"], scores["untrained"]
    if full and kept >= required * full and kept > untrained:
        return None
    return (
        f"trained heads score {kept:.0f}, the full cache {full:.0f}, untrained heads {untrained:.0f}; trained heads "
        f"should keep at least {required:.0%} of the full cache's score, and more than untrained ones do"
    )


def command(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration and return its exit code: 1 if the trained heads do not keep enough.

    Raises:
        ValueError: If the backbone or the heads are missing, or a command fails.
    """
    from transformers import AutoTokenizer

    (options,), _ = parse_options("locret demo", (__doc__ or "").split("\n")[0], [DemoOptions], argv)
    backbone = Path(shipped.find(options.model))
    if not (backbone / "config.json").is_file():
        raise ValueError(f"--model {options.model} holds no backbone; give a folder with one, or leave --model out")
    if options.model == MODEL:
        first_answer()
    tokenizer = AutoTokenizer.from_pretrained(backbone)
    heads = options.heads or train(options, tokenizer)
    results = evaluate(options, heads)
    sample = tasks.get("passkey").sample(tokenizer, 4096, depth=0.3, seed=0)
    text = Path(options.output) / "text.txt"
    write_text(text, sample.document + "\n")
    print(
        f"ask it yourself: {typed('locret-infer')} --model {options.model} --heads {heads} --prompt-file {text} "
        f'--question "{sample.question}"'
    )
    if problem := verdict(shares(results), options.required):
        print(problem)
        return 1
    return 0


if __name__ == "__main__":
    run(command, prog="locret demo")
