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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import AttentionInterface

from locret import RetentionCache, prefill
from locret.backbone.instrument import NAME, locret_attention
from locret.cli.command import run
from locret.infer.evaluation.eval_options import words
from locret.infer.speed.allocations import marked, peak_bytes
from locret.infer.speed.lab.harness import ReadingOptions, compared, interleave, program, ratio_table, reading, where
from locret.infer.speed.methods import BenchMethod, Bounded
from locret.infer.speed.plan import BenchPlan
from locret.infer.speed.runs import BenchSetup, make_setup
from locret.tables import markdown


@dataclass(frozen=True, kw_only=True)
class GrowthOptions(ReadingOptions):
    """What is measured, and how often. The defaults: 32 chunks, and a budget of four average chunks."""

    shape: str = "cpu-deep"
    """Backbone of random weights, as for locret-bench."""
    scorer: str = "h2o"
    """Scorer, a method of locret-bench; locret is retaining heads."""
    heads: str | None = None
    """Folder of trained heads for --scorer locret; fresh ones, which cost the same, if none."""
    plans: str = "linear,sqrt,linear+decremental"
    """Plans to compare with fixed memory, in the words of locret-eval's modifiers."""
    tokens: int = 8208
    """Prompt tokens, the local ones included."""
    chunk_size: int | None = 256
    """Tokens per forward pass; with decremental on average."""
    min_chunk: int = 16
    """Smallest chunk with decremental."""
    stabilizers: int | None = 16
    """Newest units kept after every chunk but the last."""
    local_len: int | None = 16
    """Last tokens, never evicted."""
    repeats: int = 6
    """Rounds in which everything is measured once."""

    def all_plans(self, chosen: set[str]) -> tuple[BenchPlan, dict[str, BenchMethod]]:
        """Return the benchmark, and its method by the name of each plan, fixed memory first.

        Raises:
            ValueError: For an unknown plan, or one that the other options contradict.
        """
        names = {"fixed": self.scorer, **{plan: f"{self.scorer}+{plan}" for plan in words(self.plans, "--plans")}}
        plan = self.plan(chosen, ",".join(names.values()), self.tokens)
        return plan, dict(zip(names, plan.methods, strict=True))


def measure(options: GrowthOptions, chosen: set[str]) -> dict[str, Any]:
    """Return speed, bytes and planned sizes of every plan, and where they were taken.

    Raises:
        ValueError: For an unknown scorer or plan.
    """
    plan, methods = options.all_plans(chosen)
    setup = make_setup(plan)
    held = {name: _bytes(setup, method) for name, method in methods.items()}
    sides = {name: reading(setup, method, options.tokens) for name, method in methods.items()}
    seconds = interleave(sides, options.repeats, setup.prompt_1N.device)
    return {
        **compared(seconds, {f"fixed/{name}": ("fixed", name) for name in methods if name != "fixed"}),
        "bytes": held,
        "plans": planned(plan, methods),
        "where": where(options, plan),
    }


def planned(plan: BenchPlan, methods: Mapping[str, BenchMethod]) -> dict[str, dict[str, Any]]:
    """Return what every pass reads and attends to in the layer that attends to most, by name of the plan."""
    found = {}
    for name, method in methods.items():
        passes = method.reading(plan.sizes, plan.policy, plan.lengths[0])
        tokens, attended = [p.tokens for p in passes], [max(p.held) + p.tokens for p in passes]
        matrices = [size * units for size, units in zip(tokens, attended, strict=True)]
        found[name] = {
            "tokens": tokens,
            "attended": attended,
            "chunks": len(passes) - 1,
            "smallest_chunk": min(tokens[:-1], default=0),
            "largest_chunk": max(tokens[:-1], default=0),
            "peak_units": max(attended),
            "largest_matrix": max(matrices),
            "work": sum(matrices),
        }
    return found


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


def _bytes(setup: BenchSetup, method: BenchMethod) -> dict[str, int]:
    assert isinstance(method, Bounded)
    cache = _MarkedCache(setup.model, method.make_scorer(setup.heads), method.policy(setup.plan.policy))
    AttentionInterface.register(NAME, _marked_attention)
    try:
        peaks = peak_bytes(lambda: prefill(setup.model, setup.prompt_1N, cache))
    finally:
        AttentionInterface.register(NAME, locret_attention)
    return {"cache": cache.memory().peak, "cache + attention": peaks.marked, "everything": peaks.everything}


def body(record: Mapping[str, Any]) -> list[str]:
    """Return the lines of the page."""
    return [*ratio_table(record), "", *_byte_lines(record["bytes"]), "", *_plan_lines(record["plans"])]


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


command = program(
    "memory_growth", "What growing memory and shrinking chunks save over fixed memory", GrowthOptions, measure, body
)

if __name__ == "__main__":
    run(command)
