"""What growing memory (IM) and shrinking chunks (IMDC) save over a fixed memory, measured side by side in one process.

    python -m locret.infer.speed.lab.memory_growth --output infer/speed/records/memory_growth_cpu

Speed      seconds of reading with fixed memory over those with another plan, interleaved
Bytes      cache: the peak that the cache counts from its tensors, rotated keys included
           cache + attention: most bytes alive at one moment of all that is allocated while units are stored, attended,
           scored and evicted: the cache, the causal mask, the kernel's blocks and output, the scorer's logits
           everything: most bytes alive of all that reading allocates, so with hidden states and MLPs, without weights
Plan       tokens and attended units of each forward pass; a matrix is their product, which no kernel here holds as a
           whole, but for the causal mask on the CPU; work is the sum of all matrices

Both kinds of bytes are counted by PyTorch's allocator in one more read, which is not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from locret import RetainingHeads, RetentionCache, RetentionPolicy, prefill, scorers
from locret.backbone.instrument import NAME, locret_attention
from locret.cache.limits import Limits
from locret.cli import parse_options, run
from locret.infer.evaluation.methods import MODIFIERS
from locret.infer.evaluation.options import words
from locret.infer.speed.allocations import marked, peak_bytes
from locret.infer.speed.shapes import CPU_512_HIDDEN_DIM
from locret.infer.speed.side_by_side import backbone, interleave, origin, quantiles, ratio, table, where, write
from locret.tables import markdown


@dataclass(frozen=True, kw_only=True)
class GrowthOptions:
    """What is measured, and how often. The defaults: 32 chunks, and a budget of four average chunks."""

    model: str | None = None
    """Folder of a backbone; random weights of --shape if none."""
    shape: str = "cpu-deep"
    """cpu-deep (24 layers, hidden 256, 4 query / 2 KV heads of 64) or cpu-512 (8 layers, hidden 512, 8 / 2 heads)."""
    scorer: str = "h2o"
    """Scorer, by its registry name."""
    heads: str | None = None
    """Folder of trained heads for --scorer retaining_heads; fresh ones, which cost the same, if none."""
    hidden_dim: int = CPU_512_HIDDEN_DIM
    """Width between a fresh head's two layers, d_R."""
    plans: str = "linear,sqrt,linear+decremental"
    """Plans to compare with fixed memory, in the words of locret-eval's modifiers."""
    tokens: int = 8208
    """Prompt tokens, the local ones included."""
    budget: int = 1024
    """Cache units kept per KV head in the end, m_max."""
    chunk_size: int = 256
    """Tokens per forward pass; with decremental on average."""
    min_chunk: int = 16
    """Smallest chunk with decremental."""
    stabilizers: int = 16
    """Newest units kept after every chunk but the last."""
    local_len: int = 16
    """Last tokens, never evicted."""
    repeats: int = 6
    """Times everything is measured."""
    threads: int = 1
    """CPU threads."""
    output: str | None = None
    """Write the record to this path, once as .json and once as .md."""

    def policies(self, positions: str) -> dict[str, RetentionPolicy]:
        """Return the policy of every plan, fixed memory first.

        Raises:
            ValueError: For an unknown plan, or one that the other options contradict.
        """
        fixed = RetentionPolicy(
            budget=self.budget,
            chunk_size=self.chunk_size,
            min_chunk=self.min_chunk,
            stabilizers=self.stabilizers,
            local_len=self.local_len,
            positions=positions,
        )
        result = {"fixed": fixed}
        for plan in words(self.plans, "--plans"):
            for word in plan.split("+"):
                if word not in MODIFIERS:
                    raise ValueError(f"--plans {plan}: {word} is unknown; choose from {', '.join(MODIFIERS)}")
            changes = {key: value for word in plan.split("+") for key, value in MODIFIERS[word].items()}
            result[plan] = replace(fixed, **changes)
        return result


def measure(options: GrowthOptions) -> dict[str, Any]:
    """Return speed, bytes and planned sizes of every plan, and where they were taken.

    Raises:
        ValueError: For an unknown scorer or plan.
    """
    torch.set_num_threads(options.threads)
    model = backbone(options.model, options.shape)
    scorer = _scorer(model, options)
    policies = options.policies(scorer.positions)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, model.config.vocab_size, (1, options.tokens), generator=generator)
    held = {name: _bytes(model, ids, scorer, policy) for name, policy in policies.items()}
    sides: dict[str, Callable[[], object]] = {
        name: partial(_read, model, ids, scorer, policy) for name, policy in policies.items()
    }
    seconds = interleave(sides, options.repeats)
    layers = model.config.num_hidden_layers
    return {
        "ratios": {f"fixed/{name}": ratio(seconds, "fixed", name) for name in policies if name != "fixed"},
        "bytes": held,
        "plans": {name: planned(policy, scorer, layers, options.tokens) for name, policy in policies.items()},
        "seconds": {name: quantiles(values) for name, values in seconds.items()},
        "where": where(options, model),
    }


def planned(policy: RetentionPolicy, scorer: scorers.Scorer, layers: int, tokens: int) -> dict[str, Any]:
    """Return the sizes of every forward pass, of the fullest layer, and what follows from them."""
    schedule = Limits(policy, scorer, layers).plan(tokens)
    steps = [*schedule.steps, schedule.last]
    kept = [max(step.kept) for step in steps]
    sizes = [step.tokens for step in steps]
    attended = [units + size for units, size in zip([0, *kept], sizes, strict=False)]
    matrices = [size * units for size, units in zip(sizes, attended, strict=True)]
    return {
        "tokens": sizes,
        "attended": attended,
        "kept": kept,
        "chunks": len(schedule.steps),
        "smallest_chunk": min(sizes[:-1], default=0),
        "largest_chunk": max(sizes[:-1], default=0),
        "peak_units": max(schedule.peak),
        "largest_matrix": max(matrices),
        "work": sum(matrices),
    }


def _scorer(model: PreTrainedModel, options: GrowthOptions) -> scorers.Scorer:
    if options.scorer != "retaining_heads":
        return scorers.get(options.scorer)
    if options.heads is None:
        return scorers.get(options.scorer, heads=RetainingHeads.for_model(model, options.hidden_dim, seed=0))
    return scorers.get(options.scorer, heads=RetainingHeads.from_pretrained(options.heads))


def _read(model: PreTrainedModel, ids: Tensor, scorer: scorers.Scorer, policy: RetentionPolicy) -> None:
    prefill(model, ids, RetentionCache(model, scorer, policy))


class _MarkedCache(RetentionCache):
    """Marks what is allocated for storing units, and for rating tokens once a pass is over."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        with marked():
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def finished(self, hidden: Tensor) -> None:
        with marked():
            super().finished(hidden)


def _marked_attention(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    with marked():
        return locret_attention(*args, **kwargs)


def _bytes(model: PreTrainedModel, ids: Tensor, scorer: scorers.Scorer, policy: RetentionPolicy) -> dict[str, int]:
    cache = _MarkedCache(model, scorer, policy)
    AttentionInterface.register(NAME, _marked_attention)
    try:
        peaks = peak_bytes(lambda: prefill(model, ids, cache))
    finally:
        AttentionInterface.register(NAME, locret_attention)
    return {"cache": cache.memory().peak, "cache + attention": peaks.marked, "everything": peaks.everything}


def to_markdown(record: dict[str, Any]) -> str:
    """Return the record as a page for people."""
    return "\n".join(
        [
            "# What growing memory and shrinking chunks save over fixed memory",
            "",
            *table(record["ratios"]),
            "",
            *_byte_lines(record["bytes"]),
            "",
            *_plan_lines(record["plans"]),
            "",
            *origin(record, "locret.infer.speed.lab.memory_growth"),
        ]
    )


def _byte_lines(held: Mapping[str, Mapping[str, int]]) -> list[str]:
    kinds, fixed = list(held["fixed"]), held["fixed"]
    rows = (
        [name, *(f"{counts[kind] / 1024:,.0f} ({counts[kind] / fixed[kind]:.3f})" for kind in kinds)]
        for name, counts in held.items()
    )
    return markdown(["peak KiB (of fixed)", *kinds], rows)


def _plan_lines(plans: Mapping[str, Mapping[str, Any]]) -> list[str]:
    heads = ["plan", "chunks", "tokens per chunk", "attended", "peak units", "largest matrix", "work (fixed over it)"]
    fixed, rows = plans["fixed"], []
    for name, plan in plans.items():
        attended = plan["attended"][1:-1]
        rows.append(
            [
                name,
                plan["chunks"],
                f"{plan['smallest_chunk']} to {plan['largest_chunk']}",
                f"{min(attended, default=0)} to {max(attended, default=0)}",
                plan["peak_units"],
                f"{plan['largest_matrix']:,} ({plan['largest_matrix'] / fixed['largest_matrix']:.3f})",
                f"{fixed['work'] / plan['work']:.3f}",
            ]
        )
    return markdown(heads, rows)


def command(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write the record if asked to."""
    (options,), _ = parse_options("memory_growth", "Measure what growing memory saves.", [GrowthOptions], argv)
    record = measure(options)
    write(record, to_markdown(record), options.output)
    return 0


if __name__ == "__main__":
    run(command)
