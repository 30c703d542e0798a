"""The cache layer of sliding attention: a plain window, which no budget touches."""

# B batch, K KV heads, S slots, D head dim

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from locret.backbone.attention import View
from locret.cache.units import Units


class SlidingLayer(Units, CacheLayerMixin):
    """The newest tokens of a layer: as many as its window, so that the newest of them can be taken back."""

    is_sliding = True
    rotated = False

    def __init__(self, window: int) -> None:
        # Not the base's __init__: it would set keys and values.
        self.window, self.tensors, self.seen = window, {}, 0
        self._reach: View | None = None

    @property
    def holders(self) -> dict[str, Units]:
        """What there is to be copied, joined and saved."""
        return {"": self}

    @property
    def is_initialized(self) -> bool:
        """Whether anything has been read."""
        return bool(self.tensors)

    @property
    def count(self) -> int:
        return self.seen

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Append and return all states in reach; keep no more memory than the window."""
        new = {"keys": key_states, "values": value_states}
        held = {name: [self.tensors[name]] if self.tensors else [] for name in new}
        reach = {name: torch.cat([*held[name], one], -2) for name, one in new.items()}
        self._reach = View(reach["keys"], reach["values"], self.row_start)
        dropped = max(reach["keys"].shape[2] - self.window, 0)
        kept = {name: states[:, :, dropped:] for name, states in reach.items()}
        # A view holds the whole chunk's states alive.
        self.tensors = {name: states.clone() for name, states in kept.items()} if dropped > 1 else kept
        self.seen, self.fill = self.seen + key_states.shape[2], self.tensors["keys"].shape[2]
        if self.row_start is not None:
            self.row_start = (self.row_start - dropped).clamp_min(0)
        return reach["keys"], reach["values"]

    def view(self, *, again: bool = False) -> View:
        """Return all states in reach of the pass that `update` was called for, once, or as long as there is more."""
        reach, self._reach = self._reach, self._reach if again else None
        assert reach is not None
        return reach

    def take_back(self) -> None:
        self.seen, self.fill = self.seen - 1, self.fill - 1
        self.tensors = {name: held[:, :, :-1] for name, held in self.tensors.items()}

    def trim(self) -> None:
        empty = 0 if self.row_start is None else int(self.row_start[0])
        self.row_start, self.fill = None, self.fill - empty
        self.tensors = {name: held[:, :, empty:] for name, held in self.tensors.items()}

    def load(self, tensors: Mapping[str, Tensor], fill: int) -> None:
        """See `Units`; `fill` is how many tokens were read."""
        super().load(tensors, tensors["keys"].shape[2])
        self.seen = fill

    @property
    def nbytes(self) -> int:
        """Bytes held; the states may be views, so their storage counts."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors.values())

    # The contract of transformers.

    def lazy_initialization(self, *_: object, **__: object) -> None:
        """Do nothing: `update` makes the tensors."""

    def get_seq_length(self) -> int:
        """Tokens that were read."""
        return self.seen

    def get_max_length(self) -> int:
        """Tokens that are kept."""
        return self.window + 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Sizes that a (tokens x slots) mask would have, and where it begins."""
        return min(self.seen, self.window) + query_length, max(self.seen - self.window, 0)
