"""Re-rotation is exact: rot(k, s) = rot(rot(k, p), s - p), and un-rotating gives the key back, magnitudes included."""

from __future__ import annotations

import oracle as reference
import pytest
import torch
from families import build

from locret.backbone.adapters import find_decoder
from locret.backbone.rotary import Rotary, long_factors, rotate, unrotate

SCALED = ["llama", "llama-3.1-rope", "llama-yarn", "phi3-longrope", "phi3-partial", "gemma3"]


def table(family: str, start: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    decoder = find_decoder(build(family))
    with long_factors(decoder):
        return Rotary(decoder).table(start, length, torch.zeros(1))


@pytest.mark.parametrize("family", SCALED)
def test_unrotate_gives_the_key_back(family: str) -> None:
    cos, sin = table(family, 100, 50)
    keys = torch.randn(2, 3, 50, 8)
    torch.testing.assert_close(unrotate(rotate(keys, cos, sin), cos, sin), keys, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", SCALED)
def test_two_rotations_add_up(family: str) -> None:
    keys = torch.randn(1, 1, 1, 8)
    there = rotate(keys, *table(family, 90, 1))
    cos, sin = table(family, 60, 1)
    magnitude = torch.sqrt(cos[..., :1] ** 2 + sin[..., :1] ** 2)
    stepwise = rotate(rotate(keys, *table(family, 30, 1)), cos / magnitude, sin / magnitude)
    torch.testing.assert_close(stepwise, there, atol=1e-5, rtol=0)


def test_rotation_equals_the_formula() -> None:
    cos, sin = table("llama", 7, 5)
    keys = torch.randn(5, 8)
    inv_freq = 10000.0 ** -(torch.arange(0, 8, 2).float() / 8)
    expected = torch.stack([reference.rotate(keys[i], 7 + i, inv_freq) for i in range(5)])
    torch.testing.assert_close(rotate(keys, cos, sin), expected, atol=1e-5, rtol=0)
