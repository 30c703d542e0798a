"""What each scorer costs, as ratios to plain chunked reading, measured side by side in one process.

    python -m locret.infer.speed.lab.scorer_cost --output infer/speed/records/scorer_cost_cpu

Plain reading is the same chunks against a static cache of the same length: no scores, no eviction, no re-rotation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from locret import RetainingHeads, RetentionCache, RetentionPolicy, prefill, scorers
from locret.cli import parse_options, run
from locret.infer.speed.floor import read_static
from locret.infer.speed.shapes import CPU_512_HIDDEN_DIM
from locret.infer.speed.side_by_side import backbone, interleave, origin, quantiles, ratio, table, where, write

_NOT_TIMED = ("oracle",)
"""Needs the true answer and reads the prompt once more."""


@dataclass(frozen=True, kw_only=True)
class CostOptions:
    """What is measured, and how often."""

    model: str | None = None
    """Folder of a backbone; a random Llama of 8 layers, hidden 512, 8 query / 2 KV heads of 64 if none."""
    scorers: list[str] = field(default_factory=lambda: [name for name in scorers.names() if name not in _NOT_TIMED])
    """Scorers to measure; heads have fresh weights, which cost what trained ones cost."""
    hidden_dim: int = CPU_512_HIDDEN_DIM
    """Width between a head's two layers, d_R."""
    tokens: int = 4096
    """Prompt tokens."""
    budget: int = 1024
    """Cache units kept per KV head."""
    chunk_size: int = 512
    """Tokens per forward pass."""
    stabilizers: int = 128
    """Newest units kept after every chunk but the last."""
    local_len: int = 64
    """Last tokens, never evicted."""
    repeats: int = 6
    """Times everything is measured."""
    threads: int = 1
    """CPU threads."""
    output: str | None = None
    """Write the record to this path, once as .json and once as .md."""


def measure(options: CostOptions) -> dict[str, Any]:
    """Return the ratio of every scorer to plain reading, seconds, and where they were taken.

    Raises:
        ValueError: For an unknown scorer.
    """
    torch.set_num_threads(options.threads)
    model = backbone(options.model)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, model.config.vocab_size, (1, options.tokens), generator=generator)
    sides: dict[str, Callable[[], object]] = {
        "plain": partial(read_static, model, ids, options.budget, options.chunk_size, options.local_len)
    }
    for name in options.scorers:
        sides[name] = partial(_read, model, ids, _scorer(name, model, options), options)
    seconds = interleave(sides, options.repeats)
    return {
        "ratios": {name: ratio(seconds, name, "plain") for name in options.scorers},
        "seconds": {name: quantiles(values) for name, values in seconds.items()},
        "where": where(options, model),
    }


def _scorer(name: str, model: PreTrainedModel, options: CostOptions) -> scorers.Scorer:
    heads = {"heads": RetainingHeads.for_model(model, options.hidden_dim, seed=0)}
    return scorers.get(name, **(heads if name == "retaining_heads" else {}))


def _read(model: PreTrainedModel, ids: Tensor, scorer: scorers.Scorer, options: CostOptions) -> None:
    policy = RetentionPolicy(
        budget=options.budget,
        chunk_size=options.chunk_size,
        stabilizers=options.stabilizers,
        local_len=options.local_len,
        positions=scorer.positions,
    )
    prefill(model, ids, RetentionCache(model, scorer, policy))


def to_markdown(record: dict[str, Any]) -> str:
    """Return the record as a page for people."""
    title = "# What each scorer costs: reading with it over plain chunked reading"
    module = "locret.infer.speed.lab.scorer_cost"
    record = {**record, "where": {**record["where"], "options": dict(record["where"]["options"])}}
    record["where"]["options"]["scorers"] = "'" + str(record["where"]["options"]["scorers"]).replace("'", '"') + "'"
    return "\n".join([title, "", *table(record["ratios"]), "", *origin(record, module)])


def command(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write the record if asked to."""
    (options,), _ = parse_options("scorer_cost", "Measure what each scorer costs.", [CostOptions], argv)
    record = measure(options)
    write(record, to_markdown(record), options.output)
    return 0


if __name__ == "__main__":
    run(command)
