"""Caches of a backbone whose KV heads are shared by processes: what can be shared, and files that hold all heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from locret import prefill_attention
from locret.backbone.head_ranks import HeadRanks

if TYPE_CHECKING:
    from locret.cache.cache import RetentionCache

_WITHOUT = "or start one process (without --shard tp)"


def check_over_ranks(cache: RetentionCache) -> None:
    """Refuse what would choose other units where processes share the KV heads of a layer than in one process."""
    policy = cache.policy
    strategy = prefill_attention.get(policy.prefill_attention)
    for one in (cache.scorer, cache.merger, strategy, policy.lookup()):
        if one is not None and not one.over_ranks:
            raise ValueError(
                f"{one.kind} {one.name} does not say that it can rate the KV heads of one process alone (over_ranks), "
                f"but tensor parallelism gives each process some of them; choose another {one.kind}, {_WITHOUT}"
            )
    if policy.head_budgets != "uniform":
        raise ValueError(
            f'head_budgets="{policy.head_budgets}" lets heads hold different numbers of units, so under tensor '
            f'parallelism one process could come to hold the units of all; use head_budgets="uniform", {_WITHOUT}'
        )
    if policy.recalls_blocks:
        raise ValueError(
            f"recall_by={policy.recall_by} chooses the same blocks for all heads of a layer, which tensor parallelism "
            f"spreads over processes; take another recall_by, {_WITHOUT}"
        )


def state_of(tensors: Mapping[str, Tensor], ranks: HeadRanks | None, *, whole: bool) -> dict[str, Tensor]:
    """Return a cache's state with the heads of all processes, which all call this; or of such a one this one's part."""
    if ranks is None:
        return dict(tensors)
    part, state = ranks.gather if whole else ranks.own, dict(tensors)
    for name, one in tensors.items():
        if name.startswith("layers.") and (one.ndim >= 3 or name.endswith("exact")):  # dimension 1 counts heads
            state[name] = part(one, 1).contiguous()
    return state
