"""A store whose KV heads hold different numbers of units, in the memory of one whose heads hold as many each.

A row's units lie in one buffer of K x capacity slots, head after head. `fill` is how many a head holds on average, and
every head has `capacity - fill` free slots behind its own units. An eviction packs the units anew, so that whatever
a head gives up is there for the others. No slot is masked, and none pads a head to the length of another.

Cost: attention is one kernel call per row and KV head instead of one for all, and an eviction waits for the device once
per row, to learn how many units each head keeps. Measured on one CPU core with 8 KV heads and a budget of 1024: reading
takes 1.0 to 1.05 times as long as with equal heads, answering 1.1 to 1.2 times; with the embedded one 1.15 and 1.5.
"""

# B batch, K KV heads, L new tokens, S slots, U units of all heads of a row, D head dim

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from locret.backbone.attention import View
from locret.cache.store import COLUMNS, EMPTY, NO_UNIT, POSITIONS, SCORES, STATES, Part, Slots, Store, UnitRanks
from locret.lookups.base import KeysOfHeads
from locret.policy.planned_bytes import largest_budget
from locret.policy.selectors import Kept, KeptOverHeads


class RaggedStore(Store):
    """Units of one layer, split over its KV heads by score.

    Buffers are (B, K * capacity, D) or (B, K * capacity). Head k of row b holds the `counts[b, k]` slots from
    `starts[b, k]` on, ascending by position.
    """

    name = holds = "ragged"
    uncounted = once = ("counts", "starts", "apart")
    spacing = 1
    """How far apart the positions of two neighbours may be; 1: units have their ranks."""
    reach = 0
    """Positions over which the units of a head may be spread."""
    _spans: tuple[Tensor, Tensor, list[list[slice]]] | None = None
    """The segments, and the counts and starts that they were made of: neither is ever written in place."""

    @property
    def counts(self) -> Tensor:
        """(B, K) int64 units of each head, on the CPU."""
        return self.tensors["counts"] if self.tensors else torch.zeros(1, 1, dtype=torch.int64)

    @property
    def starts(self) -> Tensor:
        """(B, K) int64 first slot of each head, on the CPU."""
        return self.tensors["starts"]

    def _allocate(self, keys: Tensor, values: Tensor) -> None:
        super()._allocate(keys, values)
        self.tensors = {name: slots.flatten(1, 2) for name, slots in self.buffers.items()}
        self._count(torch.zeros(keys.shape[:2], dtype=torch.int64), self.capacity)

    def _count(self, counts_BK: Tensor, capacity: int) -> None:
        """Let heads hold so many units, with the room that there is behind each."""
        widths = counts_BK + capacity - self.fill
        self.capacity = capacity
        self.tensors |= {"counts": counts_BK, "starts": widths.cumsum(1) - widths}

    def _resize(self, capacity: int) -> None:
        if self.batch:
            self._fill_from([(self, row) for row in range(len(self.counts))], capacity)
        self.capacity = capacity

    def _fill_from(self, rows: Sequence[tuple[RaggedStore, int]], capacity: int) -> None:
        """Take over rows of stores, in new buffers of so many slots."""
        counts, filled = torch.stack([store.counts[row] for store, row in rows]), {}
        if any("apart" in store.tensors for store, _ in rows):  # not where a row held nothing when it was turned
            filled["apart"] = torch.tensor([most_apart(store, store.counts, again=True)[row] for store, row in rows])
        sources = [(store, row, store.segments[row]) for store, row in rows]
        for name, like in rows[0][0].buffers.items():
            shape = len(rows), counts.shape[1] * capacity, *like.shape[2:]
            filled[name] = self.empty(shape, dtype=like.dtype, device=like.device)
        # Last: where there is no memory for it, the store is what it was.
        self._count(counts, capacity)
        for target, (store, row, spans) in enumerate(sources):
            for span, own in zip(spans, self.segments[target], strict=True):
                for name in store.buffers:
                    filled[name][target, own] = store.tensors[name][row, span]
        self.tensors |= filled

    @property
    def longest(self) -> int:
        return int(self.counts.max())

    @property
    def segments(self) -> list[list[slice]]:
        """Per row and KV head its slots."""
        counts, starts = self.counts, self.starts
        if self._spans is None or self._spans[0] is not counts or self._spans[1] is not starts:
            spans = [
                [slice(start, start + count) for start, count in zip(*row, strict=True)]
                for row in zip(starts.tolist(), counts.tolist(), strict=True)
            ]
            self._spans = counts, starts, spans
        return self._spans[2]

    def _slots(self, row: int, device: torch.device) -> Tensor:
        """Return (U,) the slots of a row's units, head after head."""
        return torch.cat([torch.arange(span.start, span.stop, device=device) for span in self.segments[row]])

    def rows(self) -> Iterable[tuple[Tensor, Tensor, list[int]]]:
        """Yield each row's scores and positions, (U,), head after head, and how many units each head has."""
        scores, positions = self.tensors[SCORES], self.tensors[POSITIONS]
        for row, counts in enumerate(self.counts.tolist()):
            slots = self._slots(row, scores.device)
            yield scores[row].index_select(0, slots), positions[row].index_select(0, slots), counts

    def append(self, keys: Tensor, values: Tensor, positions: Tensor, rotated: Tensor | None = None) -> None:
        batch, heads, new, dim = keys.shape
        self._make_room(keys, values)
        self.advance(new)
        places = self._newest(new).flatten()
        for buffer, states in ((self.keys, keys), (self.values, values)):
            buffer.flatten(0, 1).index_copy_(0, places, states.flatten(0, 2))
        self.tensors[POSITIONS].flatten().index_copy_(0, places, positions.expand(batch, heads, new).flatten())
        for name in self.dtypes.keys() - COLUMNS.keys():
            self.tensors[name].flatten().index_fill_(0, places, 0)
        self._rotated = rotated

    def view(self, base: int) -> View:
        """See `Store`; keys and values are (B, 1, slots, D), and `segments` point into them."""
        keys, newest = self.keys, self._rotated
        if newest is not None:
            batch, heads, new, dim = newest.shape
            keys = self.workspace.take((batch, heads, self.capacity, dim), self.capacity, newest).view(keys.shape)
            most = self.longest - new  # older units end, in each head, before position `base`
            for row, spans in enumerate(self.segments if most else ()):
                for span in spans:
                    old = slice(span.start, span.stop - new)
                    apart = min(self.spacing, self.reach // max(old.stop - old.start, 1))
                    angles = self._angles(row, span, new, base, most, apart)
                    self.rotary.turn(self.keys[row, old], *angles, out=keys[row, old])
            keys.flatten(0, 1).index_copy_(0, self._newest(new).flatten(), newest.flatten(0, 2))
            self._rotated = None
        return View(keys[:, None], self.values[:, None], segments=self.segments)

    def _newest(self, new: int) -> Tensor:
        """Return (B, K, L): where the newest units are, counting slots through all rows."""
        slots, device = self.keys.shape[1], self.keys.device
        first = [[row * slots + span.stop - new for span in spans] for row, spans in enumerate(self.segments)]
        first_BK1 = torch.tensor(first, device=device)[..., None]
        return first_BK1 if new == 1 else first_BK1 + torch.arange(new, device=device)

    def _angles(self, row: int, span: slice, new: int, base: int, most: int, apart: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of all but a head's newest units, which end before `base`; `most` are the most.

        Neighbours are so far `apart` at most.
        """
        old = slice(span.start, span.stop - new)
        count = old.stop - old.start
        if apart <= 1 or not count:
            cos, sin = self.rotary.table(base - most, most, self.keys)
            return cos[most - count :], sin[most - count :]
        positions = self.tensors[POSITIONS][row]
        after = positions[old.stop : old.stop + 1] if new else positions.new_full((1,), self.upcoming or 0)
        return self.rotary.at(base - distances(positions[old], after, apart), self.keys)

    def parts(self, view: View, new: int, newest_only: bool) -> Iterator[Part]:
        """Yield the new units of all heads; or, unless only those matter, one head after another."""
        if newest_only:
            batch, heads = self.counts.shape
            places, shape = self._newest(new).flatten(), (batch, heads, new)
            keys, values = (
                states.flatten(0, 2).index_select(0, places).view(*shape, -1) for states in (view.keys, view.values)
            )
            columns = {n: c.flatten().index_select(0, places).view(shape) for n, c in self.columns.items()}
            yield Part(None, keys, values, columns)
            return
        for row, spans in enumerate(self.segments):
            own = slice(row, row + 1)
            for head, span in enumerate(spans):
                columns = {name: column[own, None, span] for name, column in self.columns.items()}
                yield Part((row, head), view.keys[own, :, span], view.values[own, :, span], columns)

    def held(self, name: str) -> Tensor:
        batch, heads = self.counts.shape
        buffer, longest = self.tensors[name], self.longest
        held = buffer.new_full((batch, heads, longest), EMPTY.get(name, 0))
        for row, spans in enumerate(self.segments):
            for head, span in enumerate(spans):
                held[row, head, longest - (span.stop - span.start) :] = buffer[row, span]
        return held

    def write(self, name: str, values: Tensor, where: tuple[int, int] | None = None) -> None:
        new, column = values.shape[-1], self.tensors[name]
        if where is None:
            column.flatten().index_copy_(0, self._newest(new).flatten(), values.to(column.dtype).flatten())
            return
        row, head = where
        span = self.segments[row][head]
        column[row, span.stop - new : span.stop] = values[0, 0]

    def keep(self, kept: Kept, turned: bool) -> None:
        """See `Store`: units are packed anew, so that what a head gives up is there for the others."""
        assert isinstance(kept, KeptOverHeads)
        device, counts = self.keys.device, kept.counts
        fill = max(len(units) for units in kept.units) // counts.shape[1]
        source_U = torch.cat(
            [self._slots(row, device)[units] + row * self.keys.shape[1] for row, units in enumerate(kept.units)]
        )
        batch, slots = self.tensors[SCORES].shape
        first_slots = torch.arange(batch)[:, None] * slots
        ends, shrunk = first_slots + self.starts + self.counts, int((self.counts - counts).max())
        self.fill = fill
        self._count(counts, self.capacity)
        repeats = counts.flatten().to(device)

        def per_unit(numbers_BK: Tensor) -> Tensor:
            numbers = numbers_BK.flatten().to(device)
            return numbers.repeat_interleave(repeats, output_size=len(source_U))

        before_BK = (counts.flatten().cumsum(0) - counts.flatten()).view(batch, -1)
        rank_U = torch.arange(len(source_U), device=device) - per_unit(before_BK)
        if turned:
            # A head's units end at the same position as before, so what moves closer to the end is turned forward.
            moved_U = per_unit(ends) - source_U - (per_unit(counts) - rank_U)
            keys = self.keys.flatten(0, 1)
            keys.index_copy_(0, source_U, self._turned_on(keys[source_U], moved_U, shrunk))
        target_U = per_unit(first_slots + self.starts) + rank_U
        for buffer in self.buffers.values():
            if buffer.ndim == 2:
                buffer.flatten()[target_U] = buffer.flatten()[source_U]
                continue
            shape = (*self.counts.shape, self.fill, buffer.shape[-1])
            scratch = self.workspace.take(shape, self.capacity, buffer).flatten(0, 2)[: len(source_U)]
            torch.index_select(buffer.flatten(0, 1), 0, source_U, out=scratch)
            buffer.flatten(0, 1).index_copy_(0, target_U, scratch)

    def turn_keys(self, base: int, ranks: UnitRanks | None = None, *, back: bool = False) -> None:
        if not self.fill:
            return
        turn, longest = self.rotary.turn_back if back else self.rotary.turn, self.longest
        aparts = most_apart(self, self.counts, again=back) if ranks is None else []
        for row, spans in enumerate(self.segments):
            for head, span in enumerate(spans):
                if ranks is None:
                    angles = self._angles(row, span, 0, base, longest, aparts[row][head])
                else:
                    own = ranks.ranks[row, head, longest - (span.stop - span.start) :]
                    if not len(own):
                        continue
                    angles = self.rotary.at(own + (base - ranks.held), self.keys)
                self.keys[row, span] = turn(self.keys[row, span], *angles)

    def first_slots(self, device: torch.device) -> Tensor:
        rows = torch.arange(len(self.counts))[:, None] * self.keys.shape[1]
        return (rows + self.starts + self.counts - self.longest).flatten().to(device)

    def select_rows(self, rows: Tensor) -> None:
        super().select_rows(rows)
        fill = mean_units(self.counts) if self.batch else self.fill
        if fill < self.fill:  # the longest row is gone, and there is more room behind the heads of the others
            self.fill = fill
            self._resize(self.capacity)

    def join(self, others: Sequence[RaggedStore], room: int = 0) -> None:
        self.fill = max(store.fill for store in others)
        self._fill_from([(store, 0) for store in others], self.fill + room)

    def chain(self, stores: Sequence[RaggedStore]) -> None:
        counts, fill = torch.stack([store.counts for store in stores]).sum(0), sum(store.fill for store in stores)
        own = [(store, store.segments[0]) for store in stores]
        heads = [(store, spans[head]) for head in range(counts.shape[1]) for store, spans in own]
        packed = {name: torch.cat([store.tensors[name][0, span] for store, span in heads]) for name in self.buffers}
        self.load({**packed, "counts": counts}, fill)

    def state(self) -> dict[str, Tensor]:
        """Return everything held, head after head and row after row."""
        packed = {}
        for name, buffer in self.buffers.items():
            packed[name] = torch.cat([buffer[row, self._slots(row, buffer.device)] for row in range(self.batch)])
        return {**packed, **{name: self.tensors[name] for name in ("counts", "apart") if name in self.tensors}}

    def load(self, tensors: Mapping[str, Tensor], fill: int) -> None:
        super().load(tensors, fill)
        self._count(self.counts.cpu(), fill)
        units, slots = self.counts.sum(1).tolist(), self.counts.shape[1] * fill
        for name, packed in self.buffers.items():
            self.tensors[name] = packed.new_empty(len(units), slots, *packed.shape[1:])
            for row, held in enumerate(packed.split(units)):
                self.tensors[name][row, self._slots(row, packed.device)] = held

    def open_slots(self, new: int) -> Slots:
        """Return the buffers as they are, with room behind each head; slots that hold no unit are filled with zeros."""
        slots, device = torch.arange(self.keys.shape[1], device=self.keys.device), self.keys.device
        ends = (self.starts + self.counts).to(device)
        empty = (slots < self.starts.to(device)[..., None]) | (slots >= ends[..., None])
        for buffer in (self.keys, self.values):  # what is masked counts nothing, unless it is NaN
            buffer.masked_fill_(empty.all(1)[..., None], 0)
        mask = self.keys.new_zeros(empty.shape).masked_fill_(empty, -torch.inf)[:, :, None]
        rows = torch.arange(len(ends), device=device)[:, None] * len(slots)
        openings = torch.arange(ends.numel(), device=device) * len(slots) + ends.flatten()
        flat = tuple(self.flat_buffers((*STATES, POSITIONS)).values())
        return Slots(self.keys[:, None], self.values[:, None], flat, rows + ends, mask, openings)

    def advance(self, by: int = 1) -> None:
        self.fill += by
        self.tensors["counts"] = self.counts + by


class PackedTier(RaggedStore):
    """Units of a second tier, packed: each KV head has room of its own for as many as it may hold."""

    most: Tensor
    """(K,) int64 units that each KV head may hold."""

    def _count(self, counts_BK: Tensor, capacity: int) -> None:
        super()._count(counts_BK, capacity)
        level = largest_budget(lambda units: mean_units(self._widths(units)), capacity, 0, capacity * len(self.most))
        widths = self._widths(level or 0)
        self.tensors |= {"starts": widths.cumsum(1) - widths}

    def _widths(self, units: int) -> Tensor:
        """Return (B, K) room for what is held, and for so many units where they may be held."""
        return self.counts.maximum(self.most.clamp(max=units))

    def open(self, like: Store, coming: Tensor | int) -> None:
        """Have more slots in use, which hold no unit yet: as many as come, (B, K), to each head, or as it may hold."""
        self._make_room(*(held.unflatten(1, (len(self.most), -1))[:, :, :0] for held in (like.keys, like.values)))
        before, counts = self.counts, (self.counts + coming).minimum(self.most).maximum(self.counts)
        if bool((self.starts + counts > F.pad(self.starts[:, 1:], (0, 1), value=self.keys.shape[1])).any()):
            self.reserve(mean_units(self._widths(2 * int(counts.max()))))
        self.fill, self.tensors["counts"] = mean_units(counts), counts
        for row, spans in enumerate(self.segments):
            for span, old in zip(spans, before[row].tolist(), strict=True):
                self.tensors[POSITIONS][row, span.start + old : span.stop] = NO_UNIT

    def all_keys(self) -> KeysOfHeads:
        """Return the keys of each row and KV head."""
        rows = zip(self.keys, self.segments, strict=True)
        heads = tuple(tuple(keys[span] for span in spans) for keys, spans in rows)
        return KeysOfHeads((*self.counts.shape, self.longest, self.keys.shape[-1]), self.keys.device, heads)


def mean_units(counts_BK: Tensor) -> int:
    """Return how many slots per KV head hold the units of any row, rounded up."""
    return -(-int(counts_BK.sum(-1).max()) // counts_BK.shape[-1])


def most_apart(store: RaggedStore, counts_BK: Tensor, *, again: bool) -> list[list[int]]:
    """Return how far apart neighbours among so many units are at most, by row and head; `again`: as was said before."""
    if not again or "apart" not in store.tensors:  # files of earlier versions do not say it
        store.tensors["apart"] = (store.reach // counts_BK.cpu().clamp_min(1)).clamp(max=store.spacing)
    return store.tensors["apart"].tolist()


def distances(positions_S: Tensor, after_1: Tensor, apart: int) -> Tensor:
    """Return (S,) how far a head's units are from what comes after them, if neighbours are so far apart at most."""
    return positions_S.diff(append=after_1).clamp_(1, max(1, apart)).flip(0).cumsum(0).flip(0)
