"""What retention costs, as ratios measured side by side in one process.

    python -m locret.infer.speed.lab.retention_overhead --output infer/speed/records/retention_overhead_cpu

prefill/floor      reading with retention over the same chunks against a static cache of the same length, without scores
                   and eviction
prefill 2N/N       reading twice as many tokens over reading N
training/forward   one training step, AdamW included, over one plain forward of the decoder on the same tokens

Ratios are what holds on a machine whose speed drifts; the seconds are recorded too and mean little.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from locret.cli.command import run
from locret.infer.speed.lab.harness import ReadingOptions, compared, interleave, program, ratio_table, reading, where
from locret.infer.speed.lab.training_setup import TrainingSetup
from locret.infer.speed.runs import make_setup

_PAIRS = {
    "prefill/floor": ("prefill", "floor"),
    "prefill 2N/N": ("prefill_2n", "prefill"),
    "training/forward": ("training", "forward"),
}


@dataclass(frozen=True, kw_only=True)
class RetentionOptions(ReadingOptions):
    """What is measured, and how often."""

    tokens: int = 8192
    """Prompt tokens, N."""
    train_tokens: int = 2048
    """Prompt tokens of the training step."""
    answer_tokens: int = 64
    """Answer tokens of the training step."""
    repeats: int = 10
    """Rounds in which everything is measured once."""
    threads: int | None = 2
    """CPU threads."""


def measure(options: RetentionOptions, chosen: set[str]) -> dict[str, Any]:
    """Return ratios, seconds and where they were taken."""
    tokens, end = options.tokens, options.train_tokens + options.answer_tokens
    plan = options.plan(chosen, "locret,floor", tokens, max(2 * tokens, end))
    setup, (locret, floor) = make_setup(plan), plan.methods
    ids = setup.prompt_1N
    assert setup.heads is not None
    row = TrainingSetup(
        setup.model, setup.heads, ids[:, : options.train_tokens], ids[:, options.train_tokens : end], "logit"
    )
    sides = {
        "prefill": reading(setup, locret, tokens),
        "floor": reading(setup, floor, tokens),
        "prefill_2n": reading(setup, locret, 2 * tokens),
        "training": row.step,
        "forward": row.forward,
    }
    seconds = interleave(sides, options.repeats, ids.device)
    return {**compared(seconds, _PAIRS), "where": where(options, plan)}


command = program("retention_overhead", "What retention costs", RetentionOptions, measure, ratio_table)

if __name__ == "__main__":
    run(command)
