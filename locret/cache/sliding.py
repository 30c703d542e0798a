"""The cache layer of sliding attention: a plain window, which no budget touches."""

# B batch, K KV heads, S slots, D head dim

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from locret.backbone.attention import View
from locret.cache.units import FLOATS, ROW_START, Rule, Saved, Units


class SlidingLayer(Units, DynamicSlidingWindowLayer):  # type: ignore[misc]
    """A sliding-window layer's own cache, one token longer than usual so that the newest token can be taken back."""

    keys: Tensor
    values: Tensor
    rotated = False

    def __init__(self, sliding_window: int) -> None:
        super().__init__(sliding_window=sliding_window + 1)
        self._reach: View | None = None

    @classmethod
    def schema(cls, saved: Saved) -> dict[str, Rule]:
        """See `Units`; there is one token less once the newest was taken back."""
        head = ("rows", saved.shape.num_kv_heads, f"window {saved.index}")
        wide = {"keys": saved.shape.head_dim, "values": saved.shape.value_dim}
        rules = {name: Rule((*head, dim), FLOATS) for name, dim in wide.items()}
        return {**rules, ROW_START: Rule(("rows",), ("I64",), 0, saved.seen, needed=False)}

    @property
    def holders(self) -> dict[str, Units]:
        """What there is to be copied, joined and saved."""
        return {"": self}

    @property  # type: ignore[override]
    def tensors(self) -> dict[str, Tensor]:
        """What is kept."""
        return {"keys": self.keys, "values": self.values} if self.is_initialized else {}

    @tensors.setter
    def tensors(self, held: Mapping[str, Tensor]) -> None:
        if held and not self.is_initialized:
            self.lazy_initialization(held["keys"], held["values"])
        if held:
            self.keys, self.values = held["keys"], held["values"]

    @property  # type: ignore[override]
    def fill(self) -> int:
        """Tokens that are kept."""
        return self.keys.shape[2] if self.is_initialized else 0

    @fill.setter
    def fill(self, units: int) -> None:
        """Do nothing: it follows from the tensors."""

    @property
    def count(self) -> int:
        """Tokens that were read."""
        return int(self.cumulative_length)

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Append and return all states in reach, as the base class does; keep no more memory than the window."""
        keys, values = super().update(key_states, value_states)
        self._reach = View(keys, values, self.row_start)
        dropped = keys.shape[-2] - self.keys.shape[-2]
        if dropped > 1:
            # The base class keeps views, which hold the whole chunk's states alive.
            self.keys, self.values = self.keys.clone(), self.values.clone()
        if self.row_start is not None:
            self.row_start = (self.row_start - dropped).clamp_min(0)
        return keys, values

    def view(self, *, again: bool = False) -> View:
        """Return all states in reach of the pass that `update` was called for, once, or as long as there is more."""
        reach, self._reach = self._reach, self._reach if again else None
        assert reach is not None
        return reach

    def take_back(self) -> None:
        """Forget the newest token."""
        self.keys, self.values = self.keys[:, :, :-1], self.values[:, :, :-1]
        self.cumulative_length -= 1

    def trim(self) -> None:
        empty = 0 if self.row_start is None else int(self.row_start[0])
        self.keys, self.values, self.row_start = self.keys[:, :, empty:], self.values[:, :, empty:], None

    def load(self, tensors: Mapping[str, Tensor], fill: int) -> None:
        """See `Units`; `fill` is how many tokens were read."""
        super().load(tensors, fill)
        self.cumulative_length = fill

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Follow the beams."""
        self.select_rows(beam_idx)

    @property
    def nbytes(self) -> int:
        """Bytes held; the states are views of the last forward's tensors, so their storage counts."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors.values())
