"""Generated tokens that wait for their scores: a retaining head that rates several at once reads its weights once.

A score is needed only when something is evicted, saved or looked at, so a step of generation need not wait for it. The
features wait in the workspace, which is idle while an answer is written, and never take more than it has.
"""

# B batch, W waiting tokens, F features of a token

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from locret.cache.store import Store

MOST = 16
"""Tokens that wait at most. With 16 of them the heads' weights are a hundredth of what a step reads and less."""


class Unscored:
    """Features of the newest units of each layer, in order, as far as they have no scores yet."""

    def __init__(self, stores: Sequence[Store], widths: Sequence[int], *, idle: bool = True) -> None:
        self.stores, self.widths, self.idle = stores, widths, idle
        self._rooms: list[Tensor] = []
        self._counts: dict[int, int] = {}

    def rooms(self, dtype: torch.dtype, least: int = 0) -> list[Tensor]:
        """Return where features of each layer may wait, (B, W, F), in the workspace; W is at least `least`."""
        # As many as fit into the workspace that the plan grants, which is as large as the largest layer's keys.
        idle = self.idle and not any(store.rewrites for store in self.stores)
        held = (states[0] for store in self.stores for states in (store.keys, store.values))
        numbers = max(states.numel() for states in held) if idle else 0
        most = max(least, min(MOST, numbers // sum(self.widths)))
        batch, starts = self.stores[0].batch, list(accumulate(self.widths, initial=0))
        rooms = []
        for store, start, width in zip(self.stores, starts, self.widths, strict=False):
            like = store.keys.new_empty(0, dtype=dtype)
            every = store.workspace.take((1, batch, most, starts[-1]), 0, like).flatten()
            rooms.append(every[batch * most * start :][: batch * most * width].view(batch, most, width))
        return rooms

    def add(self, nth: int, parts: list[Tensor]) -> Tensor | None:
        """Let the newest unit of a layer wait.

        Returns:
            (B, W, F) features that must be rated now, because no more can wait; None if more can.
        """
        if not self._rooms:
            if not all(store.batch for store in self.stores):
                return torch.cat(parts, dim=-1)  # the first token of all: the workspace has not its size yet
            self._rooms = self.rooms(parts[0].dtype)
        room = self._rooms[nth]
        if not (most := room.shape[1]):
            return torch.cat(parts, dim=-1)
        count = self._counts.get(nth, 0) + 1
        torch.cat(parts, dim=-1, out=room[:, count - 1 : count])
        self._counts[nth] = count % most
        return room if count == most else None

    def hold(self, rooms: list[Tensor], count: int) -> None:
        """Take note that the newest `count` units of every layer wait in rooms that somebody else has filled."""
        self._rooms, self._counts = rooms, dict.fromkeys(range(len(rooms)), count)

    def take(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the index and the (B, W, F) features of each layer with waiting tokens, which then wait no longer."""
        for nth, count in self._counts.items():
            if count:
                yield nth, self._rooms[nth][:, :count]
        self._rooms, self._counts = [], {}
