"""Units in few bits: what their store owes to the plain one, that no unit is rounded twice, and bytes of every tier."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import oracle as reference
import pytest
import torch
from families import build, distinct, prompt
from safetensors import safe_open
from safetensors.torch import save_file
from test_scorers import make, padded, policy_of
from test_stores import DIM, HEADS, ROWS, Filled
from torch import Tensor

from locret import RetentionCache, RetentionPolicy, generate, load_cache, lookups, prefill, save_cache, scorers
from locret.backbone.rotary import rotate
from locret.cache.quantised import QuantisedStore
from locret.cache.rounding import Channel, Coder, Form, Token, form_of
from locret.cache.store import POSITIONS, SCORES, DenseStore, UnitRanks, Workspace
from locret.lookups.base import Ask, blocks
from locret.policy.policy import BITS

FEW = [bits for bits in BITS if bits < 16]
SIXTEEN = Coder(16, Token())
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


def same(one: Filled, other: Filled) -> None:
    assert one.store.fill == other.store.fill
    for name in (SCORES, POSITIONS, "visits"):
        assert torch.equal(one.store.held(name), other.store.held(name))
    for ours, theirs in zip(one.units().items(), other.units().items(), strict=True):
        assert ours[0] == theirs[0]
        torch.testing.assert_close(ours[1][:2], theirs[1][:2], atol=2e-5, rtol=0)


@pytest.mark.parametrize("recent", [0, 3, 12])
def test_with_sixteen_bits_every_operation_does_what_it_does_to_the_plain_store(recent: int) -> None:
    one, other = (filled(kind, 20) for kind in (form(16, recent=recent), None))
    both = (one, other)
    same(one, other)
    for made in both:
        made.evict("dense", 9)
    same(one, other)
    newest = torch.randn(ROWS, HEADS, 4, DIM, generator=torch.Generator().manual_seed(9))
    for made in both:
        made.append(4, rotated=newest)
    views = [made.store.view(30) for made in both]
    torch.testing.assert_close(views[0].keys, views[1].keys, atol=1e-5, rtol=0)
    torch.testing.assert_close(views[0].values, views[1].values, atol=0, rtol=0)
    for step in ("rotate", "append", "take_back", "append", "evict", "rows", "unrotate"):
        for made in both:
            if step in ("rotate", "unrotate"):
                getattr(made.store, step)({"rotate": 40, "unrotate": 49}[step])
            elif step == "append":
                made.append(5)
                made.store.view(45)
            elif step == "take_back":
                made.store.take_back()
            elif step == "evict":
                made.evict("dense", 12, turned=True)
            else:
                made.store.select_rows(torch.tensor([1, 0, 1]))
                made.keys, made.values = made.keys[[1, 0, 1]], made.values[[1, 0, 1]]
        same(one, other)


def test_with_sixteen_bits_ranks_of_two_tiers_are_those_of_the_plain_store() -> None:
    one, other = (filled(kind, 20) for kind in (form(16, placed=True), None))
    ranks = UnitRanks(torch.arange(20).expand(ROWS, HEADS, 20) * 2 + torch.arange(HEADS)[:, None], 45)
    for made in (one, other):
        made.store.rotate(60, ranks)
    same(one, other)
    asked = torch.tensor([[[[3, 0], [19, 7]]]]).expand(ROWS, HEADS * 2, -1, -1)
    assert isinstance(one.store, QuantisedStore)
    assert isinstance(other.store, DenseStore)
    for ours, theirs in zip(*(made.store.as_states(made.store.as_held(asked)) for made in (one, other)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    keys = (next(blocks(made.store.all_keys()))[1] for made in (one, other))
    torch.testing.assert_close(*keys, atol=1e-5, rtol=0)
    for made in (one, other):
        made.store.unrotate(60, ranks)
    same(one, other)


def test_rows_that_begin_elsewhere_are_joined_and_parted_like_plain_ones() -> None:
    joined = []
    for kind in (form(16, recent=3), None):
        single = [filled(kind, tokens, rows=1) for tokens in (12, 5)]
        for made, base in zip(single, (12, 5), strict=True):
            made.store.rotate(base)
        both = filled(kind, rows=2)
        both.store.join([made.store for made in single], room=8)
        both.append(2)  # as a backbone would rotate them
        both.store.view(12)
        joined.append(both)
    same(*joined)
    for made in joined:
        made.store.select_rows(torch.tensor([1]))
        made.store.trim()
    same(*joined)


WAYS: list[dict[str, Any]] = [
    {},
    {"positions": "original"},
    TWO_TIERS,
    {**TWO_TIERS, "positions": "original"},
    {"decode_budget": 33, "decode_interval": 3},
    {**TWO_TIERS, "decode_budget": 33, "decode_interval": 3},
    {"when": "prompt_end"},
    {"layer_budgets": "pyramid"},
]


@pytest.mark.parametrize("changes", WAYS, ids=lambda way: "-".join(map(str, way.values())) or "plain")
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_with_sixteen_bits_a_cache_answers_like_the_plain_one(
    changes: dict[str, Any], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, found = build(family), []
    for exact in (True, False):
        if not exact:
            placed = "host_budget" in changes and changes.get("positions") != "original"
            sixteen = form(16, placed=placed)
            for module in ("layers", "memory"):
                monkeypatch.setattr(f"locret.cache.{module}.forms_of", lambda _, n, host=False, of=sixteen: [of] * n)
        rows = [prompt(57, seed=1), prompt(33, seed=2)]
        ids, mask = padded(rows)
        cache = RetentionCache(model, "h2o", policy(**changes))
        logits = [prefill(model, ids, cache, attention_mask=mask, new_tokens=9)]
        logits.append(generate(model, cache=cache.copy(), max_new_tokens=9, **GREEDY)[:, -9:].float())
        beams = generate(model, cache=cache.copy(), max_new_tokens=5, num_beams=3, **GREEDY)
        logits += [beams.float(), prefill(model, prompt(30, seed=4).repeat(2, 1), cache, new_tokens=4)]
        found.append(logits)
        assert {type(layer.store) for layer in cache.governed} == {DenseStore if exact else QuantisedStore}
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=0)


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


EVERYTHING = {"host_budget": "all", "recall": 3}


@pytest.mark.parametrize(
    ("key_bits", "value_bits", "tiers", "positions"),
    [
        (8, 8, {}, "compact"),
        (3, 2, TWO_TIERS, "compact"),
        (4, 16, TWO_TIERS, "original"),
        (16, 2, EVERYTHING, "compact"),
        (2, 3, EVERYTHING, "original"),
        (16, 4, {}, "original"),
    ],
)
def test_planned_bytes_are_counted_bytes_for_texts_of_every_length(
    key_bits: int, value_bits: int, tiers: dict[str, Any], positions: str
) -> None:
    model, sizes = build("llama"), set()
    chosen = policy(
        key_bits=key_bits, value_bits=value_bits, exact_recent=5, exact_layers=1, positions=positions, **tiers
    )
    for tokens in (61, 200, 333):
        cache = RetentionCache(model, "h2o", chosen)
        prefill(model, prompt(tokens), cache, new_tokens=4)
        generate(model, cache=cache, max_new_tokens=4, **GREEDY)
        memory = cache.memory()
        assert memory.actual == memory.planned == memory.peak
        assert memory.host == memory.host_planned
        sizes.add((memory.planned, 0 if chosen.host_budget == "all" else memory.host))
        kinds = [type(layer.store) for layer in cache.governed]
        assert kinds == [DenseStore, *[QuantisedStore] * (len(kinds) - 2), DenseStore]
    assert len(sizes) == 1
    plain = RetentionCache(model, "h2o", policy(positions=positions, **tiers))
    prefill(model, prompt(333), plain, new_tokens=4)
    assert cache.memory().host <= plain.memory().host


@pytest.mark.parametrize("name", scorers.names())
def test_every_scorer_reads_batches_saves_and_copies_codes(name: str, tmp_path: Path) -> None:
    model = build("llama")
    scorer = make(name, model)
    chosen = policy_of(name, key_bits=4, value_bits=3, exact_recent=4, **TWO_TIERS)
    rows = [distinct(57, seed=1), distinct(33, seed=2)]
    ids, mask = padded(rows)
    together = RetentionCache(model, scorer, chosen)
    logits = prefill(model, ids, together, attention_mask=mask, new_tokens=5)
    for index, row in enumerate(rows):
        alone = RetentionCache(model, scorer, chosen)
        own = prefill(model, row, alone, new_tokens=5)
        torch.testing.assert_close(logits[index], own[0], atol=1e-5, rtol=0)
    save_cache(alone, tmp_path / "one.safetensors")
    caches = [alone.copy(), load_cache(tmp_path / "one.safetensors", model, scorer), alone]
    answers = [generate(model, cache=cache, max_new_tokens=5, **GREEDY) for cache in caches]
    assert all(torch.equal(answers[0], answer) for answer in answers)


def test_a_batch_in_codes_is_saved_and_loaded(tmp_path: Path) -> None:
    model = build("llama")
    ids, mask = padded([prompt(57, seed=1), prompt(33, seed=2)])
    chosen = policy(key_bits=4, value_bits=3, exact_recent=4, decode_budget=33, decode_interval=3, **TWO_TIERS)
    cache = RetentionCache(model, "h2o", chosen)
    prefill(model, ids, cache, attention_mask=mask, new_tokens=5)
    save_cache(cache, tmp_path / "two.safetensors")
    loaded = load_cache(tmp_path / "two.safetensors", model, "h2o")
    answers = [generate(model, cache=one, max_new_tokens=12, **GREEDY) for one in (cache, loaded)]
    assert torch.equal(*answers)


@pytest.mark.parametrize(
    ("name", "damage", "sentence"),
    [
        ("key_scales", lambda x: x[..., :1], "layers.1.key_scales is"),
        ("keys", lambda x: x.float(), "layers.1.keys is"),
        ("exact", lambda x: x + 99, "layers.1.exact holds numbers outside of 0 to"),
        ("following", lambda x: x - 10**6, "layers.1.following holds numbers outside of 0 to"),
        ("key_frame", lambda x: x * 0, "layers.1.key_frame holds widths that are not above 0"),
        ("value_scales", lambda x: x * torch.nan, "layers.1.value_scales holds values that are not finite"),
        ("host.places", lambda x: x + 10**6, "layers.1.host.places holds numbers outside of"),
    ],
)
def test_damaged_codes_are_refused(name: str, damage: Any, sentence: str, tmp_path: Path) -> None:
    model, path = build("llama"), tmp_path / "damaged.safetensors"
    cache = RetentionCache(model, "h2o", policy(key_bits=4, value_bits=3, exact_recent=4, **TWO_TIERS))
    prefill(model, prompt(61), cache)
    save_cache(cache, path)
    with safe_open(path, framework="pt") as file:
        tensors, metadata = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118
    tensors[f"layers.1.{name}"] = damage(tensors[f"layers.1.{name}"]).contiguous()
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(ValueError, match="it is damaged") as caught:
        load_cache(path, model, "h2o")
    assert sentence in str(caught.value)


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


def test_a_store_of_ones_own_is_refused() -> None:
    model, chosen = build("llama"), policy(key_bits=4, value_bits=4)
    with pytest.raises(ValueError, match="store dense holds units as they are, but key_bits=4"):
        RetentionCache(model, "h2o", chosen, store=DenseStore)


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


def of_second_tier(model: Any, tokens: int = 90, rows: int = 1, disk: Any = None, **changes: Any) -> RetentionCache:
    codes = {"key_bits": 4, "value_bits": 2, "host_budget": "all", "recall": 6}
    cache = RetentionCache(model, "key_norm", policy(**{**codes, **changes}), disk=disk)
    ids, mask = prompt(tokens, batch=rows), torch.ones(rows, tokens, dtype=torch.long)
    mask[-1, : 40 * (rows - 1)] = 0
    prefill(model, ids, cache, attention_mask=mask)
    return cache


@pytest.mark.parametrize("positions", ["compact", "original"])
@pytest.mark.parametrize("spec", ["exact", "codes:oversample=3", "quest:page=5", "omnikv"])
def test_keys_in_codes_are_scanned_in_blocks_for_the_choice_of_all_at_once(
    spec: str, positions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("locret.lookups.base.DECODED", 8)
    cache = of_second_tier(build("llama"), rows=2, positions=positions)
    tier = cache.governed[-1].host
    assert tier is not None
    tier.store.sort()
    held, units = tier.store.held(POSITIONS), tier.fill
    scanned = tier.store.all_keys()
    sizes: list[int] = []
    whole = torch.cat([keys for _, keys in blocks(scanned)], dim=2)
    decode = QuantisedStore.states_of

    def watched(store: QuantisedStore, name: str, held: dict[str, Tensor]) -> Tensor:
        sizes.append(held[name][0, 0, ..., 0].numel())
        return decode(store, name, held)

    monkeypatch.setattr(QuantisedStore, "states_of", watched)
    lookup, query = lookups.get(spec), torch.randn(2, 4, 1, whole.shape[-1], generator=torch.Generator().manual_seed(0))
    found = []
    for keys in (scanned, whole):
        ask = {"query": query, "window": query, "keys": keys, "positions": held, "padded": True, "count": 11}
        ask |= {"index": lookup.index(keys, held), "scaling": 0.3, "layers": 8, "generating": True, "shared": {}}
        filters = lookup.choose(Ask(nth=2, **ask))  # of omnikv: leaves its scores
        assert filters is None or spec != "omnikv"
        ranks = lookup.choose(Ask(nth=7, **ask))
        assert ranks is not None
        found.append(ranks.sort(dim=-1).values)
    assert torch.equal(*found)
    assert units == 60
    assert 0 < max(sizes) <= (33 if spec.startswith("codes") else 8)  # candidates of codes are looked at together


@pytest.mark.parametrize(("positions", "places"), [("compact", 4), ("original", 0)])
def test_what_is_recalled_moves_as_codes_and_scales(positions: str, places: int) -> None:
    model = build("llama")
    cache = of_second_tier(model, positions=positions)
    before = cache.memory().moved
    generate(model, cache=cache, max_new_tokens=3, **GREEDY)
    recalled = cache.memory().moved - before
    form = form_of(cache.policy, 0, len(cache.backbone.layers))
    assert form is not None
    unit = form.keys.unit_bytes(cache.backbone.head_dim, 4) + form.values.unit_bytes(cache.backbone.head_dim, 4)
    per_token = len(cache.backbone.layers) * cache.backbone.num_kv_heads * 6 * (unit + places)
    assert recalled % per_token == 0
    assert recalled // per_token in (2, 3)


@pytest.mark.parametrize("tokens", [20, 90])
@pytest.mark.parametrize("bits", [{"value_bits": 16}, {"key_bits": 3, "host_budget": 19, "rounding": "token"}])
@pytest.mark.parametrize("positions", ["compact", "original"])
def test_a_disk_holds_codes_as_planned_and_changes_no_answer(
    bits: dict[str, Any], tokens: int, positions: str, tmp_path: Path
) -> None:
    model, answers = build("llama"), []
    for disk in (tmp_path / "scratch", None):
        cache = of_second_tier(model, tokens, disk=disk, positions=positions, **bits)
        for more in (None, prompt(31, seed=2)):
            if more is not None:
                prefill(model, more, cache, new_tokens=5)
            memory = cache.memory()
            assert (memory.disk, memory.host) == (memory.disk_planned, memory.host_planned)
            assert (memory.host if disk else memory.disk) == 0
            assert memory.host + memory.disk > 0 or (more is None and tokens == 20)
            options = {"output_logits": True, "return_dict_in_generate": True, **GREEDY}
            out: Any = generate(model, cache=cache, max_new_tokens=5, **options)
            answers.append(torch.stack(out.logits))
    assert torch.equal(answers[0], answers[2])
    assert torch.equal(answers[1], answers[3])
