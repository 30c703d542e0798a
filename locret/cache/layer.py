"""The cache layer of full attention: units in a store, what scorers say of them, and the choice of those that stay."""

# B batch, K KV heads, L new tokens, S slots, D head dim

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, cast

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin
from typing_extensions import Self

from locret.backbone.attention import View
from locret.backbone.chunk import Projections
from locret.cache.blocks import Blocks
from locret.cache.diverse import Diverse
from locret.cache.host import HostTier
from locret.cache.merging import Folding
from locret.cache.ragged import RaggedStore
from locret.cache.store import SCORES, DenseStore, Part, Store
from locret.cache.units import Units, Workspace
from locret.policy.selectors import Selector, Stay

HOST = "host."
"""What the names of the second tier's tensors begin with."""


class RetentionLayer(CacheLayerMixin):
    """Scored units of one full-attention layer. With compact positions keys wait un-rotated while a prompt is read."""

    is_sliding = False
    is_compileable = False
    raw = False
    """Whether keys are never rotated where they lie, while a prompt is read or answered."""

    def __init__(
        self,
        store: Store,
        selector: Selector,
        compact: bool,
        host: HostTier | None = None,
        folding: Folding | None = None,
        diversity: float = 0.0,
    ) -> None:
        # Not the base's __init__: it would set keys and values, which only the store has.
        self.store, self.selector, self.compact, self.host, self.folding = store, selector, compact, host, folding
        self.diversity = diversity
        self.rotated = False
        """Whether keys are rotated to their slots, as answers need them; compact positions only."""

    @property
    def holders(self) -> dict[str, Units]:
        """What there is to be copied, joined and saved, by what the names of its tensors begin with in a file."""
        return {"": self.store} if self.host is None else {HOST: self.host, "": self.store}

    @property
    def is_initialized(self) -> bool:
        """Whether anything has been read."""
        return bool(self.store.batch)

    @property
    def fill(self) -> int:
        """Units per KV head, on average."""
        return self.store.fill

    @property
    def capacity(self) -> int:
        """Slots per KV head, on average."""
        return self.store.capacity

    @property
    def held(self) -> int:
        """Units of both tiers, of the KV head that holds the most."""
        return self.store.longest + (0 if self.tier is None else self.tier.longest)

    @property
    def tier(self) -> HostTier | Blocks | None:
        """What holds units in host memory."""
        return self.host

    @property
    def reach(self) -> int:
        """How far rotary positions reach while an answer is written."""
        return self.held

    def append(self, keys: Tensor, values: Tensor, raw_keys: Tensor | None, positions: Tensor) -> None:
        """Add (B, K, L, D) units; `raw_keys` are the keys before rotation, where those are to wait, and else None."""
        self.store.append(keys if raw_keys is None else raw_keys, values, positions, None if raw_keys is None else keys)

    def view(self, base: int, projections: Projections) -> View:
        """Return what queries attend to; `base` is the rotary position of the first new token."""
        view = self.store.view(base)
        return view if projections.latent is None else self.store.side_by_side(view)

    def parts(self, view: View, new: int, newest_only: bool) -> Iterator[Part]:
        """Yield what a scorer rates together of a view with `new` units per head; older ones if they matter."""
        return self.store.parts(view, new, newest_only)

    def rate(
        self, scores: Tensor, columns: Mapping[str, Tensor] | None = None, where: tuple[int, int] | None = None
    ) -> None:
        """Store (B, K, L) scores and columns of the newest L units, of all heads or of the one that `where` names."""
        self.store.write(SCORES, scores, where)
        for name, values in (columns or {}).items():
            self.store.write(name, values, where)

    def evict(self, stay: Stay, base: int) -> None:
        """Keep the best units, as many as `stay` says; `base` is the position after the newest one."""
        if self.store.fill <= stay.budget:
            return
        settled, units = self.rotated, cast(Any, self.store)
        if self.diversity or self.host is not None or self.folding is not None:
            self.unsettle(base, None)
        if self.diversity:
            units = Diverse(units, self.diversity)
        kept = self.selector.select(units, stay)
        if self.host is not None:
            self.host.take_in(kept)
        if self.folding is not None:
            self.folding.fold(self.store, kept, stay, by_text=not self.compact)
        self.store.keep(kept, turned=self.rotated)
        if settled and not self.rotated:
            self.settle(base, None)

    def settle(self, base: int, seen: int | None) -> None:
        """Rotate kept keys in place for decoding. Compact positions only.

        Args:
            base: The rotary position of the next token.
            seen: Its place in the text, for units that are spaced.
        """
        if self.compact and not self.rotated:
            self._turn(base, seen, back=False)
        self.rotated = self.compact

    def unsettle(self, base: int, seen: int | None) -> None:
        """Undo `settle`, so that another prompt can be read; arguments as there."""
        if self.rotated:
            self._turn(base, seen, back=True)
        self.rotated = False

    def _turn(self, base: int, seen: int | None, *, back: bool) -> None:
        """Rotate keys to their slots, of both tiers to their ranks among all units, or undo that."""
        self.store.upcoming = seen
        if self.host is None:
            self.store.turn_keys(base, back=back)
            return
        ranks = self.host.ranks(again=back) if self.host.fill else (None, None)
        self.host.store.lag_like(self.host.fast)
        for store, own in zip((self.host.fast, self.host.store), ranks, strict=True):
            store.turn_keys(base, own, back=back)

    def copy(self, workspace: Workspace) -> Self:
        """Return an independent copy."""
        twin = copy.copy(self)
        twin.store = self.store.copy(workspace)
        if self.host is not None:
            assert isinstance(twin.store, DenseStore | RaggedStore)
            twin.host = self.host.copy_beside(twin.store)
        return twin

    def lazy_initialization(self, *_: object, **__: object) -> None:
        """Do nothing: the store makes its buffers."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Refuse: a unit needs a position and a score, which only the whole cache knows."""
        raise ValueError(
            "a retention layer is filled through its RetentionCache, by locret.prefill and locret.generate"
        )

    def get_seq_length(self) -> int:
        """Slots in use."""
        return self.fill

    def get_max_length(self) -> int:
        """No fixed maximum."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Sizes that a (tokens x slots) mask would have."""
        return self.fill + query_length, 0
