"""What retention costs, as ratios measured side by side in one process.

    python -m locret.infer.speed.lab.retention_overhead --output infer/speed/records/retention_overhead_cpu

prefill/floor      reading with retention over the same chunks against a static cache of the same length, without scores
                   and eviction
prefill 2N/N       reading twice as many tokens over reading N
training/forward   one training step, AdamW included, over one plain forward of the decoder on the same tokens

Ratios are what holds on a machine whose speed drifts; the seconds are recorded beside them and mean little.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from locret import RetainingHeads, RetentionCache, RetentionPolicy, prefill
from locret.cli import parse_options, run
from locret.infer.speed.floor import read_static
from locret.infer.speed.lab.training_setup import TrainingSetup
from locret.infer.speed.shapes import CPU_512_HIDDEN_DIM
from locret.infer.speed.side_by_side import backbone, interleave, origin, quantiles, ratio, table, where, write


@dataclass(frozen=True, kw_only=True)
class BenchmarkOptions:
    """What is measured, and how often."""

    model: str | None = None
    """Folder of a backbone; a random Llama of 8 layers, hidden 512, 8 query / 2 KV heads of 64 if none."""
    hidden_dim: int = CPU_512_HIDDEN_DIM
    """Width between a head's two layers, d_R."""
    tokens: int = 8192
    """Prompt tokens, N."""
    answer_tokens: int = 64
    """Answer tokens of the training step."""
    train_tokens: int = 2048
    """Prompt tokens of the training step."""
    budget: int = 1024
    """Cache units kept per KV head."""
    chunk_size: int = 512
    """Tokens per forward pass."""
    stabilizers: int = 256
    """Newest units kept after every chunk but the last."""
    local_len: int = 64
    """Last tokens, never evicted."""
    repeats: int = 10
    """Times every pair is measured."""
    threads: int = 2
    """CPU threads."""
    output: str | None = None
    """Write the record to this path, once as .json and once as .md."""


def measure(options: BenchmarkOptions) -> dict[str, Any]:
    """Return ratios, seconds and where they were taken."""
    torch.set_num_threads(options.threads)
    model = backbone(options.model)
    heads = RetainingHeads.for_model(model, options.hidden_dim, seed=0)
    policy = RetentionPolicy(
        budget=options.budget,
        chunk_size=options.chunk_size,
        stabilizers=options.stabilizers,
        local_len=options.local_len,
    )
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, model.config.vocab_size, (1, 2 * options.tokens), generator=generator)

    end = options.train_tokens + options.answer_tokens
    row = TrainingSetup(model, heads, ids[:, : options.train_tokens], ids[:, options.train_tokens : end], "logit")

    def read(tokens: int) -> None:
        prefill(model, ids[:, :tokens], RetentionCache(model, heads, policy))

    sides: dict[str, Callable[[], object]] = {
        "prefill": lambda: read(options.tokens),
        "floor": lambda: read_static(
            model, ids[:, : options.tokens], options.budget, options.chunk_size, options.local_len
        ),
        "prefill_2n": lambda: read(2 * options.tokens),
        "training": row.step,
        "forward": row.forward,
    }
    seconds = interleave(sides, options.repeats)
    pairs = {
        "prefill/floor": ("prefill", "floor"),
        "prefill 2N/N": ("prefill_2n", "prefill"),
        "training/forward": ("training", "forward"),
    }
    return {
        "ratios": {name: ratio(seconds, *pair) for name, pair in pairs.items()},
        "seconds": {name: quantiles(values) for name, values in seconds.items()},
        "where": where(options, model),
    }


def to_markdown(record: dict[str, Any]) -> str:
    """Return the record as a page for people."""
    module = "locret.infer.speed.lab.retention_overhead"
    return "\n".join(["# What retention costs", "", *table(record["ratios"]), "", *origin(record, module)])


def command(argv: Any = None) -> int:
    """Measure, print, and write the record if asked to."""
    (options,), _ = parse_options("retention_overhead", "Measure what retention costs.", [BenchmarkOptions], argv)
    record = measure(options)
    write(record, to_markdown(record), options.output)
    return 0


if __name__ == "__main__":
    run(command)
