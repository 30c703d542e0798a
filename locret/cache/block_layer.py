"""The cache layer of InfLLM: first tokens and a window on the device, everything older in blocks on the host.

Paper:     InfLLM, arXiv 2402.04617, section 3.
Deviates:  a token that leaves the window within an execution block counts once for every query, as near or as far
           (the released code shows some of them to the block's first queries as both).
"""

# B batch, K KV heads, G query heads per KV head, N = K G, L new tokens, S slots, F far slots, P block size, D head dim

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from typing_extensions import Self

from locret.backbone.attention import Far, View
from locret.backbone.chunk import Projections
from locret.backbone.shape import LayerShape
from locret.cache.blocks import Blocks
from locret.cache.layer import RetentionLayer
from locret.cache.store import EMPTY, SCORES, DenseStore, Part
from locret.cache.units import Units, Workspace
from locret.lookups.infllm import InfLLM, attention_column
from locret.policy.selectors import KeptPerHead, PerHead, Stay


def block_columns(shape: LayerShape) -> dict[str, torch.dtype]:
    """Return what is remembered of each near unit: the attention that it got from each query head of its group."""
    return {attention_column(g): torch.float32 for g in range(shape.num_heads // shape.num_kv_heads)}


class BlockLayer(RetentionLayer):
    """Un-rotated units of the first tokens and of the window, oldest first, and a tier of blocks."""

    raw = True

    store: DenseStore

    def __init__(self, store: DenseStore, lookup: InfLLM, heads: int) -> None:
        super().__init__(store, PerHead(), compact=True)
        self.lookup, self.heads = lookup, heads
        self.local, self.block, self.init, *_ = lookup.numbers
        self.blocks = Blocks(lookup)
        self._new = 0

    def append(self, keys: Tensor, values: Tensor, raw_keys: Tensor | None, positions: Tensor) -> None:
        """Move what has left the window to the blocks, then add the units of L new tokens."""
        assert raw_keys is not None
        self.blocks.begin(raw_keys, values, self.heads)
        self._form_blocks()
        self.store.append(raw_keys, values, positions)
        self.store.write(SCORES, positions.float().expand(*keys.shape[:2], -1))
        self._new = keys.shape[2]

    def _form_blocks(self) -> None:
        """Give whole blocks of each row's oldest units, but for the first tokens, to the tier."""
        store, fill = self.store, self.store.fill
        starts = [0] * store.batch if store.row_start is None else store.row_start.tolist()
        due = [max(fill - start - self.init - self.local, 0) // self.block for start in starts]
        if not any(due):
            return
        kept = []
        for row, (start, count) in enumerate(zip(starts, due, strict=True)):
            old = slice(start + self.init, start + self.init + count * self.block)
            if count:
                attention = torch.stack([column[row, :, old] for column in self._attention()], dim=1)
                self.blocks.add(row, store.keys[row, :, old], store.values[row, :, old], attention)
            kept.append([*range(start, min(old.start, fill)), *range(old.stop, fill)])
        held = max(map(len, kept))
        empty = [held - len(slots) for slots in kept]
        ranks = torch.tensor([[0] * before + slots for before, slots in zip(empty, kept, strict=True)])
        store.keep(KeptPerHead(ranks.to(store.keys.device)[:, None].expand(-1, store.keys.shape[1], -1), fill), False)
        store.row_start = torch.tensor(empty, device=store.keys.device) if any(empty) else None
        for row, before in enumerate(empty):
            for name, column in store.columns.items():
                column[row, :, :before] = EMPTY.get(name, 0)

    def _attention(self) -> list[Tensor]:
        return [self.store.columns[attention_column(g)] for g in range(self.heads // self.store.keys.shape[1])]

    @property
    def tier(self) -> Blocks:
        return self.blocks

    @property
    def holders(self) -> dict[str, Units]:
        return {"blocks.": self.blocks, "": self.store}

    @property
    def reach(self) -> int:
        """See `RetentionLayer`: near units alone have positions."""
        return self.store.longest

    def view(self, base: int, projections: Projections) -> View:
        """Return what the queries attend to; how the backbone has rotated them does not matter here."""
        store, query = self.store, projections.query()
        near, held = min(store.fill, self.local + self._new - 1), max(store.fill - self.local, 0)
        window = slice(store.fill - near, store.fill)
        cos, sin = store.rotary.table(0, near, query)
        near_query = store.rotary.turn(query, cos[near - self._new :], sin[near - self._new :])
        # Not by `table`, which remembers the window's for the layers to come.
        far_cos, far_sin = store.rotary.at(torch.tensor([0, self.local - 1], device=query.device), query)
        far_query = store.rotary.turn(query, far_cos[1:], far_sin[1:])
        keys, values, chosen = self.blocks.recall(far_query)
        far_keys = torch.cat([store.keys[:, :, :held], keys], dim=2)
        # A key at position 0 is not turned, but it is stretched where the backbone's tables are.
        far_query[..., : far_cos.shape[-1]] *= far_cos[0]
        far = Far(
            near_query=near_query,
            query=far_query,
            keys=far_keys,
            values=torch.cat([store.values[:, :, :held], values], dim=2),
            held=held,
            window=self.local,
            empty=self._empty(chosen, held, near),
            tell=self._note,
        )
        turned = store.workspace.take((*store.keys.shape[:2], near, store.keys.shape[3]), store.capacity, store.keys)
        store.rotary.turn(store.keys[:, :, window], cos, sin, out=turned)
        return View(turned, store.values[:, :, window], far=far)

    def _empty(self, chosen: Tensor, held: int, near: int) -> Tensor | None:
        """Return which (B, 1, near + F) slots hold nothing."""
        there = chosen >= 0
        if self.store.row_start is None and bool(there.all()):
            return None
        slots = torch.cat([torch.arange(self.store.fill - near, self.store.fill), torch.arange(held)])
        starts = torch.zeros(1) if self.store.row_start is None else self.store.row_start.cpu()
        units = (slots < starts[:, None]).expand(len(chosen), -1)
        recalled = ~there.repeat_interleave(self.block, dim=-1)
        return torch.cat([units, recalled], dim=-1)[:, None].to(self.store.keys.device)

    def _note(self, near_mass: Tensor) -> None:
        """Add the (B, N, near) attention of the window's units to their columns."""
        if self.blocks.counted:
            near_mass, self.blocks.counted = near_mass[..., -1:], False
        columns = self._attention()
        span = slice(self.store.fill - near_mass.shape[-1], self.store.fill)
        for column, mass in zip(columns, near_mass.unflatten(1, (-1, len(columns))).unbind(2), strict=True):
            column[:, :, span] += mass

    def parts(self, view: View, new: int, newest_only: bool) -> Iterator[Part]:
        """Ask no scorer: a unit's place decides where it is."""
        return iter(())

    def evict(self, stay: Stay, base: int) -> None:
        """Drop nothing: what leaves the window goes to the blocks."""

    def settle(self, base: int, seen: int | None) -> None:
        """Leave keys as they are: they are turned when they are seen."""

    def unsettle(self, base: int, seen: int | None) -> None:
        """Leave keys as they are."""

    def copy(self, workspace: Workspace) -> Self:
        twin = super().copy(workspace)
        twin.blocks = self.blocks.copy(workspace)
        return twin
