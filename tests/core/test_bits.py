"""Units in few bits: rounded once, as the slow version rounds, and what is refused."""

from __future__ import annotations

from typing import Any

import oracle as reference
import pytest
import torch
from families import build
from test_stores import DIM, ROWS, Filled
from torch import Tensor

from locret import RetentionCache, RetentionPolicy
from locret.cache.quantised import QuantisedStore
from locret.cache.rounding import Channel, Coder, Form, Token, form_of, pack, packed_bytes, unpack
from locret.cache.store import Workspace
from locret.policy.policy import BITS

FEW = [bits for bits in BITS if bits < 16]
DIMS = [1, 20, 96]
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
@pytest.mark.parametrize("group", [64, 7])
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


def policy(**changes: Any) -> RetentionPolicy:
    numbers = {"budget": 24, "chunk_size": 11, "stabilizers": 5, "local_len": 6}
    return RetentionPolicy(**{**numbers, **changes})


def filled(form: Form | None, tokens: int = 0, rows: int = ROWS) -> Filled:
    made = Filled("dense", rows=rows)
    if form is not None:
        made.store = QuantisedStore(made.rotary, Workspace(), {"visits": torch.int16}, form=form)
    if tokens:
        made.append(tokens)
        made.store.view(0)  # what comes is attended to once as it came
    return made


def form(bits: int, rounding: Token | None = None, **changes: Any) -> Form:
    coder = Coder(bits, rounding or Token())
    return Form(coder, coder, **changes)


def expected(made: Filled, rounding: Token, bits: int, frames: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return what every key and value that ever came is after one rounding."""
    found = []
    for name, states in (("key_frame", made.keys), ("value_frame", made.values)):
        frame = frames.get(name)
        coder = Coder(bits, rounding)
        found.append(coder.decode(coder.encode(states, frame), DIM, frame))
    return found[0], found[1]


@few_bits
@pytest.mark.parametrize("rounding", [Channel(), Token(group=3)], ids=lambda one: one.name)
def test_a_unit_is_rounded_once_whatever_happens_to_it(bits: int, rounding: Token) -> None:
    made = filled(form(bits, rounding), 20)
    store = made.store
    assert isinstance(store, QuantisedStore)

    def check() -> None:
        keys, values = expected(made, rounding, bits, store.tensors)
        for (row, head, position), (key, value, _) in made.units().items():
            torch.testing.assert_close(key, keys[row, head, position], atol=1e-4, rtol=0)
            torch.testing.assert_close(value, values[row, head, position], atol=1e-4, rtol=0)

    check()
    made.evict("dense", 9)
    check()
    made.append(7)
    store.view(9)
    made.evict("dense", 12)
    check()
    store.turn_keys(20)
    store.turn_keys(20, back=True)
    check()
    store.reserve(50)
    store.shrink(13)
    store.take_back()
    check()
    loaded = QuantisedStore(made.rotary, Workspace(), {"visits": torch.int16}, form=store.form)
    loaded.load({name: t.clone() for name, t in store.state().items()}, store.fill)
    for twin in (store.copy(Workspace()), loaded):
        made.store = store = twin
        check()
    assert store.fill == 11


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"key_bits": 5}, "key_bits=5 is unknown; choose one of 16, 8, 4, 3, 2"),
        ({"key_bits": 4, "head_budgets": "adaptive"}, 'use 16 bits, or head_budgets="uniform"'),
        ({"key_bits": 4, "merge": "loco"}, "key_bits=4 and value_bits=16 round every unit once; use 16 bits, or leave"),
        ({"key_bits": 4, "rounding": "chanel"}, 'rounding "chanel" is unknown; did you mean channel?'),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match="key_bits|value_bits|exact|rounding|group") as caught:
        RetentionCache(build("llama"), "h2o", policy(**changes))
    assert sentence in str(caught.value)


def test_the_published_baselines_can_be_said() -> None:
    four = form_of(policy(key_bits=4, value_bits=4, rounding="token:group=64"), 1, 4)  # Locret-4bits
    assert four == Form(Coder(4, Token(group=64)), Coder(4, Token(group=64)))
    kivi = form_of(policy(key_bits=2, value_bits=2, rounding="channel:group=32", exact_recent=128), 1, 4)
    assert kivi == Form(Coder(2, Channel(group=32)), Coder(2, Token(group=32)), recent=128)
    exact = [form_of(policy(key_bits=2, exact_layers=1), nth, 4) is None for nth in range(4)]
    assert exact == [True, False, False, True]


@pytest.mark.parametrize("dim", [8, 20])
@few_bits
def test_rounding_by_channel_is_the_slow_one(bits: int, dim: int) -> None:
    drawn = torch.randn(1, 1, 25, dim, generator=torch.Generator().manual_seed(bits)) * torch.arange(1, dim + 1)
    first, later = drawn[:, :, :18], drawn[:, :, 18:] * 3
    rounding = Channel(group=7)
    frame = rounding.frame(first)
    coder = Coder(bits, rounding)
    fast = coder.decode(coder.encode(later, frame), dim, frame)
    slow = reference.rounded_by_channel(later[0, 0], bits, 7, first[0, 0])
    close = (fast[0, 0] - slow).abs() < 1e-3
    assert close.float().mean() > 0.97  # a number halfway between two codes may fall to either side
