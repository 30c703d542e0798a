"""Units in few bits: what their store owes to the plain one, that no unit is rounded twice, and bytes of every tier."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import oracle as reference
import pytest
import torch
from families import build, prompt
from test_stores import DIM, HEADS, ROWS, Filled
from torch import Tensor

from locret import RetentionCache, RetentionPolicy, generate, prefill
from locret.backbone.rotary import rotate
from locret.cache.quantised import QuantisedStore
from locret.cache.rounding import Channel, Coder, Form, Token, form_of
from locret.cache.store import POSITIONS, Workspace
from locret.policy.policy import BITS

FEW = [bits for bits in BITS if bits < 16]
GREEDY = {"do_sample": False, "eos_token_id": None}
every_bits = pytest.mark.parametrize("bits", FEW)
TWO_TIERS = {"host_budget": 16, "recall": 4}


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


def once(states: Tensor, bits: int) -> Tensor:
    coder = Coder(bits, Token())
    return coder.decode(coder.encode(states), DIM)


# -- with 16 bits it is the plain store -------------------------------------------------------------------------------


# -- with fewer bits: rounded once ------------------------------------------------------------------------------------


def expected(made: Filled, rounding: Token, bits: int, frames: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return what every key and value that ever came is after one rounding."""
    found = []
    for name, states in (("key_frame", made.keys), ("value_frame", made.values)):
        frame = frames.get(name)
        coder = Coder(bits, rounding)
        found.append(coder.decode(coder.encode(states, frame), DIM, frame))
    return found[0], found[1]


@every_bits
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
    store.rotate(20)
    store.unrotate(20)
    check()
    store.reserve(50)
    store.shrink(13)
    store.take_back()
    check()
    copied, loaded = (
        store.copy(Workspace()),
        QuantisedStore(made.rotary, Workspace(), {"visits": torch.int16}, form=store.form),
    )
    loaded.load({name: t.clone() for name, t in store.state().items()}, store.fill)
    for twin in (copied, loaded):
        made.store = store = twin
        check()
    assert store.fill == 11


@every_bits
def test_keys_are_rotated_after_rounding_and_keys_of_an_answer_are_held_unrotated(bits: int) -> None:
    made = filled(form(bits), 12)
    plain = {unit: key for unit, (key, _, _) in made.units().items()}
    made.store.rotate(30)
    cos, sin = made.rotary.table(18, 17, made.keys)
    for (row, head, position), (key, _, _) in made.units().items():
        turned = rotate(plain[row, head, position][None], cos[position][None], sin[position][None])[0]
        torch.testing.assert_close(key, turned, atol=1e-5, rtol=0)
    waiting = torch.randn(ROWS, HEADS, 5, DIM, generator=torch.Generator().manual_seed(3))
    positions = torch.arange(12, 17, dtype=torch.int32)[None, None]
    made.store.append(rotate(waiting, cos[12:], sin[12:]), waiting, positions)
    torch.testing.assert_close(made.store.view(30).keys[:, :, 12:], rotate(waiting, cos[12:], sin[12:]))  # as they came
    made.store.unrotate(35)
    rounded = once(waiting, bits)
    # A product of rotations may put a number halfway between two codes to the other side.
    assert ((made.store.view(0).keys[:, :, 12:] - rounded).abs() < 1e-4).float().mean() > 0.95


@pytest.mark.parametrize("recent", [1, 4, 9])
def test_the_newest_tokens_are_held_as_they_are_until_as_many_have_come(recent: int) -> None:
    made = filled(form(2, recent=recent), 12)
    coarse = once(made.keys, 2)

    def check(exact_from: int) -> None:
        for (row, head, position), (key, value, _) in made.units().items():
            exact = position >= exact_from
            assert torch.equal(value, made.values[row, head, position]) == exact
            assert torch.equal(key, made.keys[row, head, position]) == exact
            if not exact:
                torch.testing.assert_close(key, coarse[row, head, position], atol=1e-5, rtol=0)

    check(12 - recent)
    made.store.take_back()
    check(12 - recent)
    kept = made.evict("dense", 7)
    assert kept.units.shape[-1] == 7
    check(12 - recent)
    made.append(1)
    made.store.view(0)
    coarse = once(made.keys, 2)
    held = made.store.held(POSITIONS)
    exact = made.store.tensors["exact"]  # type: ignore[attr-defined]
    for row, head in itertools.product(range(ROWS), range(HEADS)):
        # The unit of the token that was taken back is gone; 12 has come instead.
        assert int(exact[row, head]) == min(recent, int((held[row, head] > 11 - recent).sum()))


# -- in a cache -------------------------------------------------------------------------------------------------------


def coded(cache: RetentionCache) -> Iterator[tuple[tuple[int, int, int, int], tuple[bytes, ...]]]:
    """Yield codes and scales of every unit of both tiers, by layer, row, head and position."""
    for layer_idx, layer in enumerate(cache.governed):
        for store in [layer.store] + ([layer.host.store] if layer.host is not None and layer.host.fill else []):
            assert isinstance(store, QuantisedStore)
            names = ("keys", "values", "key_scales", "value_scales")
            parts = [store.tensors[name][:, :, : store.fill] for name in names]
            for where in itertools.product(*map(range, store.held(POSITIONS).shape)):
                position = int(store.held(POSITIONS)[where])
                if position >= 0:
                    yield (layer_idx, *where[:2], position), tuple(p[where].numpy().tobytes() for p in parts)


@pytest.mark.parametrize("positions", ["compact", "original"])
@pytest.mark.parametrize("changes", [{}, TWO_TIERS, {"exact_recent": 5}])
@pytest.mark.parametrize("rounding", ["channel", "token"])
def test_codes_never_change_from_the_first_chunk_to_the_last_answer(
    rounding: str, changes: dict[str, Any], positions: str
) -> None:
    model = build("llama")
    seen: dict[tuple[int, int, int, int], tuple[bytes, ...]] = {}
    chosen = policy(
        key_bits=3, value_bits=2, rounding=rounding, positions=positions, decode_budget=33, decode_interval=3, **changes
    )
    cache = RetentionCache(model, "h2o", chosen)

    def watch(cache: RetentionCache) -> None:
        for unit, codes in coded(cache):
            assert seen.setdefault(unit, codes) == codes, unit

    prefill(model, prompt(61), cache, on_chunk=watch, new_tokens=8)
    watch(cache)
    for more in range(2):
        # The newest token is fed again before an answer, and its unit comes anew.
        seen = {unit: codes for unit, codes in seen.items() if unit[-1] < cache.seen - 1}
        generate(model, cache=cache, max_new_tokens=8, **GREEDY)
        watch(cache)
        prefill(model, prompt(20, seed=more), cache, on_chunk=watch, new_tokens=8)
        watch(cache)
    assert len(seen) > 500


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_backbones_are_read_and_answered(dtype: torch.dtype) -> None:
    model = build("llama").to(dtype)
    cache = RetentionCache(model, "h2o", policy(key_bits=4, value_bits=4, exact_recent=3, **TWO_TIERS))
    assert prefill(model, prompt(61), cache, new_tokens=4).isfinite().all()
    generate(model, cache=cache, max_new_tokens=4, **GREEDY)
    memory = cache.memory()
    assert memory.actual == memory.planned
    model.float()


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"key_bits": 5}, "key_bits=5 is unknown; choose one of 16, 8, 4, 3, 2"),
        ({"value_bits": 1}, "value_bits=1 is unknown"),
        ({"key_bits": 4, "exact_recent": -1}, "exact_recent=-1 is too small; it must be 0 or more"),
        ({"exact_layers": -2, "value_bits": 4}, "exact_layers=-2 is negative"),
        ({"key_bits": 4, "head_budgets": "adaptive"}, 'use 16 bits, or head_budgets="uniform"'),
        ({"key_bits": 4, "merge": "loco"}, "key_bits=4 and value_bits=16 round every unit once; use 16 bits, or leave"),
        ({"key_bits": 4, "rounding": "chanel"}, 'rounding "chanel" is unknown; did you mean channel?'),
        ({"key_bits": 4, "rounding": "rotated"}, 'rounding "rotated" was retired; release 0.1.0'),
        ({"key_bits": 4, "rounding": "token:group=0"}, "group=0 is too small"),
        ({"key_bits": 4, "rounding": "token:grupo=3"}, 'it has no option "grupo"'),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match="key_bits|value_bits|exact|rounding|group") as caught:
        RetentionCache(build("llama"), "h2o", policy(**changes))
    assert sentence in str(caught.value)


def test_settings_of_codes_are_idle_without_codes() -> None:
    idle = {"rounding", "exact_recent", "exact_layers"}
    assert idle <= policy().idle().keys()
    assert not idle & policy(value_bits=8).idle().keys()


def test_the_published_baselines_can_be_said() -> None:
    four = form_of(policy(key_bits=4, value_bits=4, rounding="token:group=64"), 1, 4)  # Locret-4bits
    assert four == Form(Coder(4, Token(group=64)), Coder(4, Token(group=64)))
    kivi = form_of(policy(key_bits=2, value_bits=2, rounding="channel:group=32", exact_recent=128), 1, 4)
    assert kivi == Form(Coder(2, Channel(group=32)), Coder(2, Token(group=32)), recent=128)
    assert [form_of(policy(key_bits=2, exact_layers=1), nth, 4) is None for nth in range(4)] == [
        True,
        False,
        False,
        True,
    ]


@pytest.mark.parametrize("dim", [8, 20])
@every_bits
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


# -- a second tier in codes -------------------------------------------------------------------------------------------
