"""The second tier of a layer: what eviction dropped, in host memory, as far as a query may still want it.

A bounded tier holds the best units by score of all that was ever evicted. What is in it does not depend on how the text
was cut into chunks, as far as scores do not. A query recalls its own few, see `locret.lookups`. Keys wait un-rotated
like those of the fast tier, and are rotated with them.
"""

# B batch, N query heads, K KV heads, L queries, H slots, G units that come, U units that move, R recalled, D head dim

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from locret.backbone.attention import Recalled
from locret.cache.ragged import PackedTier, RaggedStore, distances, most_apart
from locret.cache.store import EMPTY, NO_UNIT, POSITIONS, QUERIES, SCORES, DenseStore, UnitRanks
from locret.cache.units import Units, Workspace
from locret.lookups import Ask, Lookup
from locret.policy.selectors import Kept, KeptPerHead, score_order

_MOVED = 4096
"""Units that are on their way at once."""


@dataclass(eq=False)
class HostTier(Units):
    """Units that were evicted from the fast tier of one layer."""

    store: DenseStore | PackedTier
    """Holds them as the fast tier's store does; its workspace is its own."""
    fast: DenseStore | RaggedStore
    lookup: Lookup
    """Finds what a query recalls."""
    most: int
    """Units per KV head, on average."""
    recall: int
    """Units that each query recalls."""
    resident: bool = False
    """Whether it lies in the fast tier's memory, for a layer that needs all of it in every step."""
    window: int = 0
    """Newest queries that the lookup looks from."""
    moved: int = 0
    """Bytes fetched from here so far."""
    counter = "host_fill"
    _index: tuple[Any] | None = None
    _padded: bool = False
    """Whether a row or head has empty slots, because it holds fewer units than others."""

    batch = property(attrgetter("store.batch"))
    fill = property(attrgetter("store.fill"))
    """Units per KV head, on average, empty slots of short rows included."""
    capacity = property(attrgetter("store.capacity"))
    longest = property(attrgetter("store.longest"))

    @property
    def queries(self) -> Tensor | None:
        """(B, N, window, D) newest queries; zeros before the first."""
        return self.store.tensors.get(QUERIES)

    @property
    def away_nbytes(self) -> int:
        """Bytes of the units that lie in host memory."""
        return 0 if self.resident else self.store.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of what lies in the fast tier's memory."""
        queries = 0 if self.queries is None else self.queries.nbytes
        return queries + (self.store.nbytes if self.resident else 0)

    def reserve(self, units: int) -> None:
        """Make room for this many units, or for all that may be held."""
        self.store.reserve(min(units, self.most))

    def take_in(self, kept: Kept) -> None:
        """Take the units that the fast tier is about to drop, all but the kept ones, as far as they find room."""
        fast, store = self.fast, self.store
        gone = kept.gone() if isinstance(kept, KeptPerHead) else _gone(fast.held(POSITIONS) != NO_UNIT, kept)
        batch, kv_heads, coming = gone.shape
        here = fast.keys.device if self.resident else torch.device("cpu")
        gone = gone.to(here)
        heads = torch.arange(batch * kv_heads, device=here).view(batch, kv_heads, 1)
        first, room = store.fill, min(coming, self.most - store.fill)
        if isinstance(store, PackedTier):
            store.open(fast, (gone != NO_UNIT).sum(-1).cpu())
        else:
            if first + room > store.capacity:
                self.reserve(max(first + room, 2 * store.capacity))
            store.open(fast, room)
            for name, buffer in store.buffers.items():  # what is masked counts nothing, unless it is NaN
                buffer[:, :, first : store.fill] = EMPTY.get(name, 0)
        if coming > room or isinstance(store, PackedTier):
            scores, positions = (fast.held(name).to(here).gather(2, gone.clamp_min(0)) for name in (SCORES, POSITIONS))
            new = _order(scores, positions.masked_fill(gone == NO_UNIT, NO_UNIT))
            old = _order(store.held(SCORES), store.held(POSITIONS))
            if isinstance(store, PackedTier):  # what is no slot takes no unit
                missing = (store.longest - store.counts).to(here)[..., None]
                old.masked_fill_(torch.arange(store.longest, device=here) < missing, torch.iinfo(torch.int64).max)
            compared = min(coming, store.longest)
            best, worst = new.topk(compared, dim=-1), old.topk(compared, dim=-1, largest=False)
            # Best against worst, second best against second worst: once one is not better, no other is.
            better = best.values > worst.values
            heads = heads.expand_as(better)[better]
            ranks, slots = gone.gather(2, best.indices)[better], worst.indices[better]
        else:
            heads, ranks = heads.expand_as(gone).flatten(), gone.flatten()
            slots = torch.arange(first, first + coming, device=here).expand_as(gone).flatten()
        for start in range(0, len(ranks), _MOVED):
            span = slice(start, start + _MOVED)
            units = fast.units(heads[span].to(fast.keys.device), ranks[span].to(fast.keys.device))
            store.put(heads[span], slots[span], {name: tensor.to(here) for name, tensor in units.items()})
        self.forget()

    def recalled(self, query: Tensor, **asked: Any) -> Recalled | None:
        """Return what (B, N, L, D) queries attend to besides the fast tier; None where nothing was evicted yet."""
        store, window = self.store, self._remembered(query)
        if not store.fill:
            return None
        if self._index is None:
            self._arrange()
        keys, packed = store.all_keys(), isinstance(store, PackedTier)
        positions = torch.empty(0) if packed else store.held(POSITIONS)  # packed heads have no empty slots
        if self._index is None:
            self._index = (self.lookup.index(keys, positions),)
        ask = Ask(
            query=query,
            window=window,
            keys=keys,
            positions=positions,
            padded=self._padded,
            index=self._index[0],
            count=min(self.recall, store.longest),
            **asked,
        )
        ranks = self.lookup.choose(ask)
        there = None
        if ranks is None:
            there = (positions != NO_UNIT)[:, :, None] if ask.padded else None
        else:
            if ranks.shape[1] == 1:
                ranks = ranks.expand(-1, keys.shape[1], -1, -1)
            if ask.padded or bool((ranks < 0).any()):
                there = ranks >= 0
                if ask.padded:
                    of_head = positions.repeat_interleave(ranks.shape[1] // positions.shape[1], dim=1)
                    there &= of_head.gather(2, ranks.clamp_min(0).flatten(2)).view(ranks.shape) != NO_UNIT
        found, values = self._fetched(ranks, query.device)
        there = None if there is None else there.to(query.device)
        if there is not None and packed:  # what is masked counts nothing, unless it is NaN
            found, values = (states.masked_fill(~there[..., None], 0) for states in (found, values))
            there = None if bool(there.all()) else there
        return Recalled(found, values, there)

    def _fetched(self, ranks: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return keys and values of units, (B, heads, queries, R, D), on the device; what is held as codes moves so."""
        held = self.store.as_held(None if ranks is None else ranks.clamp_min(0))
        if not self.resident:
            self.moved += sum(tensor.nbytes for tensor in held.values())
        keys, values = self.store.as_states({name: _sent(tensor, device) for name, tensor in held.items()})
        return (keys[:, :, None], values[:, :, None]) if ranks is None else (keys, values)

    def _remembered(self, query: Tensor) -> Tensor:
        """Return the newest queries, with (B, N, L, D) those that come now."""
        if not self.window:
            return query
        if (held := self.queries) is None:
            held = query.new_zeros(*query.shape[:2], self.window, query.shape[-1])
        newest = torch.cat([held, query], dim=2)[:, :, -self.window :].clone()
        self.store.tensors[QUERIES] = newest
        return newest

    def take_back(self) -> None:
        """Forget the newest query; the units here are older."""
        if (held := self.queries) is not None:
            self.store.tensors[QUERIES] = torch.cat([torch.zeros_like(held[:, :, :1]), held[:, :, :-1]], dim=2)

    def forget(self) -> None:
        """Drop the index: units have changed."""
        self._index = None

    def _arrange(self) -> None:
        """Put units in the order of the text, behind the empty slots of short rows."""
        if self.store.fill:
            self.store.sort()
            if isinstance(self.store, DenseStore):
                empty = (self.store.held(POSITIONS) == NO_UNIT).sum(-1)
                self._padded = bool(empty.any())
                self.store.row_start = empty.amin(-1) if bool(empty.amin(-1).any()) else None

    def ranks(self, *, again: bool) -> tuple[UnitRanks, UnitRanks]:
        """Return the ranks, among the units of both tiers, of the fast ones and of these; puts these in order.

        Those that are spaced are as far apart as they were before if it is done `again`, to turn keys back.
        """
        self.forget()
        self._arrange()
        mine = self.store.held(POSITIONS).contiguous()
        others = self.fast.held(POSITIONS).contiguous()
        held = mine.shape[-1] + others.shape[-1]
        here, there = mine.device, others.device
        own = torch.arange(mine.shape[-1], device=here) + torch.searchsorted(others.to(here), mine)
        fast_ranks = torch.arange(others.shape[-1], device=here) + torch.searchsorted(mine, others.to(here))
        if isinstance(self.fast, RaggedStore) and self.fast.spacing > 1:
            every = mine.new_full((*mine.shape[:2], held), NO_UNIT).scatter_(2, own, mine)
            far = self._spread(every.scatter_(2, fast_ranks, others.to(here)), again)
            held = int(far.max())
            own, fast_ranks = held - far.gather(2, own), held - far.gather(2, fast_ranks)
        return UnitRanks(fast_ranks.to(there), held), UnitRanks(own, held)

    def _spread(self, positions: Tensor, again: bool) -> Tensor:
        """Return (B, K, S) how far units of both tiers, ascending, are from the next token where they are spaced."""
        assert isinstance(self.fast, RaggedStore)
        far, after = torch.empty_like(positions, dtype=torch.int64), self.fast.upcoming or 0
        aparts = chain.from_iterable(most_apart(self.fast, (positions != NO_UNIT).sum(-1), again=again))
        for own, its, apart in zip(far.flatten(0, 1), positions.flatten(0, 1), aparts, strict=True):
            own.copy_(distances(its, its.new_full((1,), after), apart))
        return far

    def select_rows(self, rows: Tensor) -> None:
        self.store.select_rows(rows)
        self.forget()

    def trim(self) -> None:
        self._arrange()
        self.store.trim()
        self.forget()

    def join(self, others: Sequence[Self], room: int = 0) -> None:
        if any(tier.fill for tier in others):
            for tier in others:
                tier.store.open(tier.fast, 0)  # those that nothing came to have buffers too
                tier._arrange()
            self.store.join([tier.store for tier in others])  # type: ignore[misc]
        self.moved += sum(tier.moved - self.moved for tier in others)  # each has gone on counting from here
        self.forget()

    def state(self) -> dict[str, Tensor]:
        self._arrange()
        held = self.store.state() if self.fill else {}
        held.pop(QUERIES, None)
        return held if self.queries is None else {**held, "queries": self.queries}

    def load(self, tensors: Mapping[str, Tensor], fill: int) -> None:
        """See `Units`: each tensor goes to where this tier has its memory."""
        device = self.fast.keys.device
        own = {name: tensor.to(device if self.resident else "cpu") for name, tensor in tensors.items()}
        if self.window and "queries" in own:
            own[QUERIES] = own.pop("queries").to(device)
        self.store.load(own, fill)
        self.store.tensors = {n: self.store._anew(n, held).copy_(held) for n, held in self.store.tensors.items()}
        self.forget()

    def copy_beside(self, fast: DenseStore | RaggedStore) -> Self:
        """Return an independent copy beside the copy of its fast tier."""
        twin = copy.copy(self)
        twin.store, twin.fast = self.store.copy(Workspace()), fast
        twin.forget()
        return twin


def _gone(there: Tensor, kept: Kept) -> Tensor:
    """Return (B, K, G) int64 ranks of the units that go, ascending; -1 behind those of heads that drop fewer.

    Args:
        there: (B, K, S) bool, False in front of heads with fewer units than others; ranks are counted in it.
        kept: The units that stay, counted through all heads of a row.
    """
    goes = torch.zeros_like(there)
    for own, held, ranks in zip(goes.flatten(1), there.flatten(1), kept.gone(), strict=True):
        own[held.nonzero()[ranks, 0]] = True
    order = goes.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[..., : int(goes.sum(-1).max())]
    return order.masked_fill(~goes.gather(-1, order), NO_UNIT)


def _order(scores: Tensor, positions: Tensor) -> Tensor:
    """Return int64 numbers in the order in which units are worth keeping, different for all of a head's units."""
    order = (score_order(scores).to(torch.int64) << 32) + positions
    return order.masked_fill(positions == NO_UNIT, torch.iinfo(torch.int64).min)


def _sent(states: Tensor, device: torch.device) -> Tensor:
    """Return states on the device; the host does not wait for the copy, which only pinned memory allows."""
    if states.device == device or device.type != "cuda":
        return states.to(device)
    return states.pin_memory().to(device, non_blocking=True)


def host_memory(shape: Sequence[int], *, dtype: torch.dtype, device: object) -> Tensor:
    """Return uninitialised memory of the host, pinned where there is a CUDA device."""
    return torch.empty(shape, dtype=dtype, pin_memory=torch.cuda.is_available())
