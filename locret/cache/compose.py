"""Caches cut to a smaller budget, and texts that were read apart joined in one cache: their units one after another.

Nothing is read again. With compact positions a unit is rotated to its rank, so the units of a second text get the ranks
that follow those of the first; scores, which travel with units, decide which of them stay within a budget.
"""

# K KV heads, S slots

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from numbers import Integral

import torch

from locret.backbone.rotary import long_factors
from locret.base.fields import shown
from locret.cache.cache import RetentionCache
from locret.cache.checks import check_reach
from locret.cache.export import check_one_row
from locret.cache.layer import RetentionLayer
from locret.cache.protected import Protected, check_room, promised
from locret.cache.row_algebra import load_state, saved_state
from locret.cache.store import NO_UNIT, POSITIONS, SCORES, DenseStore
from locret.heads.fingerprint import different_computation
from locret.policy.policy import RetentionPolicy
from locret.policy.protection import checked_rows, closed, moved
from locret.policy.schedule import layer_budgets
from locret.policy.selectors import (
    Kept,
    KeptOverHeads,
    KeptPerHead,
    Stay,
    select_kept,
    select_over_heads,
    staying,
    staying_in_heads,
)
from locret.policy.sizes import divided

_HOW_IT_IS_READ = {
    *("budget", "chunk_size", "stabilizers", "local_len", "memory", "decremental", "min_chunk", "prefill_attention"),
    *("when", "merge", "head_shares"),
}
"""Fields of a policy in which texts of one cache may differ: what they decide is over when a text has been read."""


def checked_budget(budget: object) -> int:
    """Return a number of units per KV head, or refuse what is none."""
    if isinstance(budget, bool) or not isinstance(budget, Integral) or budget < 1:
        raise ValueError(f"budget={shown(budget)} is no number of units per KV head; give a whole number of 1 or more")
    return int(budget)


@torch.inference_mode(False)
@torch.no_grad()
def shrunk(cache: RetentionCache, budget: int) -> RetentionCache:
    """Return a copy that holds at most `budget` units per KV head, chosen by the scores that they have.

    The last local tokens stay, and what the scorer keeps by right, as at the end of a read. With a second tier what
    goes competes for that.
    """
    budget = checked_budget(budget)
    _check_by_score(cache)
    twin = cache.copy()
    with long_factors(cache.decoder):
        _unsettle(twin)
        _cut(twin, _stays(twin, budget))
        _settle(twin)
    return _with_budget(twin, budget)


@torch.inference_mode(False)
@torch.no_grad()
def joined(parts: Sequence[tuple[RetentionCache, int]], budget: int | None = None) -> RetentionCache:
    """Join texts that were read apart in one cache, in their order.

    Args:
        parts: Caches of one row each, of one backbone and scorer, which are used up; and of each how many tokens at its
            beginning the joined text does not have again.
        budget: Units per KV head of the whole, as many for each text, and what a short one does not need is for the
            others; None: all stay, but for those of tokens that are skipped.
    """
    caches = [cache for cache, _ in parts]
    budget = None if budget is None else checked_budget(budget)
    check_together(caches)
    whole, offset = caches[0], 0
    with long_factors(whole.decoder):
        for cache, skip in parts:
            _unsettle(cache)
            _skip(cache, skip)
            _move(cache, offset - skip)
            offset += cache.seen - skip
            if cache is not caches[-1]:
                cache.protected = closed(cache.protected, offset)
        _check_answers(caches, budget)
        last = caches[-1]
        spans = [span for cache in caches for row in cache.protected for span in row]
        if budget is not None:
            _share(caches, budget, offset)
        for nth, layer in enumerate(whole.governed):
            layer.store.chain([cache.governed[nth].store for cache in caches])
        whole.seen = whole.text_end = offset
        for name in ("last_tokens", "newest_hidden", "held_back", "fed_again"):
            setattr(whole, name, getattr(last, name))
        whole.digest = None  # of ids that nobody has seen in a row
        whole.protected = checked_rows([spans])
        if budget is not None:
            _cut(whole, _stays(last, budget, whole))
        _settle(whole)
    check_reach(whole, max(layer.held for layer in whole.governed), 0)
    held = sum(layer.fill for layer in whole.governed)
    return _with_budget(whole, -(-held // len(whole.governed)) if budget is None else budget)


def check_together(caches: Sequence[RetentionCache]) -> None:
    """Refuse caches whose units cannot be held by one."""
    first = caches[0]
    for cache in caches:
        check_one_row(cache.rows)
        if not cache.seen or cache.pad is not None:
            raise ValueError("one of the caches has read nothing, or is padded; give caches that have read one text")
        if cache.decoder is not first.decoder:
            raise ValueError("they were read by two backbones; load them with one, if it has the same weights")
        if found := different_computation(first.computation or {}, cache.computation or {}):
            raise ValueError(f"they were read by a model that computed something else ({found}); read the texts alike")
        if cache.scorer.identity(cache.prepared) != first.scorer.identity(first.prepared):
            raise ValueError(
                f"their units were rated by the scorers {first.scorer.name} and {cache.scorer.name}, with options of "
                "their own, and such scores cannot be compared; read the texts with one scorer"
            )
        for field in fields(RetentionPolicy):
            ours, theirs = getattr(first.policy, field.name), getattr(cache.policy, field.name)
            if field.name not in _HOW_IT_IS_READ and ours != theirs:
                raise ValueError(
                    f"they were read with {field.name}={shown(ours)} and {field.name}={shown(theirs)}; read the texts "
                    f"with one {field.name}"
                )
    _check_by_score(first)
    policy, backbone = first.policy, first.backbone
    for wrong, why in (
        (
            policy.has_host,
            f"host_budget={policy.host_budget} holds the evicted units of one text; compose contexts that were read "
            "without host_budget, or read the texts as one",
        ),
        (
            backbone.recurrent,
            f"layers of {backbone.model_type} carry a recurrent state, and there is none of texts that were read "
            "apart; read them as one",
        ),
        (
            not backbone.uniform,
            f"some layers of {backbone.model_type} hold only the last tokens of a text, so the texts cannot be put one "
            "after another; read them as one",
        ),
        (
            not policy.exact_bits and policy.positions == "original",
            'with positions="original" the codes of key_bits and value_bits are those of rotated keys, which cannot '
            'be moved; read the texts with positions="compact"',
        ),
    ):
        if wrong:
            raise ValueError(why)


def _check_answers(caches: Sequence[RetentionCache], budget: int | None) -> None:
    """Refuse what the first answer would cut down at once."""
    most, layers = caches[0].policy.decode_budget, len(caches[0].governed)
    held = sum(layer.fill for cache in caches for layer in cache.governed) // layers
    units = held if budget is None else min(held, budget)
    if most is not None and units >= most:
        raise ValueError(
            f"decode_budget={most} leaves no room for an answer beside the {units} units per KV head of all; give a "
            f"budget below {most}, or read the texts with a larger decode_budget"
        )


def _check_by_score(cache: RetentionCache) -> None:
    if cache.policy.recalls_blocks:
        raise ValueError(
            f"recall_by={cache.policy.recall_by} holds tokens and blocks by a rule of its own, so no score says which "
            "of them could go, or go elsewhere; read the text with another recall_by"
        )


def _resized(policy: RetentionPolicy, budget: int) -> RetentionPolicy:
    """Return a policy with another budget; the other numbers stay as far as they fit."""
    stabilizers = policy.stabilizers if policy.stabilizers < budget else budget // 4
    wanted = {**policy.wanted, "stabilizers": (stabilizers, budget)}  # nobody gave them for this budget
    given = {one.name: getattr(policy, one.name) for one in fields(policy) if one.name not in wanted}
    given |= {"budget": budget, "chunk_size": policy.chunk_size, "local_len": min(policy.local_len, budget)}
    return RetentionPolicy.following_from(given, wanted)


def _with_budget(cache: RetentionCache, budget: int) -> RetentionCache:
    """Move what a cache holds to one with another budget."""
    policy = _resized(cache.policy, budget)
    whole = RetentionCache(cache.model, cache.scorer, policy, store=cache.store)
    check_room(whole, cache.protected)
    load_state(whole, *saved_state(cache))
    whole.computation = cache.computation
    return whole


def _unsettle(cache: RetentionCache) -> None:
    for layer in cache.governed:
        layer.unsettle(cache.next_position, cache.seen)


def _settle(cache: RetentionCache) -> None:
    """Rotate keys to where they are now."""
    compact = cache.policy.positions == "compact" and not cache.backbone.slides
    cache.next_position = max(layer.reach for layer in cache.governed) if compact else cache.seen
    for layer in cache.governed:
        layer.settle(cache.next_position, cache.seen)


def _sized(caches: Sequence[RetentionCache], budget: int, tokens: int) -> RetentionPolicy:
    """Return the policy by which the texts of caches are read as one of so many tokens, with another budget."""
    return caches[-1].limits.steep(_resized(caches[-1].policy, budget), tokens, _taken(caches, budget, tokens))


def _taken(caches: Sequence[RetentionCache], budget: int, end: int) -> int:
    """Return the units of each KV head that are promised to protected spans of texts with `end` tokens in all."""
    return sum(promised(closed(cache.protected, end), budget) for cache in caches)


def _budgets(caches: Sequence[RetentionCache], policy: RetentionPolicy, tokens: int) -> tuple[int, ...]:
    """Return the units of each layer of caches, as at the end of a long read; the local tokens are part of them.

    What a layer does not hold goes to the others, in the same proportion.
    """
    last, budget = caches[-1], policy.budget
    held = [sum(cache.governed[nth].fill for cache in caches) for nth in range(len(last.governed))]
    own = min(budget, last.scorer.recent(budget))
    most = layer_budgets(policy, last.limits.heads, None, own, _taken(caches, budget, tokens))
    return tuple(divided(sum(most), most, held, least=1))


def _stays(cache: RetentionCache, budget: int, whole: RetentionCache | None = None) -> list[Stay | None]:
    """Return what stays in each layer of a cache, or of a whole that ends with it, after a read (None: all of it)."""
    held = whole or cache
    policy = _sized([held], budget, held.seen)
    most, local = _budgets([held], policy, held.seen), cache.policy.local_len
    protected = Protected(held.protected, policy, most)
    fills = [layer.fill for layer in held.governed]
    return [
        protected.stay(nth, held.seen, cache.scorer, units, min(units, local)) if units < fill else None
        for nth, (units, fill) in enumerate(zip(most, fills, strict=True))
    ]


def _cut(cache: RetentionCache, stays: Sequence[Stay | None]) -> None:
    for layer, stay in zip(cache.governed, stays, strict=True):
        if stay is not None:
            layer.evict(stay, cache.next_position)


def _share(caches: Sequence[RetentionCache], budget: int, read: int) -> None:
    """Cut each cache to its share of what stays beside the local tokens, which are those of the last of `read`."""
    last, policy = caches[-1], _sized(caches, budget, read)
    most = _budgets(caches, policy, read)
    protected = [Protected(cache.protected, policy, most) for cache in caches]
    for nth, room in enumerate(most):
        layers = [cache.governed[nth] for cache in caches]
        needed = [min(_taken([cache], budget, read), layer.fill) for cache, layer in zip(caches, layers, strict=True)]
        needed = divided(room, [float(units) or 1.0 for units in needed], needed)
        local = min(last.policy.local_len, room - sum(needed), layers[-1].fill - needed[-1])
        newest = [0] * (len(layers) - 1) + [local]
        rest = [layer.fill - units - own for layer, units, own in zip(layers, needed, newest, strict=True)]
        more = divided(room - local - sum(needed), [1.0] * len(rest), rest)
        for its, cache, layer, own, *units in zip(protected, caches, layers, newest, needed, more, strict=True):
            if own + sum(units) < layer.fill:
                stay = its.stay(nth, read, cache.scorer, own + sum(units), own, "raise budget")
                layer.evict(stay if cache is caches[0] else stay._replace(sinks=0), cache.next_position)


def _skip(cache: RetentionCache, tokens: int) -> None:
    """Drop the units of the first tokens of a text, and elsewhere the worst, so that heads hold as many as before."""
    if not tokens:
        return
    cache.protected = moved(cache.protected, 0, tokens)
    most = [_most_of(layer, tokens) for layer in cache.governed]
    if cache.ranks is not None:
        most = cache.ranks.largest(torch.tensor(most)).tolist()
    if len({layer.fill for layer in cache.governed}) == 1:  # layers that hold as many go on to
        most = [max(most)] * len(most)
    units = [layer.fill for layer in cache.governed]
    protected = Protected(cache.protected, cache.policy, units)
    for nth, (layer, count) in enumerate(zip(cache.governed, most, strict=True)):
        stay = protected.stay(nth, cache.seen, cache.scorer, units[nth] - count, 0)._replace(recent=0, sinks=0)
        layer.store.keep(_without(layer, tokens, count, stay), turned=False)


def _most_of(layer: RetentionLayer, tokens: int) -> int:
    """Return how many units per KV head a layer has to drop to be rid of the first tokens."""
    positions = layer.store.held(POSITIONS)
    count_K = ((positions != NO_UNIT) & (positions < tokens)).sum(-1)
    return int(count_K.max()) if isinstance(layer.store, DenseStore) else -(-int(count_K.sum()) // count_K.shape[1])


def _without(layer: RetentionLayer, tokens: int, count: int, stay: Stay) -> Kept:
    """Return what stays of a layer that drops `count` units per KV head, those of the first tokens before all."""
    store, units = layer.store, layer.fill - count
    if units < 1:
        raise ValueError(
            f"one of them holds nothing but the {tokens} tokens that all begin with, such as the system message; read "
            "it with a larger budget, or a shorter system message"
        )
    if isinstance(store, DenseStore):
        scores = store.held(SCORES).masked_fill(store.held(POSITIONS) < tokens, -torch.inf)
        return KeptPerHead(select_kept(scores, units, staying(scores, store.held(POSITIONS), stay)), layer.fill)
    ((scores_U, positions_U, counts),) = store.rows()  # type: ignore[attr-defined]
    scores_U = scores_U.masked_fill(positions_U < tokens, -torch.inf)
    pinned_U = staying_in_heads(scores_U, positions_U, counts, stay)
    kept, per_head = select_over_heads(scores_U, positions_U, counts, units, sinks_U=pinned_U)
    return KeptOverHeads((kept,), per_head[None].to("cpu"), (len(scores_U),))


def _move(cache: RetentionCache, distance: int) -> None:
    """Let a text begin that many tokens later."""
    cache.protected = moved(cache.protected, distance)
    for layer in cache.governed:
        layer.store.columns[POSITIONS] += distance
        keys = layer.store.keys
        if cache.policy.positions == "original" and distance and keys is not None:
            like = keys.new_empty(0, dtype=torch.float32)
            cos, sin = layer.store.rotary.at(torch.tensor([abs(distance)], device=keys.device), like)
            # Scaled tables carry a factor, as keys do already.
            magnitude = (cos[..., :1] ** 2 + sin[..., :1] ** 2).sqrt()
            turn = cos / magnitude, (sin if distance > 0 else -sin) / magnitude
            keys.copy_(layer.store.rotary.turn(keys.float(), *turn).to(keys.dtype))
