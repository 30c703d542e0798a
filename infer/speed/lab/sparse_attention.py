"""What sparse attention to a chunk costs, over dense attention to it: time, share of blocks computed, and error.

    python -m locret.infer.speed.lab.sparse_attention --output infer/speed/records/sparse_attention_cpu

Queries and keys are random, with what heads of long texts show: the first slots weigh much, and nearby ones more than
far ones; `--sharpness 0` leaves that out. Patterns of fixed size cost the same on both, xattention does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from locret import prefill_attention
from locret.backbone.attention import MaskMemo, View, attend
from locret.cli.command import run
from locret.infer.speed.lab.harness import LabOptions, compared, interleave, program, where
from locret.prefill_attention.blocked import SparseAttention, chosen_slots, computed_share
from locret.tables import markdown


@dataclass(frozen=True, kw_only=True)
class SparseOptions(LabOptions):
    """What is measured, and how often."""

    slots: str = "2048,8192,16384"
    """Slots that the chunk's last query sees, the chunk included."""
    tokens: int = 2048
    """Tokens of the chunk."""
    query_heads: int = 4
    """Query heads, which share one KV head."""
    head_dim: int = 128
    """Width of a head."""
    sharpness: float = 6.0
    """Logits that the first slots have more than others, and nearby ones more than far ones; 0: none."""
    strategies: str = (
        "a_shape:sinks=100,window=800 vertical_slash:vertical=30,slash=800 vertical_slash:vertical=500,slash=700 "
        "vertical_slash:vertical=3500,slash=100 block_sparse:blocks=25 xattention xattention:stride=16"
    )
    """Values of --prefill-attention to measure, with spaces between."""
    repeats: int = 3
    """Rounds in which everything is measured once."""


def measure(options: SparseOptions, chosen: set[str]) -> dict[str, Any]:
    """Return for every length and strategy its time over dense attention's, the share it computes and its error.

    Raises:
        ValueError: For an unknown strategy, or a chunk longer than the slots.
    """
    every = [int(slots) for slots in options.slots.split(",") if slots.strip().isdigit()]
    if not every or min(every) < options.tokens:
        raise ValueError(f"--slots {options.slots}: give numbers from --tokens {options.tokens} on, such as 8192")
    plan = options.plan(chosen, "floor", options.tokens)
    assert plan.device is not None
    found = [one for slots in every for one in _at(options, slots, plan.device)]
    return {"found": found, "where": where(options, plan)}


def _at(options: SparseOptions, slots: int, device: torch.device) -> list[dict[str, Any]]:
    query, view = _states(options, slots, device)
    scaling, memo = options.head_dim**-0.5, MaskMemo()

    def dense() -> Tensor:
        return attend(query, view, scaling=scaling, memo=memo)

    sides, shares = {"dense": dense}, {}
    for spec in options.strategies.split():
        pattern = prefill_attention.get(spec)
        if pattern is None:
            raise ValueError(f"--strategies {spec} is what the others are compared with; drop it")
        attention = SparseAttention([pattern] * options.query_heads)
        sides[spec] = lambda attention=attention: attention(query, view, scaling, None)  # type: ignore[misc]
        slots_seen, rows = chosen_slots(attention.patterns, query[0], view.keys[0, 0], scaling, None)
        shares[spec] = computed_share(slots_seen, rows, options.tokens)
    exact = dense()
    errors = {spec: float((sides[spec]() - exact).norm() / exact.norm()) for spec in shares}
    times = compared(interleave(sides, options.repeats, device), {spec: (spec, "dense") for spec in shares})
    return [
        {"slots": slots, "strategy": spec, "ratio": times["ratios"][spec], "share": share, "error": errors[spec]}
        | {"seconds": times["seconds"][spec], "dense_seconds": times["seconds"]["dense"]}
        for spec, share in shares.items()
    ]


def _states(options: SparseOptions, slots: int, device: torch.device) -> tuple[Tensor, View]:
    random = torch.Generator().manual_seed(0)
    shape = (1, 1, slots, options.head_dim)
    query = torch.randn(1, options.query_heads, options.tokens, options.head_dim, generator=random)
    key, value = (torch.randn(shape, generator=random) for _ in range(2))
    lift = options.sharpness * options.head_dim**0.5  # in logits, once scaled
    query[..., :2] = 1
    key[..., 0] = lift * torch.arange(slots) / 1000
    key[..., 1] = 0
    key[..., :4, 1] = lift * slots / 1000  # the first slots weigh as much as the nearest
    return query.to(device), View(key.to(device), value.to(device))


def table(record: Mapping[str, Any]) -> list[str]:
    """Return the lines of a record."""
    rows = []
    for one in record["found"]:
        numbers = f"{one['ratio']['p50']:.2f}", f"{one['share']:.1%}", f"{one['error']:.3f}"
        rows.append((f"{one['slots']:,}", one["strategy"], *numbers))
    return markdown(("slots", "strategy", "time over dense", "share computed", "error of the output"), rows)


command = program(
    "sparse_attention", "What sparse attention to a chunk costs, over dense attention", SparseOptions, measure, table
)

if __name__ == "__main__":
    run(command)
