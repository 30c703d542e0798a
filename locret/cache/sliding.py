"""The cache layer of sliding attention: a plain window, which no budget touches."""

# B batch, K KV heads, S slots, D head dim

from __future__ import annotations

from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer


class SlidingLayer(DynamicSlidingWindowLayer):
    """A sliding-window layer's own cache, one token longer than usual so that the newest token can be taken back."""

    keys: Tensor
    values: Tensor

    def __init__(self, sliding_window: int) -> None:
        super().__init__(sliding_window=sliding_window + 1)
        self.row_start: Tensor | None = None
        self._next_row_start: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Append and return all states in reach, as the base class does; keep no more memory than the window."""
        self.row_start = self._next_row_start
        keys, values = super().update(key_states, value_states)
        dropped = keys.shape[-2] - self.keys.shape[-2]
        if dropped > 1:
            # The base class keeps views, which hold the whole chunk's states alive.
            self.keys, self.values = self.keys.clone(), self.values.clone()
        if self.row_start is not None:
            self._next_row_start = (self.row_start - dropped).clamp_min(0)
        return keys, values

    def saved(self) -> dict[str, Tensor]:
        """Return the states, for `fill_rows`."""
        return {"keys": self.keys.contiguous(), "values": self.values.contiguous()}

    def fill_rows(self, keys: Tensor, values: Tensor, row_start: Tensor | None, seen: int) -> None:
        """Take over states (B, K, S, D) whose rows begin at `row_start`, after `seen` tokens."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        self.keys, self.values, self.cumulative_length = keys, values, seen
        self.row_start = self._next_row_start = row_start

    @property
    def held_row_start(self) -> Tensor | None:
        """(B,) first filled slot of each row in what is kept; `row_start` is that of what was attended last."""
        return self._next_row_start

    def take_back(self) -> None:
        """Forget the newest token."""
        self.keys, self.values = self.keys[:, :, :-1], self.values[:, :, :-1]
        self.cumulative_length -= 1

    def select_rows(self, rows: Tensor) -> None:
        """Keep, repeat or reorder rows of the batch."""
        for name in ("keys", "values", "row_start", "_next_row_start"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor.index_select(0, rows.to(tensor.device)))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Follow the beams."""
        self.select_rows(beam_idx)

    @property
    def nbytes(self) -> int:
        """Bytes held; the states are views of the last forward's tensors, so their storage counts."""
        if not self.is_initialized:
            return 0
        return sum(t.untyped_storage().nbytes() for t in (self.keys, self.values))
