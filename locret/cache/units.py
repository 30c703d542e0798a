"""What a holder of a cache has, and what is done to all of it alike: rows, copies, bytes and files, written once.

Stores, tiers, windows, states and trails are `Units`. What is their own is what they do with what they hold.
"""

# B batch, K KV heads, S slots

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

NO_UNIT = -1
"""Position of an empty slot."""
SCORES, POSITIONS, ROW_START = "scores", "positions", "row_start"
EMPTY = {SCORES: -torch.inf, POSITIONS: NO_UNIT}
"""What an empty slot's columns hold; other columns hold 0 there."""


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


class Units:
    """Tensors with a row per row of the batch, by the names that a file gives them.

    Columns are (B, K, capacity, ...), the first `fill` slots in use: in a batch short rows are aligned to the right.
    """

    once: ClassVar[Collection[str] | None] = ()
    """Names of tensors that a row has once, instead of a slot for each unit; None: all."""
    uncounted: ClassVar[Collection[str]] = ()
    """Names of tensors that are no part of the bytes: a few numbers on the CPU."""
    counter: ClassVar[str] = "fill"
    """What a file calls the number beside the tensors."""
    tensors: dict[str, Tensor]
    fill: int = 0
    """Units per KV head, on average."""
    capacity: int = 0
    """Slots for them."""
    row_start: Tensor | None = None
    """(B,) first filled slot of each row, where rows differ; None if all slots are filled."""
    empty: Callable[..., Tensor] = staticmethod(torch.empty)
    """Gives memory for a shape, a `dtype` and a `device`."""

    def _slotted(self, name: str) -> bool:
        return self.once is not None and name not in self.once

    @property
    def batch(self) -> int:
        """Rows; 0 before the first token."""
        return next((len(tensor) for name, tensor in self.tensors.items() if name not in self.uncounted), 0)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(tensor.nbytes for name, tensor in self.tensors.items() if name not in self.uncounted)

    @property
    def longest(self) -> int:
        """Units of the KV head that holds the most."""
        return self.fill

    @property
    def count(self) -> int:
        """The number beside the tensors."""
        return self.fill

    def take_back(self) -> None:
        """Forget the newest unit of every head."""
        self.fill -= 1

    def select_rows(self, rows: Tensor) -> None:
        """Keep, repeat or reorder rows of the batch; `rows` is (new batch,) int64."""
        self.tensors = {
            name: torch.index_select(held, 0, rows.to(held.device), out=self._anew(name, held, len(rows)))
            for name, held in self.tensors.items()
        }
        if self.row_start is not None:
            self.row_start = self.row_start.index_select(0, rows.to(self.row_start.device))

    def trim(self) -> None:
        """Drop the empty slots in front of the only row."""
        empty = 0 if self.row_start is None else int(self.row_start[0])
        self.row_start = None
        for name, held in self.tensors.items() if empty else ():
            if self._slotted(name):
                held[:, :, : self.fill - empty] = held[:, :, empty : self.fill].clone()
        self.fill -= empty

    def join(self, others: Sequence[Self], room: int = 0) -> None:
        """Become a batch of the only rows of others, aligned to the right, with room for so many more units."""
        self.fill = slots = max(other.fill for other in others)
        self.capacity, joined = slots + room, {}
        for name, like in others[0].tensors.items():
            if not self._slotted(name):
                joined[name] = torch.cat([other.tensors[name] for other in others])
                continue
            shape = (len(others), like.shape[1], slots + room, *like.shape[3:])
            joined[name] = self.empty(shape, dtype=like.dtype, device=like.device).fill_(EMPTY.get(name, 0))
            for row, other in enumerate(others):
                joined[name][row, :, slots - other.fill : slots] = other.tensors[name][0, :, : other.fill]
            self.row_start = torch.tensor([slots - other.fill for other in others], device=joined[name].device)
        self.tensors = joined

    def copy(self, workspace: Workspace) -> Self:
        """Return an independent copy that uses another workspace."""
        twin = copy.copy(self)
        twin.tensors = {name: self._anew(name, held).copy_(held) for name, held in self.tensors.items()}
        return twin

    def state(self) -> dict[str, Tensor]:
        """Return everything held, for `load`."""
        held = {n: (t[:, :, : self.fill] if self._slotted(n) else t).contiguous() for n, t in self.tensors.items()}
        return held if self.row_start is None else {**held, ROW_START: self.row_start}

    def load(self, tensors: Mapping[str, Tensor], fill: int) -> None:
        """Take over what `state` returned."""
        self.row_start = tensors.get(ROW_START)
        self.tensors = {name: tensor for name, tensor in tensors.items() if name != ROW_START}
        self.fill = self.capacity = fill

    def _anew(self, name: str, like: Tensor, rows: int | None = None) -> Tensor:
        """Return uninitialised memory for a tensor, or for so many rows of it, where this holder has its memory."""
        shape = (len(like) if rows is None else rows, *like.shape[1:])
        return (self.empty if self._slotted(name) else torch.empty)(shape, dtype=like.dtype, device=like.device)
