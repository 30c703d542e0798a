"""The layers of a cache: which store, which second tier and which selector each of them gets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from locret.backbone.shape import NONE, RECURRENT, Backbone
from locret.base import plugins
from locret.base.nearest import nearest
from locret.cache.block_layer import BlockLayer, block_columns
from locret.cache.host import HostTier, host_memory
from locret.cache.layer import RetentionLayer
from locret.cache.merging import Folding
from locret.cache.quantised import QuantisedStore
from locret.cache.ragged import PackedTier, RaggedStore, mean_units
from locret.cache.rounding import forms_of
from locret.cache.sliding import SlidingLayer
from locret.cache.states import EmptyLayer
from locret.cache.store import DenseStore, Store, Workspace
from locret.policy.policy import NO_MERGER, RetentionPolicy
from locret.policy.selectors import ByShares, OverHeads, PerHead, Selector

if TYPE_CHECKING:
    from locret.cache.cache import RetentionCache

STORES: dict[str, type[Store]] = {store.name: store for store in (DenseStore, RaggedStore)}
"""Every way of holding units as they are; fewer bits: `quantised.py`. To add one: a file next to `ragged.py`, and its
class here."""


def find_store(store: type[Store] | str) -> type[Store]:
    """Return a class of stores, by itself or by name; see `RetentionCache`."""
    found: Any = store
    if isinstance(store, str):
        if store in STORES:
            return STORES[store]
        if not plugins.is_reference(store):
            near = nearest(store, STORES) or list(STORES)
            raise ValueError(f'store "{store}" is unknown; did you mean {" or ".join(near)}?')
        found = plugins.load(store, "store")
    if not (isinstance(found, type) and issubclass(found, Store)):
        raise ValueError(f'store "{store}" is no subclass of locret.cache.store.Store; derive it from that')
    if missing := sorted(found.__abstractmethods__) + [one for one in ("name", "holds") if not hasattr(found, one)]:
        raise ValueError(f'store "{store}" does not define {", ".join(missing)}; see locret/cache/store.py')
    if found.holds not in STORES:
        raise ValueError(f'store "{store}" holds "{found.holds}" units; choose one of {", ".join(STORES)}')
    return found


def check_backbone(policy: RetentionPolicy, backbone: Backbone, index: int) -> None:
    """Refuse what a layer of the backbone cannot do."""
    merge = None if policy.merge == NO_MERGER else policy.merge
    apart = f"takes keys and values apart, but {backbone.model_type} attends to a rotated key and a latent side by side"
    alone = f"goes by the queries of one layer, but the last layers of {backbone.model_type} attend to units of others"
    latent, lent = backbone.shape(index).latent, index in backbone.lenders
    for name, value, clashes, why in (
        ("host_budget", policy.host_budget, latent, apart),
        ("merge", merge, latent, apart),
        ("host_budget", policy.host_budget, lent, alone),
    ):
        if value is not None and clashes:
            raise ValueError(f"{name}={value} {why}; leave {name} out, or take another backbone")


def make_layer(cache: RetentionCache, index: int) -> RetentionLayer | SlidingLayer | EmptyLayer:
    """Return the layer of a cache for the one of its backbone with this index."""
    policy, backbone = cache.policy, cache.backbone
    if backbone.kinds[index] in (RECURRENT, NONE):
        return EmptyLayer()
    if index not in backbone.layers:
        assert backbone.window is not None
        return SlidingLayer(backbone.window)
    nth, rotary, columns = backbone.layers.index(index), cache.rotary.of(index), cache.scorer.columns
    selector = _selector(cache, nth)
    kind = cache.store or STORES[selector.store]
    if kind.holds != selector.store:
        raise ValueError(
            f'store {kind.name} holds "{kind.holds}" units, but head_budgets="{policy.head_budgets}" selects '
            f'"{selector.store}" ones; change head_budgets, or take another store'
        )
    if (policy.has_host or policy.diversity) and not issubclass(kind, DenseStore | RaggedStore):
        raise ValueError(
            f"store {kind.name} has no second tier and does not say where its keys are, but host_budget="
            f"{policy.host_budget}, recall_by={policy.recall_by} and diversity={policy.diversity}; leave those out, or "
            "derive the store from one of ours"
        )
    check_backbone(policy, backbone, index)
    if policy.recalls_blocks:
        shape = backbone.check_alike(f"recall_by={policy.recall_by}")
        near = kind(rotary, cache.workspace, {**columns, **block_columns(shape)})
        assert isinstance(near, DenseStore)
        return BlockLayer(near, policy.blocks(), shape.num_heads)

    def store(workspace: Workspace, *, host: bool = False) -> Store:
        if (form := forms_of(policy, len(backbone.layers), host=host)[nth]) is None:
            return (PackedTier if host and issubclass(kind, RaggedStore) else kind)(rotary, workspace, columns)
        if cache.store is not None:
            raise ValueError(
                f"store {kind.name} holds units as they are, but key_bits={policy.key_bits} and value_bits="
                f"{policy.value_bits}; use 16 bits, or leave the store out"
            )
        return QuantisedStore(rotary, workspace, columns, form=form)

    own, tier = store(cache.workspace), None
    if isinstance(own, RaggedStore):
        own.spacing, own.reach = policy.spacing, backbone.max_positions - policy.chunk_size
    if policy.host_budget is not None and (lookup := policy.lookup()) is not None:
        far, limits = store(Workspace(), host=True), cache.limits
        assert isinstance(own, DenseStore | RaggedStore)
        assert isinstance(far, DenseStore | PackedTier)
        beside, most = limits.resident[nth], torch.tensor(limits.tiers[nth])
        far.empty = torch.empty if beside else host_memory
        if isinstance(far, PackedTier):
            far.most = most
        tier = HostTier(far, own, lookup, mean_units(most), policy.recall, beside, limits.windows[nth])
    folding = None if cache.merger is None else Folding(cache.merger, cache.merging, index)
    return RetentionLayer(own, selector, policy.positions == "compact", tier, folding, policy.diversity)


def _selector(cache: RetentionCache, nth: int) -> Selector:
    policy = cache.policy
    if policy.head_budgets == "adaptive":
        return OverHeads(policy.head_floor, cache.scorer.relative(cache.prepared))
    if policy.head_budgets != "shares":
        return PerHead()
    heads = [shape.num_kv_heads for shape in cache.backbone.full_shapes]
    own = slice(sum(heads[:nth]), sum(heads[: nth + 1]))
    return ByShares(own, cache.backbone.max_positions - policy.chunk_size)
