"""The cache layer of InfLLM: first tokens and a window on the device, everything older in blocks on the host.

Paper:     InfLLM, arXiv 2402.04617, section 3.
Deviates:  a token that leaves the window within an execution block counts once for every query, as near or as far
           (the released code shows some of them to the block's first queries as both).
"""

# B batch, K KV heads, G query heads per KV head, N = K G, L new tokens, S slots, F far slots, P block size, D head dim

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from locret.backbone.adapters import LayerShape
from locret.backbone.attention import View
from locret.backbone.chunk import Attended, Chunk, Projections
from locret.backbone.near_and_far import Far
from locret.cache.blocks import Blocks
from locret.cache.layer import Moment, RetentionLayer
from locret.cache.store import EMPTY, SCORES, DenseStore, Workspace
from locret.lookups.infllm import InfLLM, attention_column
from locret.policy.selectors import KeptPerHead, PerHead, Stay

if TYPE_CHECKING:
    from typing_extensions import Self


def block_columns(shape: LayerShape) -> dict[str, torch.dtype]:
    """Return what is remembered of each near unit: the attention that it got from each query head of its group."""
    return {attention_column(g): torch.float32 for g in range(shape.num_heads // shape.num_kv_heads)}


class BlockLayer(RetentionLayer):
    """Un-rotated units of the first tokens and of the window, oldest first, and a tier of blocks.

    Args:
        store: Holds the near units, with a column of attention for each query head of a group.
        lookup: The method's numbers, completed.
        heads: N.
    """

    raw = True

    store: DenseStore

    def __init__(self, store: DenseStore, lookup: InfLLM, heads: int) -> None:
        super().__init__(store, PerHead(), compact=True)
        self.lookup, self.heads = lookup, heads
        self.local, self.block, self.init, topk, cached, repr_topk = lookup.numbers
        self.blocks = Blocks(self.block, cached, topk, repr_topk, lookup.per_head, lookup.decay)
        self._new = 0
        self._counted = False
        """Whether the coming token has been fed before, so that the units before it have its attention already."""

    # -- reading and answering ----------------------------------------------------------------------------------------

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
        assert store.keys is not None
        assert store.values is not None
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
        assert self.store.keys is not None
        return [self.store.columns[attention_column(g)] for g in range(self.heads // self.store.keys.shape[1])]

    @property
    def tier(self) -> Blocks:
        """See `RetentionLayer`."""
        return self.blocks

    @property
    def reach(self) -> int:
        """See `RetentionLayer`: near units alone have positions."""
        return self.store.longest

    def view(self, base: int, projections: Projections) -> View:
        """Return what the queries attend to; how the backbone has rotated them does not matter here."""
        store, query = self.store, projections.query()
        assert store.keys is not None
        assert store.values is not None
        near, held = min(store.fill, self.local + self._new - 1), max(store.fill - self.local, 0)
        window = slice(store.fill - near, store.fill)
        cos, sin = store.rotary.table(0, near, query)
        near_query = store.rotary.turn(query, cos[near - self._new :], sin[near - self._new :])
        # Not by `table`, which remembers the window's for the layers to come.
        far_cos, far_sin = store.rotary.at(torch.tensor([0, self.local - 1], device=query.device), query)
        far_query = store.rotary.turn(query, far_cos[1:], far_sin[1:])
        keys, values, chosen = self.blocks.recall(far_query)
        far_keys = torch.cat([store.keys[:, :, :held], keys], dim=2)
        if self.lookup.far == "original" and far_keys.shape[2]:
            far_query = near_query
            far_cos, far_sin = store.rotary.at(self._distances(chosen, held, near), query)
            far_keys = store.rotary.turn(far_keys, far_cos, far_sin)
        else:  # a key at position 0 is not turned, but it is stretched where the backbone's tables are
            far_query[..., : far_cos.shape[-1]] *= far_cos[0]
        far = Far(
            near_query=near_query,
            query=far_query,
            keys=far_keys,
            values=torch.cat([store.values[:, :, :held], values], dim=2),
            held=held,
            window=self.local,
            empty=self._empty(chosen, held, near, far_keys.shape[2]),
            tell=lambda near_mass, far_mass: self._note(near_mass, far_mass[..., held:]),
        )
        turned = store.workspace.take((*store.keys.shape[:2], near, store.keys.shape[3]), store.capacity, store.keys)
        store.rotary.turn(store.keys[:, :, window], cos, sin, out=turned)
        return View(turned, store.values[:, :, window], far=far)

    def _distances(self, chosen: list[list[list[int]]], held: int, near: int) -> Tensor:
        """Return (B, 1 or K, F) positions of the far slots at their own distances; that of the first near one is 0."""
        store, rows = self.store, []
        for row, by_chooser in enumerate(chosen):
            start = 0 if store.row_start is None else int(store.row_start[row])
            gone = self.blocks.counts[row] * self.block
            slots = torch.arange(held) - (store.fill - near)
            slots[: start + self.init] -= gone
            recalled = max(len(blocks) for one in chosen for blocks in one)
            first = torch.zeros(len(by_chooser), recalled, dtype=torch.long)
            for nth, blocks in enumerate(by_chooser):
                first[nth, : len(blocks)] = torch.tensor(blocks, dtype=torch.long) * self.block
            inside = (first[..., None] + torch.arange(self.block)).flatten(1)
            oldest = self.init + near - (store.fill - start) - gone
            rows.append(torch.cat([slots.expand(len(by_chooser), -1), inside + oldest], dim=1))
        assert store.keys is not None
        return torch.stack(rows).to(store.keys.device)

    def _empty(self, chosen: list[list[list[int]]], held: int, near: int, far: int) -> Tensor | None:
        """Return which (B, 1 or K, near + F) slots hold nothing."""
        store, recalled = self.store, far - held
        counts = torch.tensor([[len(blocks) for blocks in by_chooser] for by_chooser in chosen]) * self.block
        if store.row_start is None and bool((counts == recalled).all()):
            return None
        assert store.keys is not None
        starts = torch.zeros(len(chosen), dtype=torch.long) if store.row_start is None else store.row_start.cpu()
        slots = torch.cat([torch.arange(store.fill - near, store.fill), torch.arange(held)])
        units = (slots < starts[:, None])[:, None].expand(-1, counts.shape[1], -1)
        return torch.cat([units, torch.arange(recalled) >= counts[..., None]], dim=-1).to(store.keys.device)

    def _note(self, near_mass: Tensor, recalled_mass: Tensor) -> None:
        """Add the (B, N, near) attention of the window's units to their columns, and tell the tier what blocks got."""
        if self._counted:
            near_mass, self._counted = near_mass[..., -1:], False
        columns = self._attention()
        span = slice(self.store.fill - near_mass.shape[-1], self.store.fill)
        for column, mass in zip(columns, near_mass.unflatten(1, (-1, len(columns))).unbind(2), strict=True):
            column[:, :, span] += mass
        self.blocks.note(recalled_mass)

    def chunks(
        self, layer: Attended, view: View, moment: Moment, newest_only: bool
    ) -> Iterator[tuple[Chunk, tuple[int, int] | None]]:
        """Ask no scorer: a unit's place decides where it is."""
        return iter(())

    def evict(self, stay: Stay, base: int) -> None:
        """Drop nothing: what leaves the window goes to the blocks."""

    def settle(self, base: int) -> None:
        """Leave keys as they are: they are turned when they are seen."""

    def unsettle(self, base: int) -> None:
        """Leave keys as they are."""

    def take_back(self) -> None:
        """Forget the newest unit; those before it keep the attention that they got from it."""
        self.store.take_back()
        self._counted = True

    # -- rows and whole layers ----------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.store.nbytes + self.blocks.copies_nbytes

    def select_rows(self, rows: Tensor) -> None:
        """Keep, repeat or reorder rows of the batch."""
        self.store.select_rows(rows)
        self.blocks.select_rows(rows)

    def join(self, layers: Sequence[Self], seen: int, new_tokens: int, most: int | None) -> None:
        """Become a batch of the only rows of other layers, with room for what an answer of `new_tokens` needs."""
        fill = max(layer.fill for layer in layers)
        self.store.join([layer.store for layer in layers], min(fill + new_tokens, max(fill, self.lookup.near + 1)))
        self.blocks.join([layer.blocks for layer in layers])
        self._counted = layers[0]._counted

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Refuse: a file of a cache has no place for blocks.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            f"recall_by={self.lookup.name} holds blocks, which the file of a cache has no place for; keep the cache in "
            "memory (cache.copy() for another question), or read with another recall_by"
        )

    def copy(self, workspace: Workspace) -> BlockLayer:
        """Return an independent copy."""
        twin = BlockLayer(self.store.copy(workspace), self.lookup, self.heads)
        twin.blocks, twin._counted = self.blocks.copy(), self._counted
        return twin
