"""Re-rotation is exact: rot(k, s) = rot(rot(k, p), s - p), and un-rotating gives the key back, magnitudes included."""

from __future__ import annotations

import pytest
import torch
from families import build

from locret.backbone.adapters import find_decoder
from locret.backbone.rotary import Rotary, long_factors, rotate, unrotate

SCALED = ["phi3-longrope", "llama-yarn", "phi3-partial", "gemma3"]


def table(family: str, start: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    decoder = find_decoder(build(family))
    with long_factors(decoder):
        return Rotary(decoder).table(start, length, torch.zeros(1))


@pytest.mark.parametrize("family", SCALED)
def test_unrotate_gives_the_key_back(family: str) -> None:
    cos, sin = table(family, 100, 50)
    keys = torch.randn(2, 3, 50, 8)
    torch.testing.assert_close(unrotate(rotate(keys, cos, sin), cos, sin), keys, atol=1e-5, rtol=0)
