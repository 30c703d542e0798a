"""Rounded keys as an index: all units are rated by keys of a few bits, and the best of them by their exact keys.

Paper:     the rounding is of the kind of QuaRot (arXiv 2404.00456) and TurboQuant (arXiv 2504.19874); a second look
           with exact vectors is common to approximate search.
Formula:   keys less their mean, turned by a fixed orthogonal matrix, in levels between each unit's least and largest
           number; per KV head the count * oversample units with the largest product with any query of its group, and of
           those the count with the largest q . k.
Cost:      an index of bits / 16 of the keys (in bfloat16), and 4 bytes per unit, lies on the queries' device and is
           read whole for each query; count * oversample keys are read where the tier is.
"""

# B batch, N query heads, K KV heads, G query heads per KV head, L queries, H units, C candidates, D head dim

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from locret.base.fields import Range
from locret.lookups.base import DECODED, Ask, Keys, Lookup, blocks, keys_at

_MOST = 65504.0
"""Largest number of half precision."""
_LOGITS = 1 << 23
"""Logits that exist at once, over all heads."""


class CodedKeys:
    """Keys of a second tier in a few bits per channel."""

    def __init__(self, keys: Keys, there: Tensor, bits: int) -> None:
        self.bits, self.dim = bits, keys.shape[-1]
        weights = there[..., None].float()
        sums = [(part.float() * weights[:, :, span]).sum(2, keepdim=True) for span, part in blocks(keys)]
        self.mean = torch.stack(sums).sum(0) / weights.sum(2, keepdim=True).clamp_min(1)
        """(B, K, 1, D), float32."""
        parts = zip(*(self._rounded(part) for _, part in blocks(keys)), strict=True)
        self.packed, self.low, self.step = (torch.cat(part, dim=2) for part in parts)
        """(B, K, H, D * bits / 8), and (B, K, H, 1): each unit's least number, and what lies between its codes."""

    def _rounded(self, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return codes, least numbers and steps of some units."""
        turned = (keys.float() - self.mean) @ turn(self.dim).to(keys.device)
        low, high = turned.amin(-1, keepdim=True), turned.amax(-1, keepdim=True)
        step = (high - low) / (2**self.bits - 1)
        low, step = low.clamp(-_MOST, _MOST).half(), step.clamp(2.0**-24, _MOST).half()
        levels = (turned - low.float()) / step.float()
        codes = levels.round().clamp(0, 2**self.bits - 1).to(torch.uint8)
        each = 8 // self.bits
        if spare := -self.dim % each:
            codes = torch.cat([codes, codes.new_zeros(*codes.shape[:-1], spare)], dim=-1)
        shifts = torch.arange(each, device=codes.device) * self.bits
        packed = (codes.unflatten(-1, (-1, each)).int() << shifts).sum(-1).to(torch.uint8)
        return packed, low, step

    def to(self, device: torch.device) -> CodedKeys:
        """Move there, for good."""
        for name in ("mean", "packed", "low", "step"):
            setattr(self, name, getattr(self, name).to(device))
        return self

    def logits(self, query: Tensor) -> Tensor:
        """Return (B, K, L, H): the largest product of any of the (B, K, G, L, D) queries of a group with each key."""
        bias = query @ self.mean[:, :, None].transpose(-1, -2)
        turned = query @ turn(self.dim).to(query.device)
        total, found = turned.sum(-1, keepdim=True), []
        for start in range(0, self.packed.shape[2], DECODED):
            span = slice(start, start + DECODED)
            low, step = (part[:, :, None, span, 0].float().unsqueeze(-2) for part in (self.low, self.step))
            products = turned @ self._codes(span)[:, :, None].transpose(-1, -2)
            found.append((products * step + total * low + bias).amax(2))
        return torch.cat(found, dim=-1)

    def _codes(self, span: slice) -> Tensor:
        """Return the (B, K, units, D) codes of some units as numbers."""
        packed = self.packed[:, :, span, :, None].int()
        shifts = torch.arange(8 // self.bits, device=packed.device) * self.bits
        codes: Tensor = (packed >> shifts) & (2**self.bits - 1)
        return codes.flatten(-2)[..., : self.dim].float()


@cache
def turn(dim: int) -> Tensor:
    """Return an orthogonal (D, D) matrix that spreads a channel over all: a cosine transform of channels with signs."""
    rows, columns = torch.meshgrid(torch.arange(dim), torch.arange(dim), indexing="ij")
    cosines = torch.cos(math.pi / dim * (columns + 0.5).double() * rows) * math.sqrt(2 / dim)
    cosines[0] = math.sqrt(1 / dim)
    chance = random.Random(dim)
    signs = torch.tensor([chance.choice((-1.0, 1.0)) for _ in range(dim)], dtype=torch.float64)
    return (signs[:, None] * cosines.T).float()


@dataclass(frozen=True, kw_only=True)
class CodesLookup(Lookup):
    """Rate all units by keys of a few bits, and the best of them by their exact keys."""

    name: ClassVar[str] = "codes"
    over_ranks: ClassVar[bool] = True
    ranges = {"bits": (2, 4, 8), "oversample": Range(1)}

    bits: int = 4
    """Bits of each channel of a key in the index: 2, 4 or 8."""
    oversample: int = 2
    """Exact keys that are looked at, times the units that are recalled."""

    def index(self, keys: Keys, positions: Tensor) -> CodedKeys:
        """Return the keys in codes."""
        return CodedKeys(keys, positions >= 0, self.bits)

    def index_bytes(self, units: int, head_dim: int, element_size: int) -> int:
        """Return the bytes of the codes, of two numbers per unit, and of the mean."""
        return units * (-(-head_dim * self.bits // 8) + 4) + 4 * head_dim

    def choose(self, ask: Ask) -> Tensor:
        """See `Lookup`; ranks are (B, K, L, R)."""
        coded: CodedKeys = ask.index.to(ask.query.device)
        query = ask.query.float().unflatten(1, (ask.keys.shape[1], -1))  # (B, K, G, L, D)
        units, empty = ask.keys.shape[2], (ask.positions < 0).to(query.device)[:, :, None]
        rows, found = max(1, _LOGITS // (query[..., 0, 0].numel() * units)), []
        for block in query.split(rows, dim=3):
            logits = coded.logits(block).masked_fill_(empty, -torch.inf)
            ranks = logits.topk(min(ask.count * self.oversample, units), dim=-1).indices.to(ask.keys.device)
            found.append(self._best(block.to(ask.keys.device), ranks, ask))
        return torch.cat(found, dim=2)

    def _best(self, query: Tensor, ranks: Tensor, ask: Ask) -> Tensor:
        """Return those of the (B, K, L, C) candidates that have the largest exact logits."""
        if ranks.shape[-1] == ask.count:
            return ranks
        logits = torch.einsum("bkgld,bklcd->bkglc", query, keys_at(ask.keys, ranks).float()).amax(2)
        there = ask.positions.gather(2, ranks.flatten(2)).view(ranks.shape) >= 0
        return ranks.gather(3, logits.masked_fill(~there, -torch.inf).topk(ask.count, dim=-1).indices)
