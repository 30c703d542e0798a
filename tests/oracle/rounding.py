"""Rounded keys and values, slowly: per-token groups, a rotation before them, and per-channel scales."""

# S units, D head dim

from __future__ import annotations

import math

import torch
from torch import Tensor


def half_below(number: float) -> float:
    """Return the largest float16 that is not above a number."""
    half = torch.tensor(number, dtype=torch.float16)
    if float(half) > number:
        half = torch.nextafter(half, torch.tensor(-math.inf, dtype=torch.float16))
    return float(half)


def scale_of(numbers: list[float], bits: int) -> tuple[float, float]:
    """Return scale and lowest number of a group, both float16: its codes 0 .. 2^bits - 1 span all of it."""
    low = half_below(min(numbers))
    distance = max((max(numbers) - low) / (2**bits - 1), 2.0**-24)
    return -half_below(-distance), low


def rounded_by_token(states_SD: Tensor, bits: int, group: int) -> Tensor:
    """Return the states after rounding with one scale per token and group of channels (KIVI's values; quanto, axis 0).

    A head dim of more than `group` channels is split into as few groups as possible, as even as possible.
    """
    units, dim = states_SD.shape
    width = math.ceil(dim / math.ceil(dim / group))
    out = torch.zeros(units, dim)
    for s in range(units):
        for first in range(0, dim, width):
            numbers = states_SD[s, first : first + width].tolist()
            scale, low = scale_of(numbers, bits)
            for d, number in enumerate(numbers, first):
                # The nearest code; the even one where two are (IEEE 754).
                out[s, d] = low + scale * min(max(round((number - low) / scale), 0), (1 << bits) - 1)
    return out


def rounded_by_channel(states_SD: Tensor, bits: int, group: int, first_SD: Tensor) -> Tensor:
    """Return the states after rounding by token, each channel around its centre and by its width.

    Both come from a text's first tokens: half the sum and half the difference of a channel's extremes (KIVI, per
    channel; KVQuant, fixed for a whole text). A width counts those tokens, and 16 more with the mean of all widths.
    """
    tokens, dim = first_SD.shape
    low = [min(first_SD[:, d].tolist()) for d in range(dim)]
    high = [max(first_SD[:, d].tolist()) for d in range(dim)]
    centre = torch.tensor([(a + b) / 2 for a, b in zip(low, high, strict=True)])
    widths = [(b - a) / 2 for a, b in zip(low, high, strict=True)]
    mean = sum(widths) / dim
    width = torch.tensor([max((tokens * own + 16 * mean) / (tokens + 16), 1e-6) for own in widths])
    return rounded_by_token((states_SD - centre) / width, bits, group) * width + centre


def packed(codes_D: list[int], bits: int) -> list[int]:
    """Return the bytes of codes that follow each other bit by bit, the lowest first."""
    stream = [(code >> bit) & 1 for code in codes_D for bit in range(bits)]
    count = {8: 1, 4: 2, 3: 8, 2: 4}[bits]
    stream += [0] * (-len(codes_D) % count * bits)
    return [sum(bit << place for place, bit in enumerate(stream[i : i + 8])) for i in range(0, len(stream), 8)]
