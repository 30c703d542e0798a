"""A compact cache as an ordinary prefix: units at the positions 0, 1, ... of a `DynamicCache`, for any other code.

With compact positions and as many units in every head of every layer, what is held is what an engine would hold for a
prompt of that many tokens; slot i may hold another token in each head. Nobody has to be told that anything was evicted.
"""

# B batch, K KV heads, S units, D head dim

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache

from locret.backbone.rotary import Rotary, long_factors, rotary_parameters
from locret.backbone.shape import Backbone
from locret.cache.store import POSITIONS
from locret.policy.policy import RetentionPolicy

if TYPE_CHECKING:
    from locret.cache.cache import RetentionCache


def to_dynamic_cache(cache: RetentionCache) -> DynamicCache:
    """Return what a cache holds as an ordinary prefix; see `RetentionCache.to_dynamic_cache`."""
    if not cache.seen:
        raise ValueError("the cache has read nothing yet; call locret.prefill before exporting it")
    if cache.pad is not None:
        raise ValueError("rows of different lengths are no prefix of one length; export each row of cache.split(rows)")
    decoder, units = cache.decoder, {layer.fill for layer in cache.governed}
    check_prefix(cache.policy, cache.backbone, units, rotary_parameters(decoder), states=True)
    # By its config a cache has layers for states; without one it makes layers of units as they come.
    exported = DynamicCache(config=decoder.config) if cache.carriers else DynamicCache()
    with long_factors(decoder):
        for index, layer in zip(cache.backbone.layers, cache.governed, strict=True):
            view, rotary = layer.store.view(cache.next_position), layer.store.rotary
            others = None if layer.host is None or not layer.host.fill else layer.host.store.held(POSITIONS)
            now = positions_now(layer.store.held(POSITIONS), others, cache.next_position)
            exported.update(turned_back(view.keys, rotary, now), view.values.clone(), index)
    for index, states in cache.carriers.items():
        states.give(exported.layers[index])
    return exported


def check_prefix(
    policy: RetentionPolicy,
    backbone: Backbone,
    units: Set[int],
    rotary: Mapping[str, Any],
    *,
    states: bool = False,
    uneven: bool = False,
) -> None:
    """Refuse a policy that leaves no prefix, and numbers of `units` in layers that make none.

    With `states` those of recurrent layers may go with it, with `uneven` KV heads may hold different numbers of units.
    """
    if policy.recalls_blocks:
        raise ValueError(f"recall_by={policy.recall_by} gives far units one position, which no ordinary prefix has")
    if policy.positions != "compact":
        raise ValueError(
            f'positions="{policy.positions}" leaves gaps between the positions of units, which no ordinary prefix has; '
            'read the text with positions="compact" (--positions compact)'
        )
    if backbone.recurrent and not states:
        raise ValueError(
            f"layers of {backbone.model_type} carry a recurrent state, which a prefix of keys and values does not "
            "hold; answer with locret.generate, or take cache.to_dynamic_cache(), which has the states too"
        )
    if backbone.slides:
        raise ValueError(
            f"some layers of {backbone.model_type} slide over a window and hold other units than the rest, so there is "
            "no prefix of one length; save the context with save_cache instead"
        )
    backbone.check_alike("an ordinary prefix")
    if is_uneven(policy, units) and not uneven:
        raise ValueError(
            f'head_budgets="{policy.head_budgets}" and layer_budgets="{policy.layer_budgets}" leave heads or layers '
            "with different numbers of units, and a prefix has one length; read the text with uniform budgets"
        )
    original = rotary.get("original_max_position_embeddings") if rotary.get("rope_type") == "longrope" else 0
    if not isinstance(original, int) or max(units) < original:
        raise ValueError(
            f"{backbone.model_type} rotates keys in another way below {original} tokens, and the prefix "
            f"would have {max(units)}; raise budget to at least {original}, or answer with locret.generate"
        )


def is_uneven(policy: RetentionPolicy, units: Set[int]) -> bool:
    """Return whether KV heads hold different numbers of units, where layers hold these on average."""
    return policy.head_budgets != "uniform" or len(units) > 1


def mean_units(layers: Sequence[int]) -> int:
    """Return how many units KV heads hold on average over layers, rounded up."""
    return -(-sum(layers) // len(layers))


def uneven_units(
    tensors: Mapping[str, Tensor],
    numbers: Mapping[str, Any],
    policy: RetentionPolicy,
    backbone: Backbone,
    rotary: Mapping[str, Any],
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[tuple[int, ...], ...]]:
    """Return what `saved_state` says of one row as units that an engine takes head by head.

    Returns:
        For each layer keys and values, (units, D), head after head, rotated to end before the next position; and how
        many units each KV head has.
    """
    layers = numbers["layers"]
    check_prefix(policy, backbone, {counters["fill"] for counters in layers}, rotary, uneven=True)
    if policy.has_host or not (policy.exact_bits and all(counters["rotated"] for counters in layers)):
        raise ValueError(
            "units in codes, in a second tier or in the middle of a read are no prefix; read the text anew"
        )
    parts: dict[str, list[Tensor]] = {"keys": [], "values": []}
    heads = []
    for nth, counters in enumerate(layers):
        if (counts := tensors.get(f"layers.{nth}.counts")) is None:  # (1, K, U, D), as many in each head
            check_one_row(len(tensors[f"layers.{nth}.keys"]))
            counts = torch.full((1, backbone.num_kv_heads), counters["fill"])
        check_one_row(len(counts))
        heads.append(tuple(counts[0].tolist()))
        for name, part in parts.items():
            states = tensors[f"layers.{nth}.{name}"]
            part.append(states.reshape(-1, states.shape[-1]).clone())
    return tuple(parts["keys"]), tuple(parts["values"]), tuple(heads)


def check_one_row(rows: int) -> None:
    """Refuse a batch where one context is wanted."""
    if rows > 1:
        raise ValueError(f"it holds {rows} rows, and a context is one; export each row of cache.split(rows)")


def positions_now(positions: Tensor, others: Tensor | None, base: int) -> Tensor:
    """Return the (B, K, S) rotary positions of units: their ranks among all, the newest of which is before `base`.

    `others` are the positions of the units of a second tier, if there is one.
    """
    units = positions.shape[-1]
    if others is None:
        return torch.arange(base - units, base, device=positions.device).expand(positions.shape)
    ranks = torch.cat([positions, others.to(positions.device)], dim=2).argsort(dim=2).argsort(dim=2)
    return base - ranks.shape[-1] + ranks[..., :units]


def turned_back(keys: Tensor, rotary: Rotary, now: Tensor) -> Tensor:
    """Turn keys from the (B, K, S) positions that they have now to 0, 1, ..."""
    too_far = now - torch.arange(now.shape[-1], device=now.device)
    if not too_far.any():
        return keys.clone()  # bit for bit
    # No table of all positions up to the farthest: where that is, a file says.
    distances, which = too_far.unique(return_inverse=True)
    at = torch.cat([distances.new_zeros(1), distances])
    cos, sin = rotary.at(at, keys.new_empty(0, dtype=torch.float32))
    magnitude = cos[0, 0]  # scaled tables carry a factor, which the keys have already
    return rotary.turn_back(keys.float(), (cos[1:] / magnitude)[which], (sin[1:] / magnitude)[which]).to(keys.dtype)
