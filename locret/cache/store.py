"""Where the units of a layer are held: what every store can do, and the dense one, with as many units in all heads.

A store moves bytes. It knows nothing of scores, budgets or phases: what a method needs to know about a unit (its score,
its original position, whatever else a scorer declares) is a column that travels with the unit.
"""

# B batch, K KV heads, L new tokens, S slots, C kept slots, D head dim

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from locret.backbone.attention import Recalled, View
from locret.backbone.rotary import Rotary, rotate, unrotate
from locret.lookups.base import Keys
from locret.policy.budget import unit_bytes
from locret.policy.selectors import Kept, KeptPerHead

if TYPE_CHECKING:
    from typing_extensions import Self

NO_UNIT = -1
"""Position of an empty slot."""
SCORES, POSITIONS = "scores", "positions"
COLUMNS = {SCORES: torch.float32, POSITIONS: torch.int32}
"""What every cache knows about a unit."""
EMPTY = {SCORES: -torch.inf, POSITIONS: NO_UNIT}
"""What an empty slot's columns hold; other columns hold 0 there."""
_OF_CODES = {"key_scales", "value_scales", "key_frame", "value_frame", "exact_keys", "exact_values", "exact"}
_RESERVED = {"keys", "values", "counts", "row_start", "places", "following", *COLUMNS, *_OF_CODES}
_GROWTH = 256
_TURNED = 4096
_EVEN = 8
"""What the number of open slots is a multiple of, where there is room: products like even numbers."""


class Workspace:
    """One buffer that all layers of a device share: rotated keys during a chunk, kept units during an eviction."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def take(self, shape: tuple[int, ...], capacity: int, like: Tensor) -> Tensor:
        """Return an uninitialised (B, K, S, D) tensor whose memory is kept for `capacity` slots."""
        batch, heads, slots, dim = shape
        key = (like.device, like.dtype)
        needed = batch * heads * max(slots, capacity) * dim
        if key not in self._buffers or self._buffers[key].numel() < needed:
            self._buffers[key] = torch.empty(needed, dtype=like.dtype, device=like.device)
        return self._buffers[key][: batch * heads * slots * dim].view(shape)

    def holds(self, states: Tensor) -> bool:
        """Return whether a tensor lies in what this lends."""
        where = states.untyped_storage().data_ptr()
        return any(where == buffer.untyped_storage().data_ptr() for buffer in self._buffers.values())

    def clear(self) -> None:
        """Give the memory back."""
        self._buffers.clear()

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.nbytes for buffer in self._buffers.values())


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


class Store(ABC):
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
    row_start: Tensor | None = None
    """(B,) first filled slot of each row, where rows differ; None if all slots are filled."""

    def __init__(self, rotary: Rotary, workspace: Workspace, columns: Mapping[str, torch.dtype] | None = None) -> None:
        if taken := sorted(_RESERVED & (columns or {}).keys()):
            raise ValueError(f'a column cannot be called "{taken[0]}", which units have already; choose another name')
        self.rotary, self.workspace = rotary, workspace
        self.dtypes = {**COLUMNS, **(columns or {})}
        self.fill = self.capacity = 0
        """Units per KV head, on average, and slots for them."""
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.columns: dict[str, Tensor] = {}
        self.empty: Callable[..., Tensor] = torch.empty
        """Gives memory for a shape, a `dtype` and a `device`."""
        self._rotated: Tensor | None = None

    # -- memory -------------------------------------------------------------------------------------------------------

    @staticmethod
    def plan(
        slots: int,
        rows: int,
        kv_heads: int,
        head_dim: int,
        element_size: int,
        columns: Sequence[torch.dtype] = (),
        value_dim: int | None = None,
    ) -> int:
        """Return the bytes of a store of so many slots, before any is made; columns are those a scorer declares."""
        beside = sum(dtype.itemsize for dtype in columns)
        return rows * kv_heads * slots * unit_bytes(head_dim, element_size, beside, value_dim)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(tensor.nbytes for tensor in self._buffers().values())

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` slots now (or at the first append); never shrinks."""
        if capacity > self.capacity:
            self._resize(capacity)

    def shrink(self, capacity: int) -> None:
        """Give back memory beyond `capacity` slots, or beyond what is held."""
        capacity = max(capacity, self.fill)
        if self.keys is not None and capacity < self.capacity:
            self._resize(capacity)

    @abstractmethod
    def _resize(self, capacity: int) -> None:
        """Have buffers of `capacity` slots, if there are any buffers."""

    def _make_room(self, keys: Tensor, values: Tensor) -> None:
        """Have buffers with room for L more units."""
        end = self.fill + keys.shape[-2]
        if self.keys is None:
            self.capacity = max(self.capacity, end)
            self._allocate(keys, values)
        elif end > self.capacity:
            self.reserve(max(end, self.capacity + _GROWTH))

    @abstractmethod
    def _allocate(self, keys: Tensor, values: Tensor) -> None:
        """Make buffers for states of this kind."""

    def scratch(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return uninitialised memory of the shared workspace, lent until any store of the cache is used again."""
        assert self.keys is not None
        return self.workspace.take(shape, 0, self.keys.new_empty(0, dtype=dtype))

    @property
    def batch(self) -> int:
        """Rows; 0 before the first append."""
        return 0 if self.keys is None else self.keys.shape[0]

    @property
    def key_numbers(self) -> int:
        """Numbers of one row's keys, or values: what a plan grants the workspace, per row; 0 where it is never idle."""
        assert self.keys is not None
        assert self.values is not None
        return max(self.keys[0].numel(), self.values[0].numel())

    # -- units --------------------------------------------------------------------------------------------------------

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
        """Return what queries attend to now, keys rotated.

        Args:
            base: Rotary position of the first of the newest units; counts where keys wait un-rotated.
        """

    def look_again(self, keys: Tensor, values: Tensor, *, waiting: bool) -> None:
        """Get ready for another `view` of what was appended last.

        Args:
            keys: (B, K, L, D), rotated.
            values: (B, K, L, D).
            waiting: Whether keys wait un-rotated.
        """
        self._rotated = keys if waiting else None

    def side_by_side(self, view: View) -> View:
        """Return a view whose keys are keys and values side by side, (..., D + the width of values), in the workspace.

        Queries of latent attention attend to both; see `locret.backbone.latent`.
        """
        # What is there already is about to be overwritten.
        parts = [part.clone() if self.workspace.holds(part) else part for part in (view.keys, view.values)]
        batch, heads, slots, dim = view.keys.shape
        wide = dim + view.values.shape[-1]
        capacity = max(self.capacity, slots)
        keys = self.workspace.take((batch, heads, slots, wide), capacity, view.keys)
        return replace(view, keys=torch.cat(parts, dim=-1, out=keys), values=parts[1])

    @property
    @abstractmethod
    def longest(self) -> int:
        """Units of the KV head that holds the most."""

    @abstractmethod
    def parts(self, view: View, new: int, newest_only: bool) -> Iterator[Part]:
        """Yield what a scorer rates together.

        Args:
            view: What was attended to.
            new: Newest units of every head.
            newest_only: Whether the older units do not matter.
        """

    @abstractmethod
    def held(self, name: str) -> Tensor:
        """Return a column, (B, K, units), at the right; what `EMPTY` says where a head has fewer units."""

    @abstractmethod
    def write(self, name: str, values: Tensor, where: tuple[int, int] | None = None) -> None:
        """Set a column of the newest units, (B, K, L), or of the one head that `where` names, (1, 1, L)."""

    @abstractmethod
    def share_before(self, position: int) -> Tensor:
        """Return, as one number, the share of the held units that come from before a position of the text."""

    @abstractmethod
    def keep(self, kept: Kept, turned: bool) -> None:
        """Drop all units but these.

        Args:
            kept: Which units stay, and which go.
            turned: Whether keys are rotated to their slots, and must be turned to their new ones.
        """

    @abstractmethod
    def rotate(self, base: int) -> None:
        """Rotate all keys in place, to the slots before position `base`."""

    @abstractmethod
    def unrotate(self, base: int) -> None:
        """Undo `rotate`."""

    @abstractmethod
    def take_back(self) -> None:
        """Forget the newest unit of every head."""

    # -- rows ---------------------------------------------------------------------------------------------------------

    @abstractmethod
    def select_rows(self, rows: Tensor) -> None:
        """Keep, repeat or reorder rows of the batch; `rows` is (new batch,) int64."""

    @abstractmethod
    def trim(self) -> None:
        """Drop the empty slots in front of the only row."""

    @abstractmethod
    def join(self, stores: Sequence[Self], capacity: int) -> None:
        """Become a batch of the only rows of other stores, aligned to the right."""

    def chain(self, stores: Sequence[Self]) -> None:
        """Become the only rows of stores, of which this may be one, one after another; keys are not rotated.

        Raises:
            ValueError: If this kind of store cannot.
        """
        raise ValueError(
            f"store {self.name} does not say how units of several texts follow each other, so contexts cannot be "
            "composed in it; leave the store out, or give it a method `chain`"
        )

    # -- whole stores -------------------------------------------------------------------------------------------------

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Return everything held, for `load`."""

    @abstractmethod
    def load(self, tensors: Mapping[str, Tensor], fill: int) -> None:
        """Take over what `state` returned."""

    def copy(self, workspace: Workspace) -> Self:
        """Return an independent copy that uses another workspace."""
        twin = copy.copy(self)
        twin.workspace, twin._rotated = workspace, None
        twin.keys, twin.values = (None if t is None else self.held_anew(t) for t in (self.keys, self.values))
        twin.columns = {name: self.held_anew(tensor) for name, tensor in self.columns.items()}
        return twin

    def held_anew(self, tensor: Tensor) -> Tensor:
        """Return a copy where this store has its memory."""
        return self.empty(tuple(tensor.shape), dtype=tensor.dtype, device=tensor.device).copy_(tensor)

    def _rows_of(self, tensor: Tensor, rows: Tensor) -> Tensor:
        """Return a copy of some rows where this store has its memory."""
        shape = (len(rows), *tensor.shape[1:])
        out = self.empty(shape, dtype=tensor.dtype, device=tensor.device)
        return torch.index_select(tensor, 0, rows.to(tensor.device), out=out)

    def _flat(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys, values and positions of all slots, counted through all rows and heads."""
        assert self.keys is not None
        assert self.values is not None
        positions = self.columns[POSITIONS].view(-1)
        keys, values = (buffer.view(len(positions), -1) for buffer in (self.keys, self.values))
        return keys, values, positions

    def _buffers(self) -> dict[str, Tensor]:
        if self.keys is None or self.values is None:
            return {}
        return {"keys": self.keys, "values": self.values, **self.columns}

    def _set_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        if lost := self.dtypes.keys() - buffers.keys():
            raise ValueError(
                f'the units come without their column "{min(lost)}"; load them with the scorer they were saved with'
            )
        self.keys, self.values = buffers["keys"], buffers["values"]
        self.columns = {name: buffers[name] for name in self.dtypes}


class Slots(NamedTuple):
    """Buffers of a store as they are, for steps that fill slot after slot by themselves."""

    keys: Tensor
    """(B, K, S, D), those that can be attended to; where heads lie back to back, (B, 1, S, D)."""
    values: Tensor
    flat: tuple[Tensor, Tensor, Tensor]
    """Keys, values and positions of all slots of all rows and heads, (slots, ...)."""
    places: Tensor
    """(B, K) int64: the coming unit's among those."""
    mask: Tensor
    """0 for slots that hold a unit, else -inf; (B or 1, K or 1, 1, S)."""
    openings: Tensor
    """Where the mask becomes 0 with the coming unit, among all of its numbers."""


class DenseStore(Store):
    """As many units in all heads: buffers (B, K, capacity, D) or (B, K, capacity), the first `fill` slots in use."""

    name = holds = "dense"

    def _allocate(self, keys: Tensor, values: Tensor) -> None:
        batch, heads, _, dim = keys.shape
        shape = (batch, heads, self.capacity)
        self.keys = self.empty((*shape, dim), dtype=keys.dtype, device=keys.device)
        self.values = self.empty((*shape, values.shape[-1]), dtype=values.dtype, device=keys.device)
        self.columns = {n: self.empty(shape, dtype=dtype, device=keys.device) for n, dtype in self.dtypes.items()}

    def _resize(self, capacity: int) -> None:
        buffers = self._buffers()
        for name, old in buffers.items():
            new = self.empty((*old.shape[:2], capacity, *old.shape[3:]), dtype=old.dtype, device=old.device)
            new[:, :, : self.fill] = old[:, :, : self.fill]
            buffers[name] = new
        if buffers:
            self._set_buffers(buffers)
        self.capacity = capacity  # last: where there is no memory for it, the store is what it was

    def append(self, keys: Tensor, values: Tensor, positions: Tensor, rotated: Tensor | None = None) -> None:
        """See `Store`."""
        self._make_room(keys, values)
        span = slice(self.fill, self.fill + keys.shape[-2])
        self._write(span, keys, values)
        self.columns[POSITIONS][:, :, span] = positions
        for name in self.dtypes.keys() - COLUMNS.keys():
            self.columns[name][:, :, span] = 0
        self.fill, self._rotated = span.stop, rotated

    def _write(self, span: slice, keys: Tensor, values: Tensor) -> None:
        """Put states (B, K, L, D) into slots."""
        assert self.keys is not None
        assert self.values is not None
        self.keys[:, :, span] = keys
        self.values[:, :, span] = values

    def view(self, base: int) -> View:
        """See `Store`."""
        assert self.keys is not None
        assert self.values is not None
        keys, values = self.keys[:, :, : self.fill], self.values[:, :, : self.fill]
        if self._rotated is None:
            return View(keys, values, self.row_start)
        newest, self._rotated = self._rotated, None
        turned = self.workspace.take(tuple(keys.shape), self.capacity, keys)
        old = self.fill - newest.shape[-2]
        if old:
            cos, sin = self.rotary.table(base - old, old, keys)
            self.rotary.turn(keys[:, :, :old], cos, sin, out=turned[:, :, :old])
        turned[:, :, old:] = newest
        return View(turned, values, self.row_start)

    @property
    def longest(self) -> int:
        """See `Store`."""
        return self.fill

    def parts(self, view: View, new: int, newest_only: bool) -> Iterator[Part]:
        """Yield one part with everything."""
        yield Part(None, view.keys, view.values, {n: column[:, :, : self.fill] for n, column in self.columns.items()})

    def held(self, name: str) -> Tensor:
        """See `Store`."""
        return self.columns[name][:, :, : self.fill]

    def write(self, name: str, values: Tensor, where: tuple[int, int] | None = None) -> None:
        """See `Store`; empty slots among the newest get the worst score."""
        first = self.fill - values.shape[-1]
        if self.row_start is not None and name == SCORES:
            empty = torch.arange(first, self.fill, device=values.device) < self.row_start[:, None]
            values = values.masked_fill(empty[:, None], -torch.inf)
        self.columns[name][:, :, first : self.fill] = values

    def share_before(self, position: int) -> Tensor:
        """See `Store`."""
        return (self.held(POSITIONS) < position).float().mean()

    def keep(self, kept: Kept, turned: bool) -> None:
        """See `Store`."""
        assert isinstance(kept, KeptPerHead)
        count = kept.units.shape[-1]
        if turned:
            self._turn_forward(kept.units)
        rows = self._where(kept.units).flatten()
        for buffer in self._buffers().values():
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

    def _turn_forward(self, kept_BKC: Tensor) -> None:
        """Turn rotated keys by the distance they are about to move, so that each ends at its new slot's position."""
        assert self.keys is not None
        fill, count = self.fill, kept_BKC.shape[-1]
        moved = fill - count + torch.arange(count, device=kept_BKC.device) - kept_BKC
        like = torch.empty(0, dtype=torch.float32, device=kept_BKC.device)
        cos, sin = self.rotary.table(0, fill - count + 1, like)
        magnitude = cos[0, 0]
        kept = self.keys.gather(2, kept_BKC[..., None].expand(*kept_BKC.shape, self.keys.shape[-1])).float()
        turned = self.rotary.turn(kept, (cos / magnitude)[moved], (sin / magnitude)[moved]).to(self.keys.dtype)
        self.keys.scatter_(2, kept_BKC[..., None].expand_as(turned), turned)

    def rotate(self, base: int, ranks: UnitRanks | None = None) -> None:
        """See `Store`; with `ranks`, to those instead of the slots."""
        if self.keys is None or not self.fill:
            return
        if ranks is not None:
            self._turn_to(base, ranks, rotate)
            return
        keys = self.keys[:, :, : self.fill]
        cos, sin = self.rotary.table(base - self.fill, self.fill, keys)
        scratch = self.workspace.take(tuple(keys.shape), self.capacity, keys)
        keys.copy_(self.rotary.turn(keys, cos, sin, out=scratch))

    def unrotate(self, base: int, ranks: UnitRanks | None = None) -> None:
        """See `Store`."""
        if self.keys is None or not self.fill:
            return
        if ranks is not None:
            self._turn_to(base, ranks, unrotate)
            return
        keys = self.keys[:, :, : self.fill]
        cos, sin = self.rotary.table(base - self.fill, self.fill, keys)
        keys.copy_(self.rotary.turn_back(keys, cos, sin))

    def lag_like(self, fast: DenseStore) -> None:
        """Let positions of rows lag behind those of the longest as in another tier; only codes know of that."""

    def _turn_to(self, base: int, ranks: UnitRanks, turn: Callable[..., Tensor]) -> None:
        """Turn keys by the positions of their ranks, a few at a time: every unit has a row of cosines of its own."""
        assert self.keys is not None
        cos, sin = self.rotary.table(base - ranks.held, ranks.held, self.keys)
        for start in range(0, self.fill, _TURNED):
            span = slice(start, min(start + _TURNED, self.fill))
            keys, where = self.keys[:, :, span], ranks.ranks[:, :, span]
            keys.copy_(turn(keys, cos[where], sin[where]))

    def open(self, like: DenseStore, new: int) -> None:
        """Have `new` more slots in use, their contents not set, for units as another store of this kind has them."""
        assert like.keys is not None
        assert like.values is not None
        nothing = slice(0, new)
        self._make_room(like.keys[:, :, nothing], like.values[:, :, nothing])
        self.fill += new

    def units(self, heads_U: Tensor, ranks_U: Tensor) -> dict[str, Tensor]:
        """Return units as they are held, (U, ...) each buffer, by head, rows x KV heads counted through, and rank."""
        where = heads_U * self.capacity + ranks_U
        return {name: buffer.flatten(0, 2).index_select(0, where) for name, buffer in self._buffers().items()}

    def put(self, heads_U: Tensor, ranks_U: Tensor, units: Mapping[str, Tensor]) -> None:
        """Write what `units` of a store of the same kind returned over the units of these ranks."""
        where = heads_U * self.capacity + ranks_U
        for name, buffer in self._buffers().items():
            buffer.flatten(0, 2).index_copy_(0, where, units[name])

    def fetch(self, ranks: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values (B, heads, ..., D) of units by (B, heads, ...) ranks.

        Heads are KV heads, or a multiple of them: several for each KV head, one after another.
        """
        return self.as_states(self.as_held(ranks))

    def as_held(self, ranks: Tensor | None) -> dict[str, Tensor]:
        """Return what `as_states` needs of units by (B, heads, ...) ranks, heads as of `fetch`, or of all units."""
        assert self.keys is not None
        assert self.values is not None
        if ranks is None:
            return {"keys": self.keys[:, :, : self.fill], "values": self.values[:, :, : self.fill]}
        where, buffers = self._where(ranks).flatten(), {"keys": self.keys, "values": self.values}
        return {n: b.flatten(0, 2).index_select(0, where).view(*ranks.shape, -1) for n, b in buffers.items()}

    def as_states(self, held: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return keys and values (B, heads, ..., D) of what `as_held` returned, on the device where that is now."""
        return held["keys"], held["values"]

    def _where(self, ranks: Tensor) -> Tensor:
        """Return where units of (B, heads, ...) ranks are, counting slots through all rows and KV heads."""
        assert self.keys is not None
        batch, heads = self.keys.shape[:2]
        first = torch.arange(0, batch * heads * self.capacity, self.capacity, device=ranks.device)
        if ranks.shape[1] != heads:
            first = first.repeat_interleave(ranks.shape[1] // heads)
        return first.view(*ranks.shape[:2], *[1] * (ranks.ndim - 2)) + ranks

    def all_keys(self) -> Keys:
        """Return (B, K, units, D), as queries attend to them where none is new; codes are decoded as they are read."""
        assert self.keys is not None
        return self.keys[:, :, : self.fill]

    def lend_room(self, recalled: Recalled) -> View | None:
        """Return what one new token attends to, the recalled units behind those held; None where there is no room."""
        assert self.keys is not None
        assert self.values is not None
        heads, queries, extra = recalled.keys.shape[1:4]
        end = self.fill + extra
        if end > self.capacity or heads > self.keys.shape[1] or queries > 1 or recalled.there is not None:
            return None
        self.keys[:, :, self.fill : end] = recalled.keys[:, :, 0]
        self.values[:, :, self.fill : end] = recalled.values[:, :, 0]
        return View(self.keys[:, :, :end], self.values[:, :, :end], self.row_start)

    def sort(self) -> None:
        """Put units in the order of their positions, one head at a time."""
        order = self.held(POSITIONS).argsort(dim=-1, stable=True)
        if torch.equal(order, torch.arange(self.fill, device=order.device).expand_as(order)):
            return
        for buffer in self._buffers().values():
            for head, order_S in zip(buffer.flatten(0, 1), order.flatten(0, 1), strict=True):
                head[: self.fill] = head[order_S]

    def take_back(self) -> None:
        """See `Store`."""
        self.fill -= 1

    def select_rows(self, rows: Tensor) -> None:
        """See `Store`."""
        if self.keys is None:
            return
        self._set_buffers({name: self._rows_of(buffer, rows) for name, buffer in self._buffers().items()})
        if self.row_start is not None:
            self.row_start = self.row_start.index_select(0, rows.to(self.row_start.device))

    def trim(self) -> None:
        """See `Store`."""
        empty = 0 if self.row_start is None else int(self.row_start[0])
        self.row_start = None
        if empty:
            for buffer in self._buffers().values():
                buffer[:, :, : self.fill - empty] = buffer[:, :, empty : self.fill].clone()
            self.fill -= empty

    def join(self, stores: Sequence[DenseStore], capacity: int) -> None:
        """See `Store`."""
        self.fill, self.capacity = max(store.fill for store in stores), capacity
        every = [store._buffers() for store in stores]
        joined = {}
        for name in every[0]:
            parts = [buffers[name][:, :, : store.fill] for buffers, store in zip(every, stores, strict=True)]
            joined[name], self.row_start = aligned(parts, EMPTY.get(name, 0), capacity - self.fill, self.empty)
        if joined:
            self._set_buffers(joined)

    def chain(self, stores: Sequence[DenseStore]) -> None:
        """See `Store`."""
        every = [self._like_ours(store) for store in stores]
        self._set_buffers({name: torch.cat([held[name] for held in every], dim=2) for name in every[0]})
        self.fill = self.capacity = sum(store.fill for store in stores)

    def _like_ours(self, store: DenseStore) -> dict[str, Tensor]:
        """Return what another store holds as this one would hold it."""
        return {name: buffer[:, :, : store.fill] for name, buffer in store._buffers().items()}

    def state(self) -> dict[str, Tensor]:
        """See `Store`."""
        return {name: buffer[:, :, : self.fill].contiguous() for name, buffer in self._buffers().items()}

    def load(self, tensors: Mapping[str, Tensor], fill: int) -> None:
        """See `Store`."""
        self._set_buffers(tensors)
        self.fill = self.capacity = fill

    # -- captured steps -----------------------------------------------------------------------------------------------

    def open_slots(self, new: int) -> Slots:
        """Return the buffers up to `new` slots behind the units or a few more, those slots filled with zeros."""
        assert self.keys is not None
        assert self.values is not None
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
        return Slots(keys, values, self._flat(), places, mask, openings)

    def advance(self) -> None:
        """Take note that somebody has filled the next slot."""
        self.fill += 1


def aligned(
    parts: Sequence[Tensor], empty: float, room: int = 0, memory: Callable[..., Tensor] = torch.empty
) -> tuple[Tensor, Tensor]:
    """Stack (1, K, S_i, ...) tensors into (B, K, max S + room, ...), right-aligned; also (B,) where each row begins."""
    slots, like = max(part.shape[2] for part in parts), parts[0]
    shape = (len(parts), like.shape[1], slots + room, *like.shape[3:])
    joined = memory(shape, dtype=like.dtype, device=like.device).fill_(empty)
    start = torch.tensor([slots - part.shape[2] for part in parts], device=joined.device)
    for row, part in enumerate(parts):
        joined[row, :, slots - part.shape[2] : slots] = part[0]
    return joined, start
