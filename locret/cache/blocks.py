"""The second tier of InfLLM: blocks of old tokens in host memory, a vector for each, and copies of those in use.

Paper:     InfLLM, arXiv 2402.04617, sections 3.2 (representatives, lookup) and 3.3 (offload, least recently used).
Deviates:  the vectors that are searched lie in host memory too, so that memory on the device does not grow.
"""

# B batch, K KV heads, G query heads per KV head, N = K G, R recalled blocks, P block size, D dim

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import Self

from locret.cache.units import Units
from locret.lookups.infllm import InfLLM

_AWAY = {"keys": 2, "values": 2, "vectors": 1}
"""What lies in host memory, with the dimension that counts blocks."""


def representatives(keys: Tensor, attention: Tensor, repr_topk: int) -> Tensor:
    """Return one vector per block and query head, (M, N, D): the mean key of the tokens that got the most attention."""
    best = attention.topk(repr_topk, dim=-1).indices[..., None].expand(-1, -1, -1, -1, keys.shape[-1])
    spread = keys[:, None].expand(-1, attention.shape[1], -1, -1, -1)
    return spread.gather(3, best).float().mean(3).flatten(0, 1).transpose(0, 1).to(keys.dtype)


class Blocks(Units):
    """Blocks of one layer, per row of the batch as many as it has formed, as the completed numbers of `lookup` say.

    Of its tensors `slots` are (B, blocks) where the copy of each block is, -1 for none, and `used` when it was used
    last: the copy that has waited longest goes when another one is needed.
    """

    once, counter, resident = None, "", False
    uncounted = (*_AWAY, "counts", "slots", "used")

    def __init__(self, lookup: InfLLM) -> None:
        _, self.block, _, self.topk, self.cached, self.repr_topk = lookup.numbers
        self.tensors = {}
        self.moved = self._clock = 0
        """Bytes copied to the host and back."""
        self.counted = False
        """Whether the coming token has been fed before, so that the units before it have its attention already."""

    @property
    def counts(self) -> list[int]:
        """Blocks of each row."""
        return self.tensors["counts"].tolist() if self.tensors else []

    @property
    def fill(self) -> int:
        """Units per KV head of the row that holds the most."""
        return max(self.counts, default=0) * self.block

    @fill.setter
    def fill(self, units: int) -> None:
        """Do nothing: it follows from the blocks."""

    @property
    def away_nbytes(self) -> int:
        """Bytes in host memory."""
        return sum(held.nbytes for name, held in self.tensors.items() if name in _AWAY)

    def reserve(self, units: int) -> None:
        """Make room for so many units per KV head, now or when the first token comes."""
        if units <= self.capacity:
            return
        self.capacity = -(-units // self.block) * self.block
        for name, dim in {**_AWAY, "slots": 1, "used": 1}.items() if self.tensors else ():
            held = self.tensors[name]
            shape = [*held.shape[:dim], self.capacity // self.block, *held.shape[dim + 1 :]]
            longer = torch.full(shape, -1, dtype=held.dtype, pin_memory=held.is_pinned())
            longer.narrow(dim, 0, held.shape[dim]).copy_(held)
            self.tensors[name] = longer

    def begin(self, keys: Tensor, values: Tensor, heads: int) -> None:
        """Make the buffers for (B, K, S, D) states of N query heads, if there are none."""
        if self.tensors:
            return
        (batch, kv_heads), room = keys.shape[:2], self.capacity // self.block
        for name, states in (("keys", keys), ("values", values)):
            inner = (self.block, states.shape[-1])
            away = torch.empty(batch, kv_heads, room, *inner, dtype=states.dtype, pin_memory=keys.is_cuda)
            # Zeros: a masked slot counts nothing, unless it holds NaN.
            self.tensors |= {name: away, f"near_{name}": states.new_zeros(batch, kv_heads, self.cached, *inner)}
        self.tensors |= {
            "vectors": torch.empty(batch, room, heads, keys.shape[-1], dtype=keys.dtype, pin_memory=keys.is_cuda),
            "counts": torch.zeros(batch, dtype=torch.int64),
            "slots": torch.full((batch, room), -1, dtype=torch.int64),
            "used": torch.zeros(batch, room, dtype=torch.int64),
        }

    def add(self, row: int, keys: Tensor, values: Tensor, attention: Tensor) -> None:
        """Take over whole blocks of the oldest near tokens of a row."""
        keys, values = (states.unflatten(1, (-1, self.block)) for states in (keys, values))
        first, new = self.counts[row], keys.shape[1]
        if (first + new) * self.block > self.capacity:
            self.reserve(max((first + new) * self.block, 2 * self.capacity))
        span = slice(first, first + new)
        vectors = representatives(keys, attention.unflatten(2, (-1, self.block)), self.repr_topk)
        self.tensors["keys"][row, :, span] = keys.to("cpu")
        self.tensors["values"][row, :, span] = values.to("cpu")
        self.tensors["vectors"][row, span] = vectors.to("cpu")
        self.tensors["counts"][row] += new
        self.moved += keys.nbytes + values.nbytes + vectors.nbytes

    def choose(self, query: Tensor) -> Tensor:
        """Return (B, R) blocks, ascending, that fit (B, N, L, D) queries best on average; -1 for none."""
        means = query.float().mean(2).to("cpu")
        chosen = torch.full((len(means), min(self.topk, max(self.counts))), -1)
        for row, count in enumerate(self.counts):
            if count <= self.topk:
                chosen[row, :count] = torch.arange(count)
                continue
            fits = (self.tensors["vectors"][row, :count].float() * means[row]).sum(-1).sum(-1)
            chosen[row] = fits.topk(self.topk).indices.sort().values
        return chosen

    def recall(self, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (B, K, R P, D) keys and values of the blocks that fit the queries, and which (B, R) these are.

        There is anything in the slots of a row beyond its own blocks.
        """
        chosen = self.choose(query)
        self._clock += 1
        for row, blocks in enumerate(chosen):
            self._bring(row, blocks[blocks >= 0])
        index = self.tensors["slots"].gather(1, chosen.clamp_min(0)).clamp_min(0) if chosen.numel() else chosen
        found = []
        for name in ("near_keys", "near_values"):
            near = self.tensors[name]
            batch, kv_heads = near.shape[:2]
            first = torch.arange(batch * kv_heads).view(-1, kv_heads, 1) * self.cached
            rows = near.flatten(0, 2).index_select(0, (index[:, None] + first).flatten().to(near.device))
            found.append(rows.view(batch, kv_heads, -1, near.shape[-1]))
        return found[0], found[1], chosen

    def _bring(self, row: int, blocks: Tensor) -> None:
        """Have copies of these blocks on the device."""
        slots, used = self.tensors["slots"][row], self.tensors["used"][row]
        missing = blocks[slots[blocks] < 0]
        free = sorted(set(range(self.cached)) - set(slots.tolist()))
        if (short := len(missing) - len(free)) > 0:
            others = (slots >= 0).index_fill(0, blocks, False).nonzero()[:, 0]
            leaving = others[used[others].argsort(stable=True)[:short]]
            free += slots[leaving].tolist()
            slots[leaving] = -1
        slots[missing] = torch.tensor(free[: len(missing)], dtype=torch.int64)
        used[blocks] = self._clock
        for name in ("keys", "values") if len(missing) else ():
            near, brought = self.tensors[f"near_{name}"], self.tensors[name][row].index_select(1, missing)
            near[row, :, slots[missing].to(near.device)] = brought.to(near.device, non_blocking=True)
            self.moved += brought.nbytes

    def take_back(self) -> None:
        """Forget nothing: the units before the newest keep the attention that they got from it, once."""
        self.counted = True

    def trim(self) -> None:
        """Leave it as it is: the blocks of each row begin with its first."""

    def join(self, others: Sequence[Self], room: int = 0) -> None:
        most = max(other.capacity for other in (self, *others))
        for other in others:
            other.reserve(most)
        super().join(others)
        self.capacity, self._clock = most, max(other._clock for other in others)
        self.moved += sum(other.moved - self.moved for other in others)  # each has gone on counting from here
