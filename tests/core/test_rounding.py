"""Rounded keys and values against the slow version, at awkward lengths; and how far from the truth they may be."""

from __future__ import annotations

import oracle as reference
import pytest
import torch
from torch import Tensor

from locret.cache.rounding import Coder, Token, pack, packed_bytes, unpack
from locret.policy.policy import BITS

FEW = [bits for bits in BITS if bits < 16]
DIMS = [1, 3, 8, 20, 32, 48, 80, 96, 128]
few_bits = pytest.mark.parametrize("bits", FEW)


def states(dim: int, units: int = 5, seed: int = 0, spread: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(2, 3, units, dim, generator=generator)
    return drawn * torch.rand(dim, generator=generator).mul(spread).exp() + torch.randn(dim, generator=generator)


def rounded(rounding: Token, numbers: Tensor, bits: int) -> Tensor:
    coder = Coder(bits, rounding)
    return coder.decode(coder.encode(numbers), numbers.shape[-1])


@few_bits
@pytest.mark.parametrize("dim", DIMS)
def test_codes_come_back_from_their_bytes_and_lie_where_the_slow_version_puts_them(bits: int, dim: int) -> None:
    generator = torch.Generator().manual_seed(dim)
    codes = torch.randint(0, 2**bits, (2, 3, dim), generator=generator).to(torch.uint8)
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (2, 3, packed_bytes(dim, bits))
    assert torch.equal(unpack(packed, bits, dim).to(torch.uint8), codes)
    for row, slow in ((packed[b, k].tolist(), codes[b, k].tolist()) for b in range(2) for k in range(3)):
        assert row == reference.packed(slow, bits)


@few_bits
@pytest.mark.parametrize("group", [64, 16, 7, 1])
@pytest.mark.parametrize("dim", DIMS)
def test_rounding_by_token_is_the_slow_one(bits: int, group: int, dim: int) -> None:
    numbers = states(dim, units=2)
    fast = rounded(Token(group=group), numbers, bits)
    for row in range(2):
        slow = reference.rounded_by_token(numbers[row, 1], bits, group)
        torch.testing.assert_close(fast[row, 1], slow, atol=1e-5, rtol=1e-6)


@few_bits
@pytest.mark.parametrize(
    "numbers",
    [
        torch.zeros(1, 1, 2, 8),
        torch.full((1, 1, 2, 8), -3.3),
        torch.full((1, 1, 2, 8), 1e-9),
        torch.cat([torch.full((1, 1, 2, 7), 1e-7), torch.full((1, 1, 2, 1), -2e-7)], -1),
        torch.tensor([[[[65504.0, -65504.0, 0.0, 1.0]]]]),
    ],
)
def test_numbers_that_a_scale_can_hardly_tell_apart_stay_finite_and_close(bits: int, numbers: Tensor) -> None:
    coder = Coder(bits, Token())
    coded = coder.encode(numbers)
    found = coder.decode(coded, numbers.shape[-1])
    assert found.isfinite().all()
    assert ((found - numbers).abs() <= coded[1][..., :1].float() / 2 * (1 + 1e-3)).all()


@pytest.mark.parametrize("group", [0, -3])
def test_a_group_without_channels_is_refused(group: int) -> None:
    with pytest.raises(ValueError, match=f"group={group} is too small"):
        Token(group=group)
