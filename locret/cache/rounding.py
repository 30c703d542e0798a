"""Keys and values in 8, 4, 3 or 2 bits: how numbers become codes, how codes lie in bytes, and the way back.

A unit is rounded by itself and once: its codes and its scales are all that it needs, so units can be dropped, moved and
reordered without another rounding. What a rounding needs besides is fixed by the first tokens of a text (`Frame`).
"""

# B batch, K KV heads, S slots, D head dim, G groups of a unit, P bytes of a unit's codes

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

BITS = (16, 8, 4, 3, 2)
"""Bits of a number; with 16 the units stay as they are."""
_WORDS = {8: (1, 1), 4: (1, 2), 3: (3, 8), 2: (1, 4)}
"""Bytes that are packed together, and the codes in them."""
_SCALE = torch.float16
_LEAST_SCALE = 2.0**-24
"""Least positive number of a scale's type."""
_MOST_SCALE = 65504.0
"""Largest number of a scale's type."""


def packed_bytes(codes: int, bits: int) -> int:
    """Return the bytes of so many codes of one unit."""
    size, count = _WORDS[bits]
    return -(-codes // count) * size


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes (..., D), uint8 below 2 ** bits, into (..., P) bytes; 3 bits take 3 bytes for 8 codes."""
    size, count = _WORDS[bits]
    if bits == 8:
        return codes
    if spare := -codes.shape[-1] % count:
        codes = torch.cat([codes, codes.new_zeros(*codes.shape[:-1], spare)], -1)
    shifts = torch.arange(count, device=codes.device, dtype=torch.int32) * bits
    words = (codes.unflatten(-1, (-1, count)).int() << shifts).sum(-1, dtype=torch.int32)
    if size == 1:
        return words.to(torch.uint8)
    places = torch.arange(size, device=codes.device, dtype=torch.int32) * 8
    return ((words[..., None] >> places) & 255).to(torch.uint8).flatten(-2)


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Return `count` codes of each unit, (..., count) uint8 or int32, of what `pack` made."""
    if bits == 8:
        return packed
    size, per_word = _WORDS[bits]
    words = packed
    if size > 1:
        parts = packed.unflatten(-1, (-1, size)).int()
        words = parts[..., 0] | (parts[..., 1] << 8) | (parts[..., 2] << 16)
    shifts = torch.arange(per_word, device=packed.device, dtype=words.dtype) * bits
    return ((words[..., None] >> shifts) & (2**bits - 1)).flatten(-2)[..., :count]


class Codes(NamedTuple):
    """Rounded states."""

    codes: Tensor
    """(B, K, S, P) uint8."""
    scales: Tensor
    """(B, K, S, G, 2) float16: distance between two codes, and what code 0 stands for."""


@dataclass(frozen=True)
class Rounding(ABC):
    """How numbers of a unit are brought into a form that loses little, before each group of them gets a scale.

    Args:
        group: Neighbouring channels that share a scale, at most; the head dim is split evenly.

    Raises:
        ValueError: If a group has no channel.
    """

    name: ClassVar[str]
    framed: ClassVar[bool] = False
    """Whether it needs a frame, fixed by a text's first tokens."""

    group: int = 64

    def __post_init__(self) -> None:
        if self.group < 1:
            raise ValueError(f"group={self.group} is too small; a scale needs 1 channel or more")

    def groups(self, head_dim: int) -> int:
        """Return G, the scales of a unit."""
        return -(-head_dim // self.group)

    def frame(self, states: Tensor) -> Tensor | None:
        """Return what the first states (B, K, L, D) fix for all that follow, (B, K, 2, D); None: nothing."""
        return None

    @abstractmethod
    def into(self, states: Tensor, frame: Tensor | None) -> Tensor:
        """Return float32 states (B, K, S, D) in the form that is rounded."""

    @abstractmethod
    def back(self, states: Tensor, frame: Tensor | None) -> Tensor:
        """Undo `into`."""

    def encode(self, states: Tensor, bits: int, frame: Tensor | None = None) -> Codes:
        """Round states (B, K, S, D). Every number is then at most half a scale away, in the form that is rounded."""
        parts = self._split(self.into(states.float(), frame))
        levels = 2**bits - 1
        low, high = parts.amin(-1), parts.amax(-1)
        # The scale and the lowest number are rounded outwards, and codes are chosen for what is really stored.
        low16 = _below(low)
        scale16 = -_below(((low16.float() - high) / levels).clamp(max=-_LEAST_SCALE))
        codes = ((parts - low16.float()[..., None]) / scale16.float()[..., None]).round_().clamp_(0, levels)
        packed = pack(codes.to(torch.uint8).flatten(-2)[..., : states.shape[-1]], bits)
        return Codes(packed, torch.stack([scale16, low16], -1))

    def decode(self, coded: Codes, bits: int, head_dim: int, frame: Tensor | None = None) -> Tensor:
        """Return the float32 states (B, K, S, D) that codes stand for."""
        scales = coded.scales.float()
        parts = self._split(unpack(coded.codes, bits, head_dim).float())
        parts = parts.mul_(scales[..., :1]).add_(scales[..., 1:])
        return self.back(parts.flatten(-2)[..., :head_dim], frame)

    def _split(self, states: Tensor) -> Tensor:
        """Return (B, K, S, D) as (B, K, S, G, channels); a shorter last group repeats its last channel."""
        groups = self.groups(states.shape[-1])
        if spare := -states.shape[-1] % groups:
            states = torch.cat([states, states[..., -1:].expand(*states.shape[:-1], spare)], -1)
        return states.unflatten(-1, (groups, -1))


@dataclass(frozen=True)
class Token(Rounding):
    """As they are: scales per token, for groups of channels (quanto's axis 0; KIVI's values)."""

    name = "token"

    def into(self, states: Tensor, frame: Tensor | None) -> Tensor:
        """See `Rounding`."""
        return states

    def back(self, states: Tensor, frame: Tensor | None) -> Tensor:
        """See `Rounding`."""
        return states


@dataclass(frozen=True)
class Rotated(Rounding):
    """Turned by a fixed orthogonal matrix, which spreads outliers over all channels (QuaRot, TurboQuant)."""

    name = "rotated"

    def into(self, states: Tensor, frame: Tensor | None) -> Tensor:
        """See `Rounding`."""
        return states @ basis(states.shape[-1], states.device)

    def back(self, states: Tensor, frame: Tensor | None) -> Tensor:
        """See `Rounding`."""
        return states @ basis(states.shape[-1], states.device).T


def _below(numbers: Tensor) -> Tensor:
    """Return the numbers in the type of scales, none of them larger than it was; what is too large is cut."""
    numbers = numbers.clamp(-_MOST_SCALE, _MOST_SCALE)
    nearest = numbers.to(_SCALE)
    # The next number below, by its bits: they count up from zero in both directions.
    bits = nearest.view(torch.int16)
    below = torch.where(nearest > 0, bits - 1, torch.where(nearest < 0, bits + 1, -(2**15) + 1)).to(torch.int16)
    return torch.where(nearest.float() > numbers, below.view(_SCALE), nearest)


@cache
def basis(head_dim: int, device: torch.device) -> Tensor:
    """Return an orthogonal (D, D) matrix, the same wherever and whenever it is asked for.

    A Hadamard matrix with rows of seeded signs where the head dim is a power of two; else the Kronecker product of the
    largest one that divides it and a cosine transform of the rest, so that no machine's decomposition enters a file.
    """
    power = head_dim & -head_dim
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(power.bit_length() - 1):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    rest = head_dim // power
    rows, columns = torch.meshgrid(torch.arange(rest), torch.arange(rest), indexing="ij")
    cosines = torch.cos(math.pi / rest * (columns + 0.5).double() * rows) * math.sqrt(2 / rest)
    cosines[0] = math.sqrt(1 / rest)
    chance = random.Random(head_dim)
    signs = torch.tensor([1.0 if chance.random() < 0.5 else -1.0 for _ in range(head_dim)], dtype=torch.float64)
    return (signs[:, None] * torch.kron(matrix / math.sqrt(power), cosines)).float().to(device)
