"""Keys and values in 8, 4, 3 or 2 bits: how numbers become codes, how codes lie in bytes, and the way back.

A unit is rounded by itself and once: its codes and its scales are all that it needs, so units can be dropped, moved and
reordered without another rounding. What a rounding needs besides is fixed by the first tokens of a text, its frame.
"""

# B batch, K KV heads, S slots, D head dim, G groups of a unit, P bytes of a unit's codes

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from locret.base import registry
from locret.policy.planned_bytes import unit_bytes
from locret.policy.policy import RetentionPolicy

_WORDS = {8: (1, 1), 4: (1, 2), 3: (3, 8), 2: (1, 4)}
"""Bytes that are packed together, and the codes in them."""
PLACE, COUNT, SCALE = torch.int32, torch.int32, torch.float16
"""Of a unit's position, of how many newest units are held as they are, and of scales."""
_LEAST_SCALE, _MOST_SCALE = 2.0**-24, 65504.0
"""Least positive, and largest number of a scale's type."""
_AS_TOKENS = 16
"""How many tokens the mean width of all channels counts as."""
_LEAST_WIDTH = 1e-6


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
    words: Tensor = (codes.unflatten(-1, (-1, count)).int() << shifts).sum(-1, dtype=torch.int32)
    places = torch.arange(size, device=codes.device, dtype=torch.int32) * 8
    packed: Tensor = ((words[..., None] >> places) & 255).to(torch.uint8)
    return packed.flatten(-2)


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
    codes: Tensor = (words[..., None] >> shifts) & ((1 << bits) - 1)
    return codes.flatten(-2)[..., :count]


@dataclass(frozen=True)
class Token:
    """As they are: scales per token, for groups of channels (quanto's axis 0; KIVI's values)."""

    name: ClassVar[str] = "token"
    framed: ClassVar[bool] = False
    """Whether it needs a frame, fixed by a text's first tokens."""

    group: int = 64
    """Neighbouring channels that share a scale, at most; the head dim is split evenly."""

    def __post_init__(self) -> None:
        if self.group < 1:
            raise ValueError(f"group={self.group} is too small; a scale needs 1 channel or more")

    def groups(self, head_dim: int) -> int:
        """Return G, the scales of a unit."""
        return -(-head_dim // self.group)

    def frame(self, states: Tensor) -> Tensor | None:
        """Return what the first states (B, K, L, D) fix for all that follow, (B, K, 2, D); None: nothing."""
        return None

    def into(self, states: Tensor, frame: Tensor | None) -> Tensor:
        """Return float32 states (B, K, S, D) in the form that is rounded."""
        return states

    def back(self, states: Tensor, frame: Tensor | None) -> Tensor:
        """Undo `into`."""
        return states


@dataclass(frozen=True)
class Channel(Token):
    """Every channel around its own centre and by its own width, then scales per token.

    KIVI gives keys a scale per channel and block of tokens. Eviction leaves of such a block a unit here and there, and
    its scales would have to stay as long as any; so centres and widths come from a text's first tokens and hold for all
    that follow (KVQuant's: channels of un-rotated keys keep their ranges), and nothing is ever cut off.
    """

    name = "channel"
    framed = True

    def frame(self, states: Tensor) -> Tensor:
        low, high = states.float().aminmax(dim=-2)
        centre, width = (low + high) / 2, (high - low) / 2
        # Of few tokens a range says little: then channels get the widths of all.
        tokens, mean = states.shape[-2], width.mean(-1, keepdim=True)
        width = ((tokens * width + _AS_TOKENS * mean) / (tokens + _AS_TOKENS)).clamp_min(_LEAST_WIDTH)
        return torch.stack([centre, width], -2)

    def into(self, states: Tensor, frame: Tensor | None) -> Tensor:
        assert frame is not None
        return (states - frame[:, :, :1]) / frame[:, :, 1:]

    def back(self, states: Tensor, frame: Tensor | None) -> Tensor:
        assert frame is not None
        return states * frame[:, :, 1:] + frame[:, :, :1]


@dataclass(frozen=True)
class Rotated(Token):
    """Turned by a fixed orthogonal matrix, as files of earlier versions may hold units; nobody can choose it."""

    name = "earlier_rotated"

    def into(self, states: Tensor, frame: Tensor | None) -> Tensor:
        return states @ basis(states.shape[-1], states.device)

    def back(self, states: Tensor, frame: Tensor | None) -> Tensor:
        return states @ basis(states.shape[-1], states.device).T


ROUNDINGS: tuple[type[Token], ...] = (Channel, Token)
"""Every way of rounding; a policy's `rounding` names one."""


@dataclass(frozen=True)
class Coder:
    """Keys, or values, of a layer in so many bits: buffers of one or two tensors with a row per unit."""

    bits: int
    rounding: Token

    @property
    def exact(self) -> bool:
        """Whether states stay as they are."""
        return self.bits == 16

    @property
    def framed(self) -> bool:
        """Whether it needs a frame."""
        return self.rounding.framed and not self.exact

    def unit_bytes(self, head_dim: int, element_size: int) -> int:
        """Return the bytes of a key, or a value."""
        if self.exact:
            return head_dim * element_size
        return packed_bytes(head_dim, self.bits) + 2 * self.rounding.groups(head_dim) * SCALE.itemsize

    def encode(self, states: Tensor, frame: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return what is to be held of states (B, K, S, D): themselves, or codes and scales.

        Every number is then at most half a scale away, in the form that is rounded. Codes are (B, K, S, P) uint8,
        scales (B, K, S, 2 G): the distance between two codes of each group, and what code 0 stands for.
        """
        if self.exact:
            return (states,)
        parts = self._split(self.rounding.into(states.float(), frame))
        levels = 2**self.bits - 1
        low, high = parts.amin(-1), parts.amax(-1)
        # The scale and the lowest number are rounded outwards, and codes are chosen for what is really stored.
        low16 = _below(low)
        scale16 = -_below(((low16.float() - high) / levels).clamp(max=-_LEAST_SCALE))
        codes = ((parts - low16.float()[..., None]) / scale16.float()[..., None]).round_().clamp_(0, levels)
        packed = pack(codes.to(torch.uint8).flatten(-2)[..., : states.shape[-1]], self.bits)
        return packed, torch.stack([scale16, low16], -1).flatten(-2)

    def decode(self, parts: tuple[Tensor, ...], head_dim: int, frame: Tensor | None = None) -> Tensor:
        """Return the states (B, K, S, D) that are held so."""
        if self.exact:
            return parts[0]
        scales = parts[1].unflatten(-1, (-1, 2)).float()
        states = self._split(unpack(parts[0], self.bits, head_dim).float()).mul_(scales[..., :1]).add_(scales[..., 1:])
        return self.rounding.back(states.flatten(-2)[..., :head_dim], frame)

    def _split(self, states: Tensor) -> Tensor:
        """Return (B, K, S, D) as (B, K, S, G, channels); a shorter last group repeats its last channel."""
        groups = self.rounding.groups(states.shape[-1])
        if spare := -states.shape[-1] % groups:
            states = torch.cat([states, states[..., -1:].expand(*states.shape[:-1], spare)], -1)
        split: Tensor = states.unflatten(-1, (groups, -1))
        return split


@dataclass(frozen=True)
class Form:
    """How the units of a layer are held."""

    keys: Coder
    values: Coder
    recent: int = 0
    """Newest tokens whose units are held as they are, besides."""
    placed: bool = False
    """Whether units remember the positions they are rotated to, because those are not consecutive."""

    def coder(self, name: str) -> Coder:
        """Return what holds "keys", or "values"."""
        return self.keys if name == "keys" else self.values

    @property
    def states(self) -> int:
        """Tensors of all units, in the backbone's type, that a view writes into the workspace."""
        return 1 if self.values.exact else 2

    def unit_bytes(self, head_dim: int, value_dim: int, element_size: int, column_bytes: int) -> int:
        """Return the bytes of a unit, its score, its position and a method's own columns included."""
        held = self.keys.unit_bytes(head_dim, element_size) + self.values.unit_bytes(value_dim, element_size)
        return held + unit_bytes(0, 0, element_size, column_bytes) + (PLACE.itemsize if self.placed else 0)

    def head_bytes(self, head_dim: int, value_dim: int, element_size: int) -> int:
        """Return the bytes of what a KV head of a row has once, however many units it holds."""
        frames = 2 * torch.float32.itemsize * (self.keys.framed * head_dim + self.values.framed * value_dim)
        return self.recent * (head_dim + value_dim) * element_size + COUNT.itemsize + frames


def form_of(policy: RetentionPolicy, nth: int, layers: int) -> Form | None:
    """Return how the `nth` of the full-attention layers holds its units in the fast tier; None: as they are."""
    if policy.exact_bits:
        return None
    kinds = (*ROUNDINGS, Rotated) if policy.rounding.startswith(Rotated.name) else ROUNDINGS
    rounding: Token = registry.get("rounding", kinds, policy.rounding)
    if min(nth, layers - 1 - nth) < policy.exact_layers:
        return None
    # Values have no channels of their own: groups of a token (KIVI).
    values = Token(group=rounding.group) if rounding.framed else rounding
    placed = policy.host_budget is not None and policy.positions == "compact"
    return Form(Coder(policy.key_bits, rounding), Coder(policy.value_bits, values), policy.exact_recent, placed)


def forms_of(policy: RetentionPolicy, layers: int, *, host: bool = False) -> list[Form | None]:
    """Return the form of every full-attention layer, in the fast tier or the second one, which has no newest units."""
    forms = [form_of(policy, nth, layers) for nth in range(layers)]
    return [replace(form, recent=0) if host and form is not None else form for form in forms]


def _below(numbers: Tensor) -> Tensor:
    """Return the numbers in the type of scales, none of them larger than it was; what is too large is cut."""
    numbers = numbers.clamp(-_MOST_SCALE, _MOST_SCALE)
    nearest = numbers.to(SCALE)
    # The next number below, by its bits: they count up from zero in both directions.
    bits = nearest.view(torch.int16)
    below = torch.where(nearest > 0, bits - 1, torch.where(nearest < 0, bits + 1, -(2**15) + 1)).to(torch.int16)
    return torch.where(nearest.float() > numbers, below.view(SCALE), nearest)


@cache
def basis(head_dim: int, device: torch.device) -> Tensor:
    """Return an orthogonal (D, D) matrix, the same wherever and whenever it is asked for.

    It is a Hadamard matrix of the largest power of two that divides the head dim, times a cosine transform of the rest,
    with rows of seeded signs.
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
