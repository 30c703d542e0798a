"""What it saves to read the rows of a batch together, as ratios measured side by side in one process.

    python -m locret.infer.speed.lab.rows_together --output infer/speed/records/rows_together_cpu

together/apart     reading rows of different length as one batch over reading each by itself
equal/apart        the same where all rows have the length of the longest
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from locret.cache.cache import RetentionCache
from locret.chunked_prefill import prefill
from locret.cli.command import run
from locret.infer.speed.lab.harness import ReadingOptions, compared, interleave, program, ratio_table, where
from locret.infer.speed.methods import Bounded
from locret.infer.speed.runs import make_setup

_PAIRS = {"together/apart": ("together", "apart"), "equal/apart": ("equal", "equal_apart")}


@dataclass(frozen=True, kw_only=True)
class RowsOptions(ReadingOptions):
    """What is measured, and how often."""

    tokens: int = 2048
    """Prompt tokens of the longest row."""
    rows: int = 4
    """Rows of the batch; their lengths go evenly from half of the longest one to the longest."""
    repeats: int = 10
    """Rounds in which everything is measured once."""
    threads: int | None = 2
    """CPU threads."""

    def __post_init__(self) -> None:
        if self.rows < 2:
            raise ValueError(f"--rows {self.rows} is no batch; give at least 2")
        if self.tokens < 2 * self.rows:
            raise ValueError(f"--tokens {self.tokens} is too few for {self.rows} rows of different length; give more")


def measure(options: RowsOptions, chosen: set[str]) -> dict[str, Any]:
    """Return ratios, seconds and where they were taken."""
    tokens, rows = options.tokens, options.rows
    plan = options.plan(chosen, "locret", tokens)
    setup, (method,) = make_setup(plan), plan.methods
    assert isinstance(method, Bounded)
    scorer, policy = method.make_scorer(setup.heads), method.policy(plan.policy)
    ids = torch.stack([setup.prompt_1N[0].roll(row) for row in range(rows)])
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : (tokens // 2) * (rows - 1 - row) // (rows - 1)] = 0

    def read(ids: Tensor, mask: Tensor | None = None) -> None:
        prefill(setup.model, ids, RetentionCache(setup.model, scorer, policy), attention_mask=mask)

    def apart(mask: Tensor) -> None:
        for row, kept in zip(ids, mask.bool(), strict=True):
            read(row[None, kept])

    whole = torch.ones_like(mask)
    sides = {
        "together": lambda: read(ids, mask),
        "apart": lambda: apart(mask),
        "equal": lambda: read(ids, whole),
        "equal_apart": lambda: apart(whole),
    }
    seconds = interleave(sides, options.repeats, ids.device)
    return {**compared(seconds, _PAIRS), "where": where(options, plan)}


command = program("rows_together", "Rows read together", RowsOptions, measure, ratio_table)

if __name__ == "__main__":
    run(command)
