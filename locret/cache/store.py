"""Where the units of a layer are held: what every store can do, and the dense one, with as many units in all heads.

A store moves bytes. It knows nothing of scores, budgets or phases: what a method needs to know about a unit (its score,
its original position, whatever else a scorer declares) is a column that travels with the unit.
"""

# B batch, K KV heads, L new tokens, S slots, C kept slots, D head dim

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

from locret.backbone.attention import Recalled, View
from locret.backbone.rotary import Rotary
from locret.cache.units import EMPTY, NO_UNIT, POSITIONS, ROW_START, SCORES, Units, Workspace
from locret.lookups.base import Keys
from locret.policy.selectors import Kept, KeptPerHead

__all__ = ["EMPTY", "NO_UNIT", "POSITIONS", "SCORES", "DenseStore", "Part", "Slots", "Store", "UnitRanks", "Workspace"]
COLUMNS = {SCORES: torch.float32, POSITIONS: torch.int32}
"""What every cache knows about a unit."""
STATES, QUERIES = ("keys", "values"), "remembered queries"
_OF_CODES = ("key_scales", "value_scales", "key_frame", "value_frame", "exact_keys", "exact_values", "exact", "places")
_RESERVED = {*STATES, *COLUMNS, *_OF_CODES, "counts", "starts", "apart", "following", "lags", QUERIES, ROW_START}
_GROWTH = 256
_TURNED = 4096
_EVEN = 8
"""What the number of open slots is a multiple of, where there is room: products like even numbers."""


@dataclass(frozen=True)
class Part:
    """Units that a scorer rates together: those of all heads, or those of one head of one row."""

    where: tuple[int, int] | None
    """Row and KV head; None: all of them."""
    keys: Tensor
    """(B, K, S, D), post-rotary, the new ones last."""
    values: Tensor
    columns: Mapping[str, Tensor]
    """(B, K, S) each."""


class UnitRanks(NamedTuple):
    """Where units are among all that is held, where a second tier holds units too."""

    ranks: Tensor
    """(B, K, S) int64 rank of every unit of a store, from 0."""
    held: int
    """Units per KV head of all tiers."""


class Slots(NamedTuple):
    """Buffers of a store as they are, for steps that fill slot after slot by themselves."""

    keys: Tensor
    """(B, K, S, D), those that can be attended to; where heads lie back to back, (B, 1, S, D)."""
    values: Tensor
    flat: tuple[Tensor, ...]
    """Keys, values and positions of all slots of all rows and heads, (slots, ...)."""
    places: Tensor
    """(B, K) int64: the coming unit's among those."""
    mask: Tensor
    """0 for slots that hold a unit, else -inf; (B or 1, K or 1, 1, S)."""
    openings: Tensor
    """Where the mask becomes 0 with the coming unit, among all of its numbers."""


class Slotted(Units, ABC):
    """Units in buffers of slots, and the way to each by its KV head and its rank in `held`."""

    @property
    def buffers(self) -> dict[str, Tensor]:
        """What units have, (B, K, capacity, ...); a ragged store has (B, K * capacity, ...)."""
        return {name: tensor for name, tensor in self.tensors.items() if self._slotted(name)}

    @abstractmethod
    def held(self, name: str) -> Tensor:
        """Return a column, (B, K, units), at the right; what `EMPTY` says where a head has fewer units."""

    def first_slots(self, device: torch.device) -> Tensor:
        """Return (B * K,) where rank 0 in `held` is, counting slots through all rows and KV heads."""
        return torch.arange(0, self.tensors[POSITIONS].numel(), self.capacity, device=device)

    def flat_buffers(self, names: Iterable[str]) -> dict[str, Tensor]:
        last = self.tensors[POSITIONS].ndim - 1
        return {name: self.tensors[name].flatten(0, last) for name in names}

    def units(self, heads_U: Tensor, ranks_U: Tensor) -> dict[str, Tensor]:
        """Return units as they are held, (U, ...) each buffer, by head, rows x KV heads counted through, and rank."""
        where = self.first_slots(ranks_U.device)[heads_U] + ranks_U
        return {name: slots.index_select(0, where) for name, slots in self.flat_buffers(self.buffers).items()}

    def put(self, heads_U: Tensor, ranks_U: Tensor, units: Mapping[str, Tensor]) -> None:
        """Write what `units` of a store of the same kind returned over the units of these ranks."""
        where = self.first_slots(ranks_U.device)[heads_U] + ranks_U
        for name, slots in self.flat_buffers(self.buffers).items():
            slots.index_copy_(0, where, units[name])

    def as_held(self, ranks: Tensor | None) -> dict[str, Tensor]:
        """Return what `as_states` needs of units by (B, heads, ...) ranks, or of all units.

        Heads are KV heads, or a multiple of them: several for each KV head, one after another.
        """
        return self._picked(STATES, ranks)

    def _picked(self, names: Sequence[str], ranks: Tensor | slice | None) -> dict[str, Tensor]:
        """Return buffers of units by ranks, of a span of slots, or of all."""
        if not isinstance(ranks, Tensor):
            span = slice(0, self.fill) if ranks is None else ranks
            return {name: self.tensors[name][:, :, span] for name in names}
        where = self._where(ranks).flatten()
        flat = self.flat_buffers(names).items()
        return {name: slots.index_select(0, where).view(*ranks.shape, *slots.shape[1:]) for name, slots in flat}

    def as_states(self, held: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return keys and values (B, heads, ..., D) of what `as_held` returned, on the device where that is now."""
        return held["keys"], held["values"]

    def _where(self, ranks: Tensor) -> Tensor:
        """Return where units of (B, heads, ...) ranks are, counting slots through all rows and KV heads."""
        first = self.first_slots(ranks.device)
        first = first.repeat_interleave(ranks.shape[0] * ranks.shape[1] // len(first))
        return (first.view(*ranks.shape[:2], *[1] * (ranks.ndim - 2)) + ranks).clamp_(min=0)

    def sort(self) -> None:
        """Put units in the order of their positions, one head at a time."""
        order = self.held(POSITIONS).argsort(dim=-1, stable=True)
        for head, order_S in enumerate(order.flatten(0, 1)):
            ranks = (order_S != torch.arange(len(order_S), device=order_S.device)).nonzero()[:, 0]
            heads = torch.full_like(ranks, head)
            self.put(heads, ranks, self.units(heads, order_S[ranks]))

    def lag_like(self, fast: Store) -> None:
        """Let positions of rows lag behind those of the longest as in another tier; only codes know of that."""


class Store(Slotted):
    """Keys, values and columns of one layer's units, in ascending order per KV head, in buffers of fixed size.

    Args:
        rotary: Turns keys to the positions of their slots.
        workspace: Memory that all stores of a cache share.
        columns: Columns besides `scores` and `positions`.

    Raises:
        ValueError: If a column has a name that is taken.
    """

    name: ClassVar[str]
    holds: ClassVar[str]
    """Name of our store whose units this one can hold: "dense", as many in all heads, or "ragged"."""
    once: ClassVar[Collection[str] | None] = (QUERIES,)
    uncounted: ClassVar[Collection[str]] = (QUERIES,)
    rewrites: ClassVar[bool] = False
    """Whether every view needs the workspace, so that it is not idle while an answer is written either."""
    upcoming: int | None = None
    """The next token's place in the text, where keys are turned for it."""

    def __init__(self, rotary: Rotary, workspace: Workspace, columns: Mapping[str, torch.dtype] | None = None) -> None:
        if taken := sorted(_RESERVED & (columns or {}).keys()):
            raise ValueError(f'a column cannot be called "{taken[0]}", which units have already; choose another name')
        self.rotary, self.workspace = rotary, workspace
        self.dtypes = {**COLUMNS, **(columns or {})}
        self.tensors = {}
        self._rotated: Tensor | None = None

    @property
    def keys(self) -> Tensor:
        """(B, K, capacity, D); a ragged store has (B, K * capacity, D)."""
        return self.tensors["keys"]

    @property
    def values(self) -> Tensor:
        """Shaped like the keys."""
        return self.tensors["values"]

    @property
    def columns(self) -> dict[str, Tensor]:
        """Scores, positions and what else a scorer declares."""
        return {name: self.tensors[name] for name in self.dtypes}

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` slots now (or at the first append); never shrinks."""
        if capacity > self.capacity:
            self._resize(capacity)

    def shrink(self, capacity: int) -> None:
        """Give back memory beyond `capacity` slots, or beyond what is held."""
        capacity = max(capacity, self.fill)
        if self.batch and capacity < self.capacity:
            self._resize(capacity)

    @abstractmethod
    def _resize(self, capacity: int) -> None:
        """Have buffers of `capacity` slots, if there are any buffers."""

    def _kinds(self, keys: Tensor, values: Tensor) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return what a unit has of each buffer: its shape and dtype."""
        columns = {name: ((), dtype) for name, dtype in self.dtypes.items()}
        return {"keys": (keys.shape[3:], keys.dtype), "values": (values.shape[3:], values.dtype), **columns}

    def _allocate(self, keys: Tensor, values: Tensor) -> None:
        """Make buffers (B, K, capacity, ...) for states of this kind."""
        shape, kinds = (*keys.shape[:2], self.capacity), self._kinds(keys, values)
        made = {n: self.empty((*shape, *own), dtype=dtype, device=keys.device) for n, (own, dtype) in kinds.items()}
        self.tensors = made | self.tensors

    def _make_room(self, keys: Tensor, values: Tensor) -> None:
        """Have buffers with room for L more units."""
        end = self.fill + keys.shape[-2]
        if POSITIONS not in self.tensors:
            self.capacity = max(self.capacity, end)
            self._allocate(keys, values)
        elif end > self.capacity:
            self.reserve(max(end, self.capacity + _GROWTH))

    @abstractmethod
    def append(self, keys: Tensor, values: Tensor, positions: Tensor, rotated: Tensor | None = None) -> None:
        """Add L units to every head.

        Args:
            keys: (B, K, L, D), as they are to be held.
            values: (B, K, L, D).
            positions: (1 or B, 1, L) original positions.
            rotated: (B, K, L, D) the same keys after rotation, where `keys` wait un-rotated like all that are held.
        """

    @abstractmethod
    def view(self, base: int) -> View:
        """Return what queries attend to now, keys rotated; `base` is where the newest units begin, if keys wait."""

    def look_again(self, keys: Tensor, values: Tensor, *, waiting: bool) -> None:
        """Get ready for another `view` of the rotated keys and values that came last; `waiting` if keys wait."""
        self._rotated = keys if waiting else None

    def side_by_side(self, view: View) -> View:
        """Return a view whose keys are keys and values side by side, (..., D + the width of values), in the workspace.

        Queries of latent attention attend to both; see `locret.backbone.latent`.
        """
        # What is there already is about to be overwritten.
        parts = [part.clone() if self.workspace.holds(part) else part for part in (view.keys, view.values)]
        batch, heads, slots, dim = view.keys.shape
        wide = dim + view.values.shape[-1]
        keys = self.workspace.take((batch, heads, slots, wide), max(self.capacity, slots), view.keys)
        return replace(view, keys=torch.cat(parts, dim=-1, out=keys), values=parts[1])

    @abstractmethod
    def parts(self, view: View, new: int, newest_only: bool) -> Iterator[Part]:
        """Yield what a scorer rates together of a view with `new` units per head; older ones if they matter."""

    @abstractmethod
    def write(self, name: str, values: Tensor, where: tuple[int, int] | None = None) -> None:
        """Set a column of the newest units, (B, K, L), or of the one head that `where` names, (1, 1, L)."""

    def share_before(self, position: int) -> Tensor:
        """Return, as one number, the share of the held units that come from before a position of the text."""
        positions = self.held(POSITIONS)
        return (positions[positions != NO_UNIT] < position).float().mean()

    @abstractmethod
    def keep(self, kept: Kept, turned: bool) -> None:
        """Drop all units but these; `turned` if keys are rotated to their slots, and turn to their new ones."""

    @abstractmethod
    def turn_keys(self, base: int, ranks: UnitRanks | None = None, *, back: bool = False) -> None:
        """Rotate all keys in place, to the slots before position `base`, with `ranks` to those; or turn them `back`."""

    def advance(self, by: int = 1) -> None:
        """Take note that somebody has filled the next slot of every head."""
        self.fill += by

    def take_back(self) -> None:
        self.advance(-1)

    @abstractmethod
    def chain(self, stores: Sequence[Self]) -> None:
        """Become the only rows of stores, of which this may be one, one after another; keys are not rotated."""

    def load(self, tensors: Mapping[str, Tensor], fill: int) -> None:
        """See `Units`: without the columns of another scorer."""
        ours = {*self.dtypes, *_RESERVED}
        super().load({name: tensor for name, tensor in tensors.items() if name in ours}, fill)

    def copy(self, workspace: Workspace) -> Self:
        twin = super().copy(workspace)
        twin.workspace, twin._rotated = workspace, None
        return twin

    def _turned_on(self, keys: Tensor, moved: Tensor, most: int) -> Tensor:
        """Return rotated keys (..., D) turned by the distances, `most` at most, that they are about to move."""
        cos, sin = self.rotary.table(0, most + 1, keys.new_empty(0, dtype=torch.float32))
        magnitude = cos[0, 0]  # scaled tables carry a factor, which the keys have already
        return self.rotary.turn(keys.float(), (cos / magnitude)[moved], (sin / magnitude)[moved]).to(keys.dtype)


class DenseStore(Store):
    """As many units in all heads: buffers (B, K, capacity, D) or (B, K, capacity), the first `fill` slots in use."""

    name = holds = "dense"

    def _resize(self, capacity: int) -> None:
        larger = dict(self.tensors)
        for name, old in self.buffers.items():
            larger[name] = self.empty((*old.shape[:2], capacity, *old.shape[3:]), dtype=old.dtype, device=old.device)
            larger[name][:, :, : self.fill] = old[:, :, : self.fill]
        # Last: where there is no memory for it, the store is what it was.
        self.tensors, self.capacity = larger, capacity

    def append(self, keys: Tensor, values: Tensor, positions: Tensor, rotated: Tensor | None = None) -> None:
        self._make_room(keys, values)
        span = slice(self.fill, self.fill + keys.shape[-2])
        self._write(span, keys, values)
        self.tensors[POSITIONS].narrow(2, self.fill, keys.shape[-2]).copy_(positions)
        for name in self.dtypes.keys() - COLUMNS.keys():
            self.tensors[name][:, :, span] = 0
        self.fill, self._rotated = span.stop, rotated

    def _write(self, span: slice, keys: Tensor, values: Tensor) -> None:
        """Put states (B, K, L, D) into slots."""
        self.keys.narrow(2, span.start, span.stop - span.start).copy_(keys)
        self.values.narrow(2, span.start, span.stop - span.start).copy_(values)

    def view(self, base: int) -> View:
        keys, values = self.keys.narrow(2, 0, self.fill), self.values.narrow(2, 0, self.fill)
        if self._rotated is None:
            return View(keys, values, self.row_start)
        newest, self._rotated = self._rotated, None
        turned = self.workspace.take(tuple(keys.shape), self.capacity, keys)
        if old := self.fill - newest.shape[-2]:
            cos, sin = self.rotary.table(base - old, old, keys)
            self.rotary.turn(keys[:, :, :old], cos, sin, out=turned[:, :, :old])
        turned[:, :, old:] = newest
        return View(turned, values, self.row_start)

    def parts(self, view: View, new: int, newest_only: bool) -> Iterator[Part]:
        """Yield one part with everything."""
        yield Part(None, view.keys, view.values, {name: self.held(name) for name in self.dtypes})

    def held(self, name: str) -> Tensor:
        return self.tensors[name][:, :, : self.fill]

    def write(self, name: str, values: Tensor, where: tuple[int, int] | None = None) -> None:
        """See `Store`; empty slots among the newest get the worst score."""
        first = self.fill - values.shape[-1]
        if self.row_start is not None and name == SCORES:
            empty = torch.arange(first, self.fill, device=values.device) < self.row_start[:, None]
            values = values.masked_fill(empty[:, None], -torch.inf)
        self.tensors[name][:, :, first : self.fill] = values

    def keep(self, kept: Kept, turned: bool) -> None:
        assert isinstance(kept, KeptPerHead)
        count = kept.units.shape[-1]
        if turned:
            moved = self.fill - count + torch.arange(count, device=kept.units.device) - kept.units
            where = kept.units[..., None].expand(*kept.units.shape, self.keys.shape[-1])
            self.keys.scatter_(2, where, self._turned_on(self.keys.gather(2, where), moved, self.fill - count))
        rows = self._where(kept.units).flatten()
        for buffer in self.buffers.values():
            self._gather(buffer, kept.units, rows)
        if self.row_start is not None:
            self.row_start = (self.row_start - (self.fill - count)).clamp_min(0)
        self.fill = count

    def _gather(self, buffer: Tensor, kept_BKC: Tensor, rows: Tensor) -> None:
        # Whole rows of D move, so index rows of the flat buffer: much faster than an element-wise gather.
        shape = (*kept_BKC.shape, *buffer.shape[3:])
        scratch = self.workspace.take(shape, self.capacity, buffer) if buffer.ndim > 3 else buffer.new_empty(shape)
        torch.index_select(buffer.flatten(0, 2), 0, rows, out=scratch.flatten(0, 2))
        buffer[:, :, : shape[2]] = scratch

    def turn_keys(self, base: int, ranks: UnitRanks | None = None, *, back: bool = False) -> None:
        if not self.fill:
            return
        turn, keys = self.rotary.turn_back if back else self.rotary.turn, self.keys[:, :, : self.fill]
        held = self.fill if ranks is None else ranks.held
        cos, sin = self.rotary.table(base - held, held, keys)
        if ranks is None:
            room = {} if back else {"out": self.workspace.take(tuple(keys.shape), self.capacity, keys)}
            keys.copy_(turn(keys, cos, sin, **room))
            return
        for start in range(0, self.fill, _TURNED):  # every unit has a row of cosines of its own
            some, where = keys[:, :, start : start + _TURNED], ranks.ranks[:, :, start : start + _TURNED]
            some.copy_(turn(some, cos[where], sin[where]))

    def chain(self, stores: Sequence[DenseStore]) -> None:
        every = [self._like_ours(store) for store in stores]
        self.tensors |= {name: torch.cat([held[name] for held in every], dim=2) for name in every[0]}
        self.fill = self.capacity = sum(store.fill for store in stores)

    def _like_ours(self, store: DenseStore) -> dict[str, Tensor]:
        """Return what another store holds as this one would hold it."""
        return {name: buffer[:, :, : store.fill] for name, buffer in store.buffers.items()}

    def open(self, like: Store, new: int) -> None:
        """Have `new` more slots in use, their contents not set, for units as another store has them."""
        self._make_room(*(states[:, :, :1].expand(-1, -1, new, -1) for states in (like.keys, like.values)))
        self.fill += new

    def all_keys(self) -> Keys:
        """Return (B, K, units, D), as queries attend to them where none is new; codes are decoded as they are read."""
        return self.keys[:, :, : self.fill]

    def lend_room(self, recalled: Recalled) -> View | None:
        """Return what one new token attends to, the recalled units behind those held; None where there is no room."""
        heads, queries, extra = recalled.keys.shape[1:4]
        end = self.fill + extra
        if (
            self.rewrites
            or end > self.capacity
            or heads > self.keys.shape[1]
            or queries > 1
            or recalled.there is not None
        ):
            return None
        self._write(slice(self.fill, end), recalled.keys[:, :, 0], recalled.values[:, :, 0])
        return View(self.keys[:, :, :end], self.values[:, :, :end], self.row_start)

    def open_slots(self, new: int) -> Slots:
        """Return the buffers up to `new` slots behind the units or a few more, those slots filled with zeros."""
        (batch, heads), device = self.keys.shape[:2], self.keys.device
        end = min(-(-(self.fill + new) // _EVEN) * _EVEN, self.capacity)
        keys, values = self.keys[:, :, :end], self.values[:, :, :end]
        for buffer in (keys, values):  # what is masked counts nothing, unless it is NaN
            buffer[:, :, self.fill :] = 0
        slots = torch.arange(end, device=device)
        empty = (slots >= self.fill)[None]
        if self.row_start is not None:
            empty = empty | (slots < self.row_start[:, None])
        mask = keys.new_zeros(empty.shape).masked_fill_(empty, -torch.inf)[:, None, None]
        places = torch.arange(batch * heads, device=device).view(batch, heads) * self.capacity + self.fill
        openings = torch.arange(len(mask), device=device) * end + self.fill
        return Slots(keys, values, tuple(self.flat_buffers((*STATES, POSITIONS)).values()), places, mask, openings)
