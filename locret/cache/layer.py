"""The cache layer of full attention: a bounded buffer of scored units."""

# B batch, K KV heads, L new tokens, S slots, C kept slots, D head dim

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from locret.backbone.instrument import Chunk
from locret.backbone.rotary import Rotary, rotate, unrotate
from locret.policy.selectors import select_kept

NO_UNIT = -1
UNIT_TENSORS = ("keys", "values", "scores", "positions")
GROWTH = 256


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

    def clear(self) -> None:
        """Give the memory back."""
        self._buffers.clear()

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.nbytes for buffer in self._buffers.values())


class RetentionLayer(CacheLayerMixin):
    """Units of one full-attention layer: keys, values, scores and original positions, in ascending order per KV head.

    Buffers are (B, K, capacity, D) or (B, K, capacity); the first `fill` slots are in use. With compact positions keys
    wait un-rotated between chunks and are `rotated` in place when the prompt has been read.
    """

    is_sliding = False
    keys: Tensor
    values: Tensor
    scores: Tensor
    positions: Tensor

    def __init__(self, rotary: Rotary, workspace: Workspace, compact: bool) -> None:
        super().__init__()
        self.rotary, self.workspace, self.compact = rotary, workspace, compact
        self.row_start: Tensor | None = None
        self.fill = self.capacity = 0
        self.rotated = False

    # -- memory ---------------------------------------------------------------------------------------------------

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` slots now (or at the first update); never shrinks."""
        if capacity > self.capacity:
            self.capacity = capacity
            if self.is_initialized:
                self._reallocate()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the buffers, once."""
        batch, heads, _, dim = key_states.shape
        shape = (batch, heads, self.capacity)
        device = key_states.device
        self.keys = torch.empty(*shape, dim, dtype=key_states.dtype, device=device)
        self.values = torch.empty(*shape, value_states.shape[-1], dtype=value_states.dtype, device=device)
        self.scores = torch.empty(shape, dtype=torch.float32, device=device)
        self.positions = torch.empty(shape, dtype=torch.int32, device=device)
        self.is_initialized = True

    def shrink(self, capacity: int) -> None:
        """Give back memory beyond `capacity` slots, or beyond what is held."""
        capacity = max(capacity, self.fill)
        if self.is_initialized and capacity < self.capacity:
            self.capacity = capacity
            self._reallocate()

    def _reallocate(self) -> None:
        for name in UNIT_TENSORS:
            old = getattr(self, name)
            new = old.new_empty(*old.shape[:2], self.capacity, *old.shape[3:])
            new[:, :, : self.fill] = old[:, :, : self.fill]
            setattr(self, name, new)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        if not self.is_initialized:
            return 0
        return sum(t.nbytes for t in (self.keys, self.values, self.scores, self.positions))

    def share_from_before(self, position: int) -> Tensor:
        """Return, as one number, the share of the held units that come from before a position of the text."""
        return (self.positions[:, :, : self.fill] < position).float().mean()

    # -- reading and decoding ---------------------------------------------------------------------------------------

    def append(
        self, key_states: Tensor, value_states: Tensor, raw_keys: Tensor | None, positions: Tensor, base: int
    ) -> tuple[Tensor, Tensor]:
        """Add L units and return the (B, K, S, D) keys, rotated, and values to attend to.

        Args:
            key_states: (B, K, L, D) post-rotary keys of the new tokens.
            value_states: (B, K, L, D).
            raw_keys: (B, K, L, D) the keys before rotation, while a prompt is read with compact positions; else None.
            positions: (B, 1, L) original positions.
            base: Rotary position of the first new token, while a prompt is read with compact positions.
        """
        new = key_states.shape[-2]
        end = self.fill + new
        if not self.is_initialized:
            self.capacity = max(self.capacity, end)
            self.lazy_initialization(key_states, value_states)
        elif end > self.capacity:
            self.reserve(max(end, self.capacity + GROWTH))
        span = slice(self.fill, end)
        self.values[:, :, span] = value_states
        self.positions[:, :, span] = positions
        keys = self.keys[:, :, :end]
        if raw_keys is None:
            self.keys[:, :, span] = key_states
        else:
            self.keys[:, :, span] = raw_keys
            rotated = self.workspace.take((*key_states.shape[:2], end, key_states.shape[-1]), self.capacity, key_states)
            if self.fill:
                cos, sin = self.rotary.table(base - self.fill, self.fill, key_states)
                rotate(keys[:, :, : self.fill], cos, sin, out=rotated[:, :, : self.fill])
            rotated[:, :, span] = key_states
            keys = rotated
        self.fill = end
        return keys, self.values[:, :, :end]

    @property
    def longest(self) -> int:
        """Units of the KV head that holds the most."""
        return self.fill

    @property
    def segments(self) -> list[list[slice]] | None:
        """Per row and KV head its slots; None: all heads have the first `fill`."""
        return None

    def parts(self, chunk: Chunk, together: bool) -> Iterator[tuple[Chunk, tuple[int, int] | None]]:
        """Yield what a scorer is to rate, and for which row and KV head; None: for all at once."""
        chunk.unit_positions = self.positions[:, :, : self.fill]
        chunk.stored_scores = self.scores[:, :, : self.fill - chunk.new_tokens]
        yield chunk, None

    def set_scores(self, scores_BKL: Tensor, where: tuple[int, int] | None = None) -> None:
        """Store the scores of the newest L units; empty slots among them get the worst."""
        first = self.fill - scores_BKL.shape[-1]
        if self.row_start is not None:
            slots = torch.arange(first, self.fill, device=scores_BKL.device)
            empty = slots < self.row_start[:, None]
            scores_BKL = scores_BKL.masked_fill(empty[:, None], -torch.inf)
        self.scores[:, :, first : self.fill] = scores_BKL

    def evict(self, budget: int, protected: int) -> None:
        """Keep the `budget` best units of each KV head, and the newest `protected` ones whatever their score."""
        if self.fill <= budget:
            return
        newest = None
        if protected:
            newest = torch.arange(self.fill, device=self.keys.device) >= self.fill - protected
        kept = select_kept(self.scores[:, :, : self.fill], budget, newest)
        if self.rotated:
            self._turn_forward(kept)
        for buffer in (self.keys, self.values, self.scores, self.positions):
            self._gather(buffer, kept)
        if self.row_start is not None:
            self.row_start = (self.row_start - (self.fill - budget)).clamp_min(0)
        self.fill = budget

    def _gather(self, buffer: Tensor, kept_BKC: Tensor) -> None:
        count = kept_BKC.shape[-1]
        if buffer.ndim == 3:
            buffer[:, :, :count] = buffer[:, :, : self.fill].gather(2, kept_BKC)
            return
        # Whole rows of D move, so index rows of the flat buffer: much faster than an element-wise gather.
        batch, heads, capacity, dim = buffer.shape
        first = torch.arange(batch * heads, device=buffer.device)[:, None] * capacity
        rows = (kept_BKC.flatten(0, 1) + first).flatten()
        scratch = self.workspace.take((batch, heads, count, dim), self.capacity, buffer)
        torch.index_select(buffer.view(-1, dim), 0, rows, out=scratch.view(-1, dim))
        buffer[:, :, :count] = scratch

    def _turn_forward(self, kept_BKC: Tensor) -> None:
        """Turn rotated keys by the distance they are about to move, so that each ends at its new slot's position."""
        fill, count = self.fill, kept_BKC.shape[-1]
        moved = fill - count + torch.arange(count, device=kept_BKC.device) - kept_BKC
        like = torch.empty(0, dtype=torch.float32, device=kept_BKC.device)
        cos, sin = self.rotary.table(0, fill - count + 1, like)
        magnitude = cos[0, 0]
        kept = self.keys.gather(2, kept_BKC[..., None].expand(*kept_BKC.shape, self.keys.shape[-1])).float()
        turned = rotate(kept, (cos / magnitude)[moved], (sin / magnitude)[moved]).to(self.keys.dtype)
        self.keys.scatter_(2, kept_BKC[..., None].expand_as(turned), turned)

    def settle(self, base: int) -> None:
        """Rotate kept keys in place for decoding; `base` is the position of the next token. Compact positions only."""
        if self.compact and not self.rotated and self.fill:
            keys = self.keys[:, :, : self.fill]
            cos, sin = self.rotary.table(base - self.fill, self.fill, keys)
            scratch = self.workspace.take(tuple(keys.shape), self.capacity, keys)
            keys.copy_(rotate(keys, cos, sin, out=scratch))
        self.rotated = self.compact

    def unsettle(self, base: int) -> None:
        """Undo `settle`, so that another prompt can be read; `base` is the position of the next token."""
        if self.rotated and self.fill:
            keys = self.keys[:, :, : self.fill]
            cos, sin = self.rotary.table(base - self.fill, self.fill, keys)
            keys.copy_(unrotate(keys, cos, sin))
        self.rotated = False

    def held(self, name: str) -> Tensor:
        """Return the units' "scores" or "positions", (B, K, units)."""
        held: Tensor = getattr(self, name)[:, :, : self.fill]
        return held

    def saved(self) -> dict[str, Tensor]:
        """Return everything held, for `restore`."""
        return {name: getattr(self, name)[:, :, : self.fill].contiguous() for name in UNIT_TENSORS}

    def restore(self, tensors: dict[str, Tensor], fill: int, rotated: bool) -> None:
        """Take over what `saved` returned."""
        for name in UNIT_TENSORS:
            setattr(self, name, tensors[name])
        self.fill = self.capacity = fill
        self.rotated, self.is_initialized = rotated, True

    @property
    def held_row_start(self) -> Tensor | None:
        """(B,) first filled slot of each row, between forward passes."""
        return self.row_start

    def take_back(self) -> None:
        """Forget the newest unit."""
        self.fill -= 1

    # -- batches ----------------------------------------------------------------------------------------------------

    def select_rows(self, rows: Tensor) -> None:
        """Keep, repeat or reorder rows of the batch."""
        for name in UNIT_TENSORS:
            tensor = getattr(self, name)
            setattr(self, name, tensor.index_select(0, rows.to(tensor.device)))
        if self.row_start is not None:
            self.row_start = self.row_start.index_select(0, rows.to(self.row_start.device))

    # -- the contract of transformers -------------------------------------------------------------------------------

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

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Follow the beams."""
        self.select_rows(beam_idx)
