"""The second tier of InfLLM: blocks of old tokens in host memory, a vector for each, and copies of those in use.

Paper:     InfLLM, arXiv 2402.04617, sections 3.2 (representatives, lookup) and 3.3 (offload, least recently used).
Deviates:  the vectors that are searched lie in host memory too, so that memory on the device does not grow.
"""

# B batch, K KV heads, G query heads per KV head, N = K G, C choosers (1, or K), R recalled blocks, P block size, D dim

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass
class InUse:
    """Which blocks have copies on the device, in which slots, and which of them goes when another one is needed."""

    slots: int
    decay: float | None
    """None: the one not used for longest goes ("lru"); else the one with the least attention, fading by this factor
    ("lru-s")."""
    attention: dict[int, float] = field(default_factory=dict)
    """Attention that each block got, the one used last at the end."""
    slot_of: dict[int, int] = field(default_factory=dict)
    hits: int = 0
    misses: int = 0

    def use(self, blocks: Sequence[int]) -> list[int]:
        """Have these blocks, at most `slots` of them, on the device; return those that must be copied there."""
        missing = [block for block in blocks if block not in self.slot_of]
        self.hits += len(blocks) - len(missing)
        self.misses += len(missing)
        leaving = [block for block in self.attention if block not in set(blocks)]
        if self.decay is not None:
            leaving.sort(key=lambda block: self.attention[block])
        free = sorted(set(range(self.slots)) - set(self.slot_of.values()))
        for block in leaving[: max(len(missing) - len(free), 0)]:
            free.append(self.slot_of.pop(block))
            del self.attention[block]
        for block in missing:
            self.slot_of[block] = free.pop(0)
        for block in blocks:
            self.attention[block] = self.attention.pop(block, 0.0)
        return missing

    def add(self, blocks: Sequence[int], attention: Sequence[float]) -> None:
        """Take note of what blocks got in a forward pass; what all got before fades."""
        assert self.decay is not None
        for block in self.attention:
            self.attention[block] *= self.decay
        for block, got in zip(blocks, attention, strict=True):
            self.attention[block] += got

    def copy(self) -> InUse:
        """Return an independent copy."""
        return copy.deepcopy(self)


def representatives(keys: Tensor, attention: Tensor, repr_topk: int) -> Tensor:
    """Return one vector per block and query head: the mean key of the tokens that got the most attention.

    Args:
        keys: (K, M, P, D) un-rotated keys of M blocks.
        attention: (K, G, M, P) what each token got while it was near.
        repr_topk: Tokens that speak for a block.

    Returns:
        (M, N, D) in the keys' dtype.
    """
    kv_heads, blocks, _, dim = keys.shape
    best = attention.topk(repr_topk, dim=-1).indices[..., None].expand(*attention.shape[:-1], repr_topk, dim)
    spread = keys[:, None].expand(-1, attention.shape[1], -1, -1, -1)
    return spread.gather(3, best).float().mean(3).flatten(0, 1).transpose(0, 1).to(keys.dtype)


class Blocks:
    """Blocks of one layer, per row of the batch as many as it has formed.

    Args:
        block: Tokens of a block.
        in_use: Blocks per row (or per row and KV head) whose copies may lie on the device.
        topk: Blocks that are recalled.
        repr_topk: Tokens that speak for a block.
        per_head: Whether each KV head chooses its own blocks.
        decay: See `InUse`.
    """

    resident = False

    def __init__(
        self, block: int, in_use: int, topk: int, repr_topk: int, per_head: bool = False, decay: float | None = None
    ) -> None:
        self.block, self.slots, self.topk, self.repr_topk = block, in_use, topk, repr_topk
        self.per_head, self.decay = per_head, decay
        self.counts: list[int] = []
        """Blocks of each row."""
        self._room = 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.vectors: Tensor | None = None
        self._near_keys: Tensor | None = None
        self._near_values: Tensor | None = None
        self._in_use: list[list[InUse]] = []
        self._chosen: list[list[list[int]]] = []
        self.moved = 0
        """Bytes copied to the host and back."""

    # -- memory -------------------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes in host memory."""
        return sum(t.nbytes for t in (self.keys, self.values, self.vectors) if t is not None)

    @property
    def copies_nbytes(self) -> int:
        """Bytes on the device: the copies of blocks in use."""
        return sum(t.nbytes for t in (self._near_keys, self._near_values) if t is not None)

    @property
    def hits(self) -> int:
        """Recalled blocks that were on the device already."""
        return sum(one.hits for row in self._in_use for one in row)

    @property
    def misses(self) -> int:
        """Recalled blocks that had to be copied there."""
        return sum(one.misses for row in self._in_use for one in row)

    @property
    def fill(self) -> int:
        """Units per KV head of the row that holds the most."""
        return max(self.counts, default=0) * self.block

    @property
    def capacity(self) -> int:
        """Units per KV head that there is room for."""
        return self._room * self.block

    def reserve(self, units: int) -> None:
        """Make room for so many units per KV head, now or when the first token comes."""
        blocks = -(-units // self.block)
        if blocks <= self._room:
            return
        self._room = blocks
        if self.keys is not None and self.values is not None and self.vectors is not None:
            self.keys, self.values = _longer(self.keys, 2, blocks), _longer(self.values, 2, blocks)
            self.vectors = _longer(self.vectors, 1, blocks)

    def begin(self, keys: Tensor, values: Tensor, heads: int) -> None:
        """Make the buffers for (B, K, S, D) states of N query heads, if there are none."""
        if self._near_keys is not None:
            return
        batch, kv_heads, _, dim = keys.shape
        host = {"dtype": keys.dtype, "device": "cpu", "pin_memory": keys.is_cuda}
        self.keys = torch.empty(batch, kv_heads, self._room, self.block, dim, **host)  # type: ignore[call-overload]
        self.values = torch.empty(  # type: ignore[call-overload]
            batch, kv_heads, self._room, self.block, values.shape[-1], **host
        )
        self.vectors = torch.empty(batch, self._room, heads, dim, **host)  # type: ignore[call-overload]
        # Zeros: a masked slot counts nothing, unless it holds NaN.
        self._near_keys = keys.new_zeros(batch, kv_heads, self.slots, self.block, dim)
        self._near_values = values.new_zeros(batch, kv_heads, self.slots, self.block, values.shape[-1])
        self.counts = [0] * batch
        choosers = kv_heads if self.per_head else 1
        self._in_use = [[InUse(self.slots, self.decay) for _ in range(choosers)] for _ in range(batch)]

    # -- blocks -------------------------------------------------------------------------------------------------------

    def add(self, row: int, keys: Tensor, values: Tensor, attention: Tensor) -> None:
        """Take over whole blocks of the oldest near tokens of a row.

        Args:
            row: Which one.
            keys: (K, M P, D), un-rotated.
            values: Shaped like the keys.
            attention: (K, G, M P) what each token got while it was near.
        """
        keys, values = (states.unflatten(1, (-1, self.block)) for states in (keys, values))
        first, new = self.counts[row], keys.shape[1]
        if first + new > self._room:
            self.reserve(max(first + new, 2 * self._room) * self.block)
        assert self.keys is not None
        assert self.values is not None
        assert self.vectors is not None
        span = slice(first, first + new)
        self.keys[row, :, span] = keys.to("cpu")
        self.values[row, :, span] = values.to("cpu")
        vectors = representatives(keys, attention.unflatten(2, (-1, self.block)), self.repr_topk)
        self.vectors[row, span] = vectors.to("cpu")
        self.counts[row] += new
        self.moved += keys.nbytes + values.nbytes + vectors.nbytes

    def choose(self, query: Tensor) -> list[list[list[int]]]:
        """Return per row and chooser the blocks, ascending, that fit (B, N, L, D) queries best on average."""
        means = query.float().mean(2).to("cpu")
        assert self.vectors is not None
        chosen = []
        for row, count in enumerate(self.counts):
            choosers = len(self._in_use[row])
            if count <= self.topk:
                chosen.append([list(range(count))] * choosers)
                continue
            fits = (self.vectors[row, :count].float() * means[row]).sum(-1).unflatten(1, (choosers, -1)).sum(-1)
            chosen.append(fits.topk(self.topk, dim=0).indices.sort(dim=0).values.T.tolist())
        return chosen

    def recall(self, query: Tensor) -> tuple[Tensor, Tensor, list[list[list[int]]]]:
        """Return (B, K, R P, D) keys and values of the blocks that fit the queries, and which blocks these are.

        R is that of the row with most; the others have anything in the slots beyond theirs.
        """
        assert self._near_keys is not None
        assert self._near_values is not None
        self._chosen = chosen = self.choose(query)
        recalled = max((len(blocks) for row in chosen for blocks in row), default=0)
        kv_heads = self._near_keys.shape[1]
        slots = []
        for row, by_chooser in enumerate(chosen):
            for nth, (blocks, in_use) in enumerate(zip(by_chooser, self._in_use[row], strict=True)):
                self._bring(row, nth, in_use.use(blocks), in_use)
                held = [in_use.slot_of[block] for block in blocks]
                slots.append(held + [0] * (recalled - len(held)))
        index = torch.tensor(slots, dtype=torch.long).view(len(chosen), len(self._in_use[0]), recalled)
        index = index.expand(-1, kv_heads, -1).to(self._near_keys.device)
        found = []
        for near in (self._near_keys, self._near_values):
            first = torch.arange(len(chosen) * kv_heads, device=near.device).view(-1, kv_heads, 1) * self.slots
            rows = near.flatten(0, 2).index_select(0, (index + first).flatten())
            found.append(rows.view(len(chosen), kv_heads, recalled * self.block, near.shape[-1]))
        return found[0], found[1], chosen

    def _bring(self, row: int, chooser: int, blocks: list[int], in_use: InUse) -> None:
        if not blocks:
            return
        heads = slice(chooser, chooser + 1) if self.per_head else slice(None)
        slots = [in_use.slot_of[block] for block in blocks]
        for host, near in ((self.keys, self._near_keys), (self.values, self._near_values)):
            assert host is not None
            assert near is not None
            brought = host[row, heads].index_select(1, torch.tensor(blocks))
            near[row, heads, slots] = brought.to(near.device, non_blocking=True)
            self.moved += brought.nbytes

    def note(self, attention: Tensor) -> None:
        """Take note of the (B, N, R P) attention that what `recall` returned last got; for "lru-s" alone."""
        if self.decay is None:
            return
        choosers = len(self._in_use[0])
        got = attention.unflatten(2, (-1, self.block)).sum(-1).unflatten(1, (choosers, -1)).sum(2).tolist()
        for row, by_chooser in enumerate(self._chosen):
            for nth, blocks in enumerate(by_chooser):
                self._in_use[row][nth].add(blocks, got[row][nth][: len(blocks)])

    # -- rows and whole tiers -----------------------------------------------------------------------------------------

    def select_rows(self, rows: Tensor) -> None:
        """Keep, repeat or reorder rows of the batch."""
        if self._near_keys is None:
            return
        picked = rows.tolist()
        for name in ("keys", "values", "vectors", "_near_keys", "_near_values"):
            held = getattr(self, name)
            setattr(self, name, held.index_select(0, rows.to(held.device)))
        self.counts = [self.counts[row] for row in picked]
        self._in_use = [[one.copy() for one in self._in_use[row]] for row in picked]

    def join(self, tiers: Sequence[Self]) -> None:
        """Become a batch of the only rows of other tiers."""
        for tier in tiers:
            tier.reserve(max(self.capacity, *(other.capacity for other in tiers)))
        self._room = tiers[0]._room
        for name in ("keys", "values", "vectors", "_near_keys", "_near_values"):
            setattr(self, name, torch.cat([getattr(tier, name) for tier in tiers]))
        self.counts = [tier.counts[0] for tier in tiers]
        self._in_use = [tier._in_use[0] for tier in tiers]
        self.moved += sum(tier.moved - self.moved for tier in tiers)  # each has gone on counting from here

    def copy(self) -> Self:
        """Return an independent copy."""
        twin = copy.copy(self)
        for name in ("keys", "values", "vectors", "_near_keys", "_near_values"):
            held = getattr(self, name)
            setattr(twin, name, None if held is None else held.clone())
        twin.counts = list(self.counts)
        twin._in_use = [[one.copy() for one in row] for row in self._in_use]
        return twin


def _longer(held: Tensor, dim: int, size: int) -> Tensor:
    """Return a buffer of `size` along a dimension that begins with what is held."""
    shape = list(held.shape)
    shape[dim] = size
    longer = torch.empty(shape, dtype=held.dtype, device=held.device, pin_memory=held.is_pinned())
    longer.narrow(dim, 0, held.shape[dim]).copy_(held)
    return longer
