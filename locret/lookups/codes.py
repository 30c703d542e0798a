"""Rounded keys as an index: all units are rated by keys of a few bits, and the best of them by their exact keys.

Paper:     the rounding is KIVI's for keys (arXiv 2402.02750): a step per channel, over all units; the second look with
           exact vectors is common to approximate search (RetrievalAttention, arXiv 2409.10516, names the field's).
Formula:   per KV head the count * oversample units with the largest q . mean + (q * step) . code of any query head of
           its group; of those the count with the largest q . k.
Deviates:  steps cover a few deviations of a channel around its mean, since at 2 bits its range would leave two levels
           unused.
Cost:      an index of bits / 16 of the keys (in bfloat16) lies on the queries' device and is read whole for each query;
           count * oversample keys and count values move.
"""

# B batch, N query heads, K KV heads, G query heads per KV head, L queries, H units, C candidates, D head dim

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from locret.lookups.base import Ask, Lookup

_WIDTH = {2: 1.5, 4: 2.8, 8: 5.0}
"""Deviations of a channel that codes cover to each side, by bits."""
_LOGITS = 1 << 23
"""Logits that exist at once, over all heads."""
_DECODED = 4096
"""Units whose codes are numbers at once."""


class CodedKeys:
    """Keys of a second tier in a few bits per channel.

    Args:
        keys: (B, K, H, D).
        there: (B, K, H) which of them are units.
        bits: Bits of a code: 2, 4 or 8.
    """

    def __init__(self, keys: Tensor, there: Tensor, bits: int) -> None:
        self.bits, self.dim = bits, keys.shape[-1]
        weights = there[..., None].float()
        count = weights.sum(2, keepdim=True).clamp_min(1)
        self.mean = mean = (keys.float() * weights).sum(2, keepdim=True) / count
        """(B, K, 1, D), float32."""
        deviation = (((keys.float() - mean) ** 2 * weights).sum(2, keepdim=True) / count).sqrt()
        levels = 2**bits - 1
        self.step = (2 * _WIDTH[bits] * deviation / levels).clamp_min(1e-12)
        """(B, K, 1, D) between neighbouring codes."""
        codes = ((keys.float() - mean) / self.step + levels / 2).round().clamp(0, levels).to(torch.uint8)
        each = 8 // bits
        if spare := -self.dim % each:
            codes = torch.cat([codes, codes.new_zeros(*codes.shape[:-1], spare)], dim=-1)
        shifts = torch.arange(each, device=codes.device) * bits
        self.packed = (codes.unflatten(-1, (-1, each)).int() << shifts).sum(-1).to(torch.uint8)
        """(B, K, H, D * bits / 8)."""

    def to(self, device: torch.device) -> CodedKeys:
        """Move there, for good."""
        self.mean, self.step, self.packed = self.mean.to(device), self.step.to(device), self.packed.to(device)
        return self

    def numbers(self, start: int, end: int) -> Tensor:
        """Return the (B, K, units, D) codes of some units as numbers around zero."""
        packed = self.packed[:, :, start:end, :, None].int()
        shifts = torch.arange(8 // self.bits, device=packed.device) * self.bits
        codes = (packed >> shifts) & (2**self.bits - 1)
        numbers: Tensor = codes.flatten(-2)[..., : self.dim].float() - (2**self.bits - 1) / 2
        return numbers


@dataclass(frozen=True, kw_only=True)
class CodesLookup(Lookup):
    """Rate all units by keys of a few bits, and the best of them by their exact keys."""

    name: ClassVar[str] = "codes"

    bits: int = 4
    """Bits of each channel of a key in the index: 2, 4 or 8."""
    oversample: int = 2
    """Exact keys that are looked at, times the units that are recalled."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in _WIDTH:
            raise ValueError(f"lookup {self.name}: bits={self.bits} is unknown; choose one of 2, 4, 8")
        if self.oversample < 1:
            raise ValueError(f"lookup {self.name}: oversample={self.oversample} is too small; it must be 1 or more")

    def index(self, keys: Tensor, positions: Tensor) -> CodedKeys:
        """Return the keys in codes."""
        return CodedKeys(keys, positions >= 0, self.bits)

    def index_bytes(self, units: int, head_dim: int, element_size: int) -> int:
        """Return the bytes of the codes, and of a mean and a step per channel."""
        return units * -(-head_dim * self.bits // 8) + 8 * head_dim

    def choose(self, ask: Ask) -> Tensor:
        """See `Lookup`; ranks are (B, K, L, R)."""
        coded: CodedKeys = ask.index.to(ask.query.device)
        query = ask.query.float().unflatten(1, (ask.keys.shape[1], -1))  # (B, K, G, L, D)
        units, empty = ask.keys.shape[2], (ask.positions < 0).to(query.device)[:, :, None]
        rows, found = max(1, _LOGITS // (query[..., 0, 0].numel() * units)), []
        for block in query.split(rows, dim=3):
            weighed, bias = block * coded.step[:, :, None], block @ coded.mean[:, :, None].transpose(-1, -2)
            spans = [(start, min(start + _DECODED, units)) for start in range(0, units, _DECODED)]
            rated = [(weighed @ coded.numbers(*span)[:, :, None].transpose(-1, -2) + bias).amax(2) for span in spans]
            logits = torch.cat(rated, dim=-1).masked_fill_(empty, -torch.inf)
            ranks = logits.topk(min(ask.count * self.oversample, units), dim=-1).indices.to(ask.keys.device)
            found.append(self._best(block.to(ask.keys.device), ranks, ask))
        return torch.cat(found, dim=2)

    def _best(self, query: Tensor, ranks: Tensor, ask: Ask) -> Tensor:
        """Return those of the (B, K, L, C) candidates that have the largest exact logits."""
        if ranks.shape[-1] == ask.count:
            return ranks
        dim = ask.keys.shape[-1]
        keys = ask.keys.gather(2, ranks.flatten(2)[..., None].expand(-1, -1, -1, dim)).unflatten(2, ranks.shape[2:])
        logits = torch.einsum("bkgld,bklcd->bkglc", query, keys.float()).amax(2)
        there = ask.positions.gather(2, ranks.flatten(2)).view(ranks.shape) >= 0
        return ranks.gather(3, logits.masked_fill(~there, -torch.inf).topk(ask.count, dim=-1).indices)
