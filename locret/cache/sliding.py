"""The cache layer of sliding attention: a plain window, which no budget touches."""

# B batch, K KV heads, S slots, D head dim

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from locret.backbone.attention import View
from locret.cache.store import Workspace, aligned

if TYPE_CHECKING:
    from typing_extensions import Self


class SlidingLayer(DynamicSlidingWindowLayer):
    """A sliding-window layer's own cache, one token longer than usual so that the newest token can be taken back."""

    keys: Tensor
    values: Tensor

    def __init__(self, sliding_window: int) -> None:
        super().__init__(sliding_window=sliding_window + 1)
        self._row_start: Tensor | None = None
        """(B,) first filled slot of each row in what is kept."""
        self._reach: View | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Append and return all states in reach, as the base class does; keep no more memory than the window."""
        row_start = self._row_start
        keys, values = super().update(key_states, value_states)
        self._reach = View(keys, values, row_start)
        dropped = keys.shape[-2] - self.keys.shape[-2]
        if dropped > 1:
            # The base class keeps views, which hold the whole chunk's states alive.
            self.keys, self.values = self.keys.clone(), self.values.clone()
        if row_start is not None:
            self._row_start = (row_start - dropped).clamp_min(0)
        return keys, values

    @property
    def batch(self) -> int:
        """Rows; 0 before the first token."""
        return self.keys.shape[0] if self.is_initialized else 0

    def view(self, *, again: bool = False) -> View:
        """Return all states in reach of the pass that `update` was called for, once, or as long as there is more."""
        reach, self._reach = self._reach, self._reach if again else None
        assert reach is not None
        return reach

    def take_back(self) -> None:
        """Forget the newest token."""
        self.keys, self.values = self.keys[:, :, :-1], self.values[:, :, :-1]
        self.cumulative_length -= 1

    def select_rows(self, rows: Tensor) -> None:
        """Keep, repeat or reorder rows of the batch."""
        if not self.is_initialized:
            return
        self.keys, self.values = (t.index_select(0, rows.to(t.device)) for t in (self.keys, self.values))
        if self._row_start is not None:
            self._row_start = self._row_start.index_select(0, rows.to(self._row_start.device))

    def trim(self, seen: int) -> None:
        """Drop the empty slots in front of the only row, which has read `seen` tokens."""
        empty = 0 if self._row_start is None else int(self._row_start[0])
        self._take_over(self.keys[:, :, empty:], self.values[:, :, empty:], None, seen)

    def join(self, layers: Sequence[Self], seen: int, new_tokens: int, most: int | None) -> None:
        """Become a batch of the only rows of other layers, aligned to the right, after `seen` tokens."""
        keys, start = aligned([layer.keys for layer in layers], 0)
        values, _ = aligned([layer.values for layer in layers], 0)
        self._take_over(keys, values, start, seen)

    def _take_over(self, keys: Tensor, values: Tensor, row_start: Tensor | None, seen: int) -> None:
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        self.keys, self.values, self._row_start, self.cumulative_length = keys, values, row_start, seen

    def copy(self, workspace: Workspace) -> SlidingLayer:
        """Return an independent copy."""
        twin = copy.copy(self)
        if self.is_initialized:
            twin.keys, twin.values = self.keys.clone(), self.values.clone()
        return twin

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors and numbers that say everything, for `load`."""
        tensors = {"keys": self.keys.contiguous(), "values": self.values.contiguous()}
        if self._row_start is not None:
            tensors["row_start"] = self._row_start
        return tensors, {"fill": self.cumulative_length, "rotated": False}

    def load(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Take over what `state` returned."""
        self._take_over(tensors["keys"], tensors["values"], tensors.get("row_start"), numbers["fill"])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Follow the beams."""
        self.select_rows(beam_idx)

    @property
    def nbytes(self) -> int:
        """Bytes held; the states are views of the last forward's tensors, so their storage counts."""
        if not self.is_initialized:
            return 0
        return sum(t.untyped_storage().nbytes() for t in (self.keys, self.values))
