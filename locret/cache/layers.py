"""The layers of a cache: which store, which second tier and which selector each of them gets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locret import lookups
from locret.backbone.adapters import BOTH, NONE, RECURRENT, Backbone
from locret.backbone.rotary import Rotary
from locret.base import plugins
from locret.base.nearest import nearest
from locret.cache.block_layer import BlockLayer, block_columns
from locret.cache.disk import Disk
from locret.cache.host import HostTier
from locret.cache.layer import RetentionLayer
from locret.cache.limits import Limits
from locret.cache.merging import Folding
from locret.cache.quantised import QuantisedStore
from locret.cache.ragged import RaggedStore
from locret.cache.rounding import Form, forms_of
from locret.cache.sliding import SlidingLayer
from locret.cache.states import EmptyLayer, States
from locret.cache.store import DenseStore, Store, Workspace
from locret.mergers import Merger
from locret.policy.policy import EVERYTHING, NO_MERGER, RetentionPolicy
from locret.policy.selectors import ByShares, OverHeads, PerHead, Selector
from locret.scorers import Scorer

STORES: dict[str, type[Store]] = {store.name: store for store in (DenseStore, RaggedStore)}
"""Every way of holding units. To add one: a file next to `ragged.py`, and its class here."""


def find_store(store: type[Store] | str) -> type[Store]:
    """Return a class of stores, by itself or by name; see `RetentionCache`.

    Raises:
        ValueError: If it cannot be loaded, or is not a store.
    """
    found: Any = store
    if isinstance(store, str):
        announced = plugins.announced(plugins.STORES)
        if store in STORES:
            return STORES[store]
        if store in announced:
            found = plugins.load_announced(announced[store], "store")
        elif plugins.is_reference(store):
            found = plugins.load(store, "store")
        else:
            near = nearest(store, [*STORES, *announced]) or list(STORES)
            raise ValueError(f'store "{store}" is unknown; did you mean {" or ".join(near)}?')
    if not (isinstance(found, type) and issubclass(found, Store)):
        raise ValueError(f'store "{store}" is no subclass of locret.cache.store.Store; derive it from that')
    if missing := sorted(found.__abstractmethods__) + [one for one in ("name", "holds") if not hasattr(found, one)]:
        raise ValueError(f'store "{store}" does not define {", ".join(missing)}; see locret/cache/store.py')
    if found.holds not in STORES:
        raise ValueError(f'store "{store}" holds "{found.holds}" units; choose one of {", ".join(STORES)}')
    return found


def check_latent(policy: RetentionPolicy, model_type: str) -> None:
    """Refuse what cannot be done with units whose key and value are two parts of what queries attend to.

    Raises:
        ValueError: Naming the setting.
    """
    settings = {
        "host_budget": policy.host_budget,
        "merge": None if policy.merge == NO_MERGER else policy.merge,
    }
    for name, value in settings.items():
        if value is not None:
            raise ValueError(
                f"{name}={value} takes keys and values apart, but {model_type} attends to a rotated key and a latent "
                f"side by side; leave {name} out, or take another backbone"
            )


def check_lent(policy: RetentionPolicy, backbone: Backbone) -> None:
    """Refuse what looks at the queries of one layer alone, where several attend to the same units.

    Raises:
        ValueError: Naming the setting.
    """
    if policy.host_budget is not None:
        raise ValueError(
            f"host_budget={policy.host_budget} goes by the queries of one layer, but the last layers of "
            f"{backbone.model_type} attend to the units of earlier ones; leave host_budget out, or take another "
            "backbone"
        )


def checked_disk(disk: Disk | str | Path | None, policy: RetentionPolicy) -> Disk | None:
    """Return the file for a second tier that an argument means.

    Raises:
        ValueError: If it is no place for one, or the policy has no second tier.
        OSError: If it cannot be written.
    """
    if disk is None:
        return None
    if not policy.has_host:
        where = disk.path if isinstance(disk, Disk) else disk
        raise ValueError(f"disk={where} holds a second tier, but there is none; give host_budget and recall as well")
    if policy.recalls_blocks:
        raise ValueError(
            f"recall_by={policy.recall_by} holds blocks in host memory, not in a file; leave disk out, or take another "
            "recall_by"
        )
    return disk if isinstance(disk, Disk) else Disk(disk)


@dataclass(frozen=True, kw_only=True)
class LayerMaker:
    """What the layers of one cache are made from."""

    backbone: Backbone
    policy: RetentionPolicy
    scorer: Scorer
    prepared: Any
    """What the scorer needs of the backbone."""
    merger: Merger | None
    merging: Any
    """What the merger needs of the backbone."""
    limits: Limits
    rotary: Rotary
    workspace: Workspace
    store: type[Store] | None
    """What holds the units, if it is not ours."""
    disk: Disk | None
    """Where the second tier is, if not in host memory."""
    states: int
    """How many states a layer has that carries any."""

    def carrier(self, index: int) -> States | None:
        """Return the states of the layer with this index, beside what else it holds; None: it has none."""
        return States(self.states) if self.backbone.kinds[index] in (RECURRENT, BOTH) else None

    def layer(self, index: int) -> RetentionLayer | SlidingLayer | EmptyLayer:
        """Return the layer of the backbone with this index.

        Raises:
            ValueError: If the store cannot hold what the policy selects.
        """
        if self.backbone.kinds[index] in (RECURRENT, NONE):
            return EmptyLayer()
        if index not in self.backbone.layers:
            assert self.backbone.window is not None
            return SlidingLayer(self.backbone.window)
        selector: Selector = PerHead()
        if self.policy.head_budgets == "adaptive":
            selector = OverHeads(self.policy.head_floor, self.scorer.relative(self.prepared))
        elif self.policy.head_budgets == "shares":
            assert self.policy.head_shares is not None
            heads = [shape.num_kv_heads for shape in self.backbone.full_shapes]
            first = sum(heads[: self.backbone.layers.index(index)])
            selector = ByShares(self.policy.head_shares[first : first + self.backbone.shape(index).num_kv_heads])
        kind = self.store or STORES[selector.store]
        if kind.holds != selector.store:
            raise ValueError(
                f'store {kind.name} holds "{kind.holds}" units, but head_budgets="{self.policy.head_budgets}" selects '
                f'"{selector.store}" ones; change head_budgets, or take another store'
            )
        if self.backbone.shape(index).latent:
            check_latent(self.policy, self.backbone.model_type)
        if index in self.backbone.lenders:
            check_lent(self.policy, self.backbone)
        if self.policy.recalls_blocks:
            return self._block_layer(kind, index)
        nth = self.backbone.layers.index(index)
        rotary = self.rotary.of(index)
        store = self._store(kind, rotary, forms_of(self.policy, self.limits.layers)[nth], self.workspace)
        host = self._host(kind, rotary, nth)
        folding = None if self.merger is None else Folding(self.merger, self.merging, index)
        return RetentionLayer(store, selector, self.policy.positions == "compact", host, folding)

    def _store(self, kind: type[Store], rotary: Rotary, form: Form | None, workspace: Workspace) -> Store:
        if form is None:
            return kind(rotary, workspace, self.scorer.columns)
        if self.store is not None:
            raise ValueError(
                f"store {kind.name} holds units as they are, but key_bits={self.policy.key_bits} and "
                f"value_bits={self.policy.value_bits}; use 16 bits, or leave the store out"
            )
        return QuantisedStore(rotary, workspace, self.scorer.columns, form=form)

    def _block_layer(self, kind: type[Store], index: int) -> BlockLayer:
        if not issubclass(kind, DenseStore):
            raise ValueError(
                f"store {kind.name} cannot give blocks away, as recall_by={self.policy.recall_by} does; take another "
                "recall_by, or derive the store from locret.cache.store.DenseStore"
            )
        shape = self.backbone.check_alike(f"recall_by={self.policy.recall_by}")
        columns = {**self.scorer.columns, **block_columns(shape)}
        store = kind(self.rotary.of(index), self.workspace, columns)
        return BlockLayer(store, self.policy.blocks(), shape.num_heads)

    def _host(self, kind: type[Store], rotary: Rotary, nth: int) -> HostTier | None:
        policy = self.policy
        if policy.host_budget is None:
            return None
        if not issubclass(kind, DenseStore):
            raise ValueError(
                f"store {kind.name} has no second tier, but host_budget={policy.host_budget}; leave host_budget out, "
                "or derive the store from locret.cache.store.DenseStore"
            )
        store = self._store(kind, rotary, forms_of(self.policy, self.limits.layers, host=True)[nth], Workspace())
        assert isinstance(store, DenseStore)
        return HostTier(
            store,
            lookups.get(policy.recall_by),
            None if policy.host_budget == EVERYTHING else int(policy.host_budget),
            policy.recall,
            by_score=policy.host_by == "score",
            resident=self.limits.resident[nth],
            window=self.limits.windows[nth],
            empty=None if self.disk is None or self.limits.resident[nth] else self.disk.empty,
        )
