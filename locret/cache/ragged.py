"""A cache layer whose KV heads hold different numbers of units, in the memory of one whose heads hold as many each.

A row's units lie in one buffer of K x capacity slots, head after head. `fill` is how many a head holds on average, and
every head has `capacity - fill` free slots behind its own units. An eviction packs the units anew, so that whatever
a head gives up is there for the others. No slot is masked, and none pads a head to the length of another.

Cost: attention is one kernel call per row and KV head instead of one for all, and an eviction waits for the device once
per row, to learn how many units each head keeps. Measured on one CPU core with 8 KV heads and a budget of 1024: reading
takes 1.0 to 1.05 times as long as with equal heads, answering 1.1 to 1.2 times; with the embedded one 1.15 and 1.5.
"""

# B batch, K KV heads, L new tokens, S slots, U units of all heads of a row, D head dim

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from locret.backbone.instrument import Chunk
from locret.backbone.rotary import Rotary, rotate, unrotate
from locret.cache.layer import GROWTH, NO_UNIT, UNIT_TENSORS, RetentionLayer, Workspace
from locret.policy.selectors import select_over_heads


class RaggedLayer(RetentionLayer):
    """Units of one full-attention layer, split over its KV heads by score.

    Buffers are (B, K * capacity, D) or (B, K * capacity). Head k of row b holds the `counts[b, k]` slots from
    `starts[b, k]` on, ascending by position.
    """

    def __init__(self, rotary: Rotary, workspace: Workspace, compact: bool, floor: float, relative: bool) -> None:
        super().__init__(rotary, workspace, compact)
        self.floor, self.relative = floor, relative
        self.counts = self.starts = torch.zeros(1, 1, dtype=torch.int64)
        """(B, K), on the CPU."""

    # -- memory ---------------------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the buffers, once."""
        batch, heads, _, dim = key_states.shape
        self.counts = torch.zeros(batch, heads, dtype=torch.int64)
        self.starts = self._starts(self.counts)
        shape, device = (batch, heads * self.capacity), key_states.device
        self.keys = torch.empty(*shape, dim, dtype=key_states.dtype, device=device)
        self.values = torch.empty(*shape, value_states.shape[-1], dtype=value_states.dtype, device=device)
        self.scores = torch.empty(shape, dtype=torch.float32, device=device)
        self.positions = torch.empty(shape, dtype=torch.int32, device=device)
        self.is_initialized = True

    def _starts(self, counts_BK: Tensor) -> Tensor:
        widths = counts_BK + self.capacity - self.fill
        return widths.cumsum(1) - widths

    def _reallocate(self) -> None:
        self._fill_from([(self, row) for row in range(len(self.counts))])

    def _fill_from(self, rows: Sequence[tuple[RaggedLayer, int]]) -> None:
        """Take over rows of layers, in new buffers of this layer's capacity."""
        counts = torch.stack([layer.counts[row] for layer, row in rows])
        starts = self._starts(counts)
        sources = [layer.segments[row] for layer, row in rows]
        for name in UNIT_TENSORS:
            like = getattr(rows[0][0], name)
            new = like.new_empty(len(rows), counts.shape[1] * self.capacity, *like.shape[2:])
            for target, (layer, row) in enumerate(rows):
                old = getattr(layer, name)
                for span, start in zip(sources[target], starts[target].tolist(), strict=True):
                    new[target, start : start + span.stop - span.start] = old[row, span]
            setattr(self, name, new)
        self.counts, self.starts = counts, starts

    @property
    def longest(self) -> int:
        """Units of the KV head that holds the most."""
        return int(self.counts.max())

    @property
    def segments(self) -> list[list[slice]]:
        """Per row and KV head its slots."""
        return [
            [slice(start, start + count) for start, count in zip(starts, counts, strict=True)]
            for starts, counts in zip(self.starts.tolist(), self.counts.tolist(), strict=True)
        ]

    def _slots(self, row: int, device: torch.device | None = None) -> Tensor:
        """Return (U,) the slots of a row's units, head after head."""
        device = self.keys.device if device is None else device
        return torch.cat([torch.arange(span.start, span.stop, device=device) for span in self.segments[row]])

    def share_from_before(self, position: int) -> Tensor:
        """Return, as one number, the share of the held units that come from before a position of the text."""
        rows = [self.positions[row].index_select(0, self._slots(row)) for row in range(len(self.counts))]
        return (torch.cat(rows) < position).float().mean()

    # -- reading and decoding ---------------------------------------------------------------------------------------

    def append(
        self, key_states: Tensor, value_states: Tensor, raw_keys: Tensor | None, positions: Tensor, base: int
    ) -> tuple[Tensor, Tensor]:
        """Add L units to every head; return the (B, 1, slots, D) keys, rotated, and values that `segments` point into.

        For the arguments see `RetentionLayer.append`.
        """
        batch, heads, new, dim = key_states.shape
        end = self.fill + new
        if not self.is_initialized:
            self.capacity = max(self.capacity, end)
            self.lazy_initialization(key_states, value_states)
        elif end > self.capacity:
            self.reserve(max(end, self.capacity + GROWTH))
        self.fill, self.counts = end, self.counts + new
        places = self._newest(new).flatten()
        cached = key_states if raw_keys is None else raw_keys
        for buffer, states in ((self.keys, cached), (self.values, value_states)):
            buffer.flatten(0, 1).index_copy_(0, places, states.flatten(0, 2))
        self.positions.flatten().index_copy_(0, places, positions.expand(batch, heads, new).flatten())
        keys = self.keys
        if raw_keys is not None:
            shape = (batch, heads, self.capacity, dim)
            keys = self.workspace.take(shape, self.capacity, key_states).view(self.keys.shape)
            self._rotate_old(new, base, keys)
            keys.flatten(0, 1).index_copy_(0, places, key_states.flatten(0, 2))
        return keys[:, None], self.values[:, None]

    def _newest(self, new: int) -> Tensor:
        """Return (B, K, L): where the newest units are, counting slots through all rows."""
        rows = torch.arange(len(self.counts))[:, None] * self.keys.shape[1]
        first_BK = (rows + self.starts + self.counts - new).to(self.keys.device)
        return first_BK[..., None] + torch.arange(new, device=self.keys.device)

    def _rotate_old(self, new: int, base: int, out: Tensor) -> None:
        """Write rotated keys of all but the newest units: in each head they end before position `base`."""
        most = self.longest - new
        if not most:
            return
        cos, sin = self.rotary.table(base - most, most, out)
        for row, spans in enumerate(self.segments):
            for span in spans:
                old = slice(span.start, span.stop - new)
                first = most - (old.stop - old.start)
                rotate(self.keys[row, old], cos[first:], sin[first:], out=out[row, old])

    def parts(self, chunk: Chunk, together: bool) -> Iterator[tuple[Chunk, tuple[int, int] | None]]:
        """Yield what a scorer is to rate: the new units of all heads; or, if not `together`, one head after another."""
        assert chunk.positions is not None
        new = chunk.new_tokens
        if together:
            batch, heads = self.counts.shape
            places, shape = self._newest(new).flatten(), (batch, heads, new, -1)
            yield (
                replace(
                    chunk,
                    key=chunk.key.flatten(0, 2).index_select(0, places).view(shape),
                    value=chunk.value.flatten(0, 2).index_select(0, places).view(shape),
                    unit_positions=chunk.positions.expand(batch, heads, new),
                    stored_scores=self.scores.new_empty(batch, heads, 0),
                ),
                None,
            )
            return
        group = chunk.query.shape[1] // self.counts.shape[1]
        for row, spans in enumerate(self.segments):
            own = slice(row, row + 1)
            positions = chunk.positions if len(chunk.positions) == 1 else chunk.positions[own]
            for head, span in enumerate(spans):
                part = replace(
                    chunk,
                    query=chunk.query[own, head * group : (head + 1) * group],
                    key=chunk.key[own, :, span],
                    value=chunk.value[own, :, span],
                    projections=chunk.projections.of_head(row, head),
                    positions=positions,
                    unit_positions=self.positions[own, None, span],
                    stored_scores=self.scores[own, None, span.start : span.stop - new],
                )
                yield part, (row, head)

    def set_scores(self, scores_BKL: Tensor, where: tuple[int, int] | None = None) -> None:
        """Store the scores of the newest L units of all heads, or of the head of the row that `where` names."""
        new = scores_BKL.shape[-1]
        if where is None:
            self.scores.flatten().index_copy_(0, self._newest(new).flatten(), scores_BKL.flatten())
            return
        row, head = where
        span = self.segments[row][head]
        self.scores[row, span.stop - new : span.stop] = scores_BKL[0, 0]

    def evict(self, budget: int, protected: int) -> None:
        """Keep the K x `budget` best units of each row, and of each head the newest and best ones it is granted."""
        if self.fill <= budget:
            return
        floor = int(self.floor * budget)
        sources, kept_counts = [], []
        for row, counts in enumerate(self.counts.tolist()):
            slots = self._slots(row)
            scores, positions = (buffer[row].index_select(0, slots) for buffer in (self.scores, self.positions))
            kept, kept_K = select_over_heads(scores, positions, counts, budget, protected, floor, self.relative)
            sources.append(slots[kept] + row * self.keys.shape[1])
            kept_counts.append(kept_K.to("cpu"))
        self._pack(torch.cat(sources), torch.stack(kept_counts), budget)

    def _pack(self, source_U: Tensor, counts: Tensor, fill: int) -> None:
        """Move the units at `source_U`, counted through all rows, to where as many as `counts` per head belong."""
        device, (batch, slots) = source_U.device, self.scores.shape
        first_slots = torch.arange(batch)[:, None] * slots
        ends, shrunk = first_slots + self.starts + self.counts, int((self.counts - counts).max())
        self.fill, self.counts = fill, counts
        self.starts = self._starts(counts)
        repeats = counts.flatten().to(device)

        def per_unit(numbers_BK: Tensor) -> Tensor:
            numbers = numbers_BK.flatten().to(device)
            return numbers.repeat_interleave(repeats, output_size=len(source_U))

        before_BK = (counts.flatten().cumsum(0) - counts.flatten()).view(batch, -1)
        rank_U = torch.arange(len(source_U), device=device) - per_unit(before_BK)
        if self.rotated:
            # A head's units end at the same position as before, so what moves closer to the end is turned forward.
            moved_U = per_unit(ends) - source_U - (per_unit(counts) - rank_U)
            self._turn(source_U, moved_U, shrunk)
        target_U = per_unit(first_slots + self.starts) + rank_U
        for buffer in (self.scores, self.positions):
            buffer.flatten()[target_U] = buffer.flatten()[source_U]
        for buffer in (self.keys, self.values):
            shape = (*counts.shape, fill, buffer.shape[-1])
            scratch = self.workspace.take(shape, self.capacity, buffer).flatten(0, 2)[: len(source_U)]
            torch.index_select(buffer.flatten(0, 1), 0, source_U, out=scratch)
            buffer.flatten(0, 1).index_copy_(0, target_U, scratch)

    def _turn(self, slots_U: Tensor, moved_U: Tensor, most: int) -> None:
        like = torch.empty(0, dtype=torch.float32, device=slots_U.device)
        cos, sin = self.rotary.table(0, most + 1, like)
        magnitude, keys = cos[0, 0], self.keys.flatten(0, 1)
        turned = rotate(keys[slots_U].float(), (cos / magnitude)[moved_U], (sin / magnitude)[moved_U])
        keys.index_copy_(0, slots_U, turned.to(keys.dtype))

    def settle(self, base: int) -> None:
        """Rotate kept keys in place for decoding; `base` is the position of the next token. Compact positions only."""
        if self.compact and not self.rotated and self.fill:
            shape = (*self.counts.shape, self.capacity, self.keys.shape[-1])
            rotated = self.workspace.take(shape, self.capacity, self.keys).view(self.keys.shape)
            self._rotate_old(0, base, rotated)
            for row, spans in enumerate(self.segments):
                for span in spans:
                    self.keys[row, span] = rotated[row, span]
        self.rotated = self.compact

    def unsettle(self, base: int) -> None:
        """Undo `settle`, so that another prompt can be read; `base` is the position of the next token."""
        if self.rotated and self.fill:
            cos, sin = self.rotary.table(base - self.longest, self.longest, self.keys)
            for row, spans in enumerate(self.segments):
                for span in spans:
                    first = self.longest - (span.stop - span.start)
                    self.keys[row, span] = unrotate(self.keys[row, span], cos[first:], sin[first:])
        self.rotated = False

    def take_back(self) -> None:
        """Forget the newest unit of every head."""
        self.fill, self.counts = self.fill - 1, self.counts - 1

    # -- batches, looking inside, saving ----------------------------------------------------------------------------

    def select_rows(self, rows: Tensor) -> None:
        """Keep, repeat or reorder rows of the batch."""
        super().select_rows(rows)
        self.counts, self.starts = (x.index_select(0, rows.cpu()) for x in (self.counts, self.starts))
        fill = self._average(self.counts)
        if fill < self.fill:  # the longest row is gone, and there is more room behind the heads of the others
            self.fill = fill
            self._reallocate()

    def join(self, layers: Sequence[RaggedLayer], capacity: int) -> None:
        """Become a batch of the only rows of other layers."""
        self.fill, self.capacity = max(layer.fill for layer in layers), capacity
        self._fill_from([(layer, 0) for layer in layers])
        self.rotated, self.is_initialized = layers[0].rotated, True

    @staticmethod
    def _average(counts: Tensor) -> int:
        return int(counts.sum(1).max()) // counts.shape[1]

    def held(self, name: str) -> Tensor:
        """Return the units' "scores" or "positions", (B, K, units), at the right; -inf or -1 where a head has fewer."""
        batch, heads = self.counts.shape
        buffer: Tensor = getattr(self, name)
        held = buffer.new_full((batch, heads, self.longest), -torch.inf if name == "scores" else NO_UNIT)
        for row, spans in enumerate(self.segments):
            for head, span in enumerate(spans):
                held[row, head, self.longest - (span.stop - span.start) :] = buffer[row, span]
        return held

    def saved(self) -> dict[str, Tensor]:
        """Return everything held, head after head and row after row, for `restore`."""
        rows = range(len(self.counts))
        packed = {n: torch.cat([getattr(self, n)[row, self._slots(row)] for row in rows]) for n in UNIT_TENSORS}
        return {**packed, "counts": self.counts}

    def restore(self, tensors: dict[str, Tensor], fill: int, rotated: bool) -> None:
        """Take over what `saved` returned."""
        self.fill = self.capacity = fill
        self.counts = tensors["counts"].cpu()
        self.starts = self._starts(self.counts)
        units, slots = self.counts.sum(1).tolist(), self.counts.shape[1] * fill
        for name in UNIT_TENSORS:
            packed = tensors[name]
            buffer = packed.new_empty(len(units), slots, *packed.shape[1:])
            for row, held in enumerate(packed.split(units)):
                buffer[row, self._slots(row, packed.device)] = held
            setattr(self, name, buffer)
        self.rotated, self.is_initialized = rotated, True
