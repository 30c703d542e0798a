"""What every side of a comparison does, as rows: which methods, over which prompts, ending with how many units."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from locret.infer.speed import methods

if TYPE_CHECKING:
    from locret.infer.speed.plan import BenchPlan

OURS = "locret"
BASELINE = "locret"
"""Our method that all others are compared with: retaining heads."""
_METHODS: Mapping[str, tuple[str, ...]] = {
    "transformers": ("full", "full_chunked"),
    "kvpress": ("snapkv", "expected_attention", "keydiff"),
}
"""A peer's own ways: attention to everything, read at once or in chunks of the same size as ours; a whole prefill,
after which a press keeps as many units as we do."""
_TWINS = ("snapkv", "expected_attention", "key_difference")
"""Our scorers that rate as kvpress's presses do."""

Row = dict[str, Any]


def rows(plan: BenchPlan) -> dict[tuple[str, str, int], Row]:
    """Return one row to be filled per side, method and length; the baseline comes first."""
    sides = {OURS: own_methods(plan), **{peer: list(_METHODS[peer]) for peer in plan.peers}}
    return {
        (side, name, tokens): {
            "side": side,
            "method": name,
            "tokens": tokens,
            "expected": _held(plan, side, name, tokens),
            "held": None,
            "error": None,
            "peak_bytes": {"allocated": None, "process": None},
            "rounds": [],
        }
        for tokens in plan.lengths
        for side, names in sides.items()
        for name in names
    }


def own_methods(plan: BenchPlan) -> list[str]:
    """Return ours: retaining heads, the twins of what peers do, and what else the plan measures in bounded memory."""
    twins = _TWINS if "kvpress" in plan.peers else ()
    bounded = [method.name for method in plan.methods if isinstance(method, methods.Bounded)]
    return list(dict.fromkeys((BASELINE, *twins, *bounded)))


def job(plan: BenchPlan) -> dict[str, Any]:
    """Return what the processes must know, as plain data."""
    policy = plan.policy
    return {
        "policy": policy.to_dict(),
        "budget": policy.budget,
        "chunk_size": policy.chunk_size,
        "local_len": policy.local_len,
        "own": own_methods(plan),
        "heads": plan.heads,
        "hidden_dim": plan.hidden_dim,
        "new_tokens": plan.new_tokens,
        "seed": plan.seed,
        "threads": plan.threads,
        "dtype": plan.dtype_name,
        "device": str(plan.device),
        "memory_cap": plan.memory_cap,
    }


def _held(plan: BenchPlan, side: str, method: str, tokens: int) -> int:
    """Return the units that each KV head must hold in the end; every new token but the last has been fed."""
    fed, local = plan.new_tokens - 1, plan.policy.local_len
    if side == OURS:  # the last prompt token is fed with the new ones
        return max(methods.get(method).units_after(plan.sizes, plan.policy, tokens)) + 1 + fed
    if side == "transformers":
        return tokens + fed
    return min(plan.policy.budget, tokens - local) + local + fed
