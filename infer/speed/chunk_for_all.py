"""`--chunk-size auto`: the chunk that `locret-infer` would take here, the same for all methods so that they compare.

Bounded methods decide; `full` and `floor` follow. A chunk must fit whichever bounded method and length needs most, and
be as large as whichever needs the largest least. Where only `full` or `floor` is measured, `locret` decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from locret import RetainingHeads, RetentionPolicy
from locret.infer import chunk_size
from locret.infer.sizing import Run
from locret.infer.speed import methods
from locret.infer.speed.methods import Bounded
from locret.infer.speed.plan import BenchPlan
from locret.scorers import Scorer


def with_chosen_chunk(plan: BenchPlan, policy_of: Callable[[int], RetentionPolicy]) -> BenchPlan:
    """Return a plan with the chunk size that suits the memory that is free.

    Args:
        plan: Everything but the chunk size.
        policy_of: Its policy with a given chunk size.

    Raises:
        ValueError: If not even the smallest chunk fits.
    """
    runs = [(method, run) for method in _deciding(plan) for run in _runs(plan, method)]
    draft, weights = policy_of(chunk_size.LARGEST), chunk_size.weight_bytes(plan.config, plan.dtype)

    def needed(policy: RetentionPolicy) -> int:
        return weights + max(run.bytes_beside_weights(method.policy(policy)) for method, run in runs)

    choice = chunk_size.choose(
        policy_of,
        needed,
        device=f"{plan.device or 'cuda'}{'' if plan.memory_cap is None else ' within --memory-cap'}",
        free=_free_bytes(plan, weights),
        least=max(run.least_chunk(method.policy(draft)) for method, run in runs),
    )
    return replace(plan, policy=policy_of(choice.chunk_size), chunk_choice=choice)


def _deciding(plan: BenchPlan) -> list[Bounded]:
    named = [method for method in plan.methods if isinstance(method, Bounded)]
    default = methods.get("locret")
    assert isinstance(default, Bounded)
    return named or [default]


def _runs(plan: BenchPlan, method: Bounded) -> list[Run]:
    """Return what `locret-infer` would plan for each prompt."""
    scorer = _scorer(plan, method)
    return [
        Run(
            config=plan.config,
            scorer=scorer,
            dtype=plan.dtype,
            device=plan.device or torch.device("cuda"),
            prompt_tokens=length,
            new_tokens=plan.new_tokens,
        )
        for length in plan.lengths
    ]


def _scorer(plan: BenchPlan, method: Bounded) -> RetainingHeads | Scorer:
    if not method.has_heads:
        return method.make_scorer(None)
    if plan.heads is not None:
        return RetainingHeads.from_pretrained(plan.heads)
    with torch.device("meta"):
        return RetainingHeads.for_model(plan.config, plan.hidden_dim)


def _free_bytes(plan: BenchPlan, weights: int) -> int | None:
    """Return the bytes that a run may take; None where that is unknown, as for a GPU that is not here."""
    free = None if plan.device is None else chunk_size.free_bytes(plan.device)
    if free is not None:  # peers run beside ours, each with weights of its own
        free = max(0, free - len(plan.peers) * weights)
    return min((count for count in (free, plan.memory_cap) if count is not None), default=None)
