"""Why a cache is refused: another model, batch or number of processes, no such positions, scores that mean nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from locret import prefill_attention
from locret.backbone.adapters import find_decoder, unwrap
from locret.cache.protected import check_rows
from locret.heads.fingerprint import computation, different_computation
from locret.scorers import Scorer

if TYPE_CHECKING:
    from locret.cache.cache import RetentionCache

_WITHOUT = "or start one process (without --shard tp)"


def check_usable(cache: RetentionCache, model: nn.Module, rows: int = 0) -> None:
    """Refuse to go on with another model, in the middle of a read, or with another number of rows (0: as it is)."""
    cache.check_whole()
    if rows:
        if cache.seen and rows != cache.rows:
            raise ValueError(
                f"input_ids has {rows} rows but the cache has read {cache.rows}; give as many, or a new cache"
            )
        check_rows(cache.protected, rows)
    if find_decoder(model) is not cache.decoder:
        raise ValueError(
            "the cache was made for another model than the one it is used with; make one with "
            "RetentionCache(model, ...), or load it with load_cache(path, model, ...)"
        )
    now = computation(model)
    if cache.seen and (found := different_computation(cache.computation or now, now)):
        raise ValueError(
            f"the cache was read by a model that computed something else ({found}); set it back, adapters too, or "
            "read the text again"
        )
    cache.computation = now
    if model.training and getattr(unwrap(model), "is_gradient_checkpointing", False):
        raise ValueError(
            "the model is being trained with gradient checkpointing, which uses no cache; call model.eval()"
        )


def check_reach(cache: RetentionCache, units: int, tokens: int | None) -> None:
    """Refuse positions beyond those that always have the same frequencies."""
    if cache.fixed_reach is None:
        return
    changes = f"{cache.backbone.model_type} with dynamic NTK changes its rotary frequencies beyond "
    if cache.policy.positions == "compact" and not cache.backbone.slides:
        if units > cache.fixed_reach:
            raise ValueError(
                f"{changes}{cache.fixed_reach} positions, but budget={cache.policy.budget}, chunk_size="
                f"{cache.policy.chunk_size} and the answer reach {units}; lower them"
            )
    elif tokens is None or cache.seen + tokens > cache.fixed_reach:
        reach = (
            "the length of the text is unknown" if tokens is None else f"text and answer reach {cache.seen + tokens}"
        )
        raise ValueError(
            f"{changes}{cache.fixed_reach} positions, keys in the cache keep theirs, and {reach}; "
            'read it with positions="compact" where all layers attend to everything, or give it another rope_type'
        )


def check_scores(scorer: Scorer, unsound: Tensor) -> None:
    """Refuse what was chosen by scores that are not finite; `unsound` is a bool on their device."""
    if unsound:
        raise ValueError(
            f"scorer {scorer.name} returned scores that are NaN or infinite, so what was kept means nothing; "
            "mend it and start again with cache.fresh()"
        )


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
