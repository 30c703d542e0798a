"""A contract that every store keeps, by itself and in a cache; and stores of somebody else's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from families import build, prompt
from scorer_passes import GREEDY, policy
from torch import Tensor

from locret import RetentionCache, RetentionPolicy, generate, load_cache, prefill, save_cache
from locret.backbone.adapters import find_decoder
from locret.backbone.rotary import Rotary
from locret.cache.layers import STORES
from locret.cache.store import POSITIONS, SCORES, DenseStore, Store, Workspace
from locret.policy.budget import cache_bytes, unit_bytes
from locret.policy.selectors import KeptOverHeads, KeptPerHead, OverHeads, PerHead, Stay
from locret.scorers import Chunk, Rated, Scorer

ROWS, HEADS, DIM = 2, 2, 8
SELECTORS: dict[str, Any] = {"dense": PerHead(), "ragged": OverHeads(floor=0.0, relative=False)}
POLICIES: dict[str, dict[str, Any]] = {"dense": {}, "ragged": {"head_budgets": "adaptive"}}
every_store = pytest.mark.parametrize("kind", STORES)


class Filled:
    """A store of a tiny backbone, with what went into it."""

    def __init__(self, kind: str, tokens: int = 0, rows: int = ROWS) -> None:
        self.rotary = Rotary(find_decoder(build("llama")))
        self.store: Store = STORES[kind](self.rotary, Workspace(), {"visits": torch.int16})
        self.keys, self.values = torch.empty(rows, HEADS, 0, DIM), torch.empty(rows, HEADS, 0, DIM)
        if tokens:
            self.append(tokens)

    def append(self, tokens: int, rotated: Tensor | None = None) -> None:
        generator = torch.Generator().manual_seed(self.keys.shape[2])
        first, rows = self.keys.shape[2], len(self.keys)
        keys, values, scores = (torch.randn(rows, HEADS, tokens, DIM, generator=generator) for _ in range(3))
        positions = torch.arange(first, first + tokens, dtype=torch.int32)[None, None]
        self.store.append(keys, values, positions, rotated)
        self.store.write(SCORES, scores[..., 0])
        self.store.write("visits", positions.expand(rows, HEADS, tokens) * 3)
        self.keys, self.values = torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)

    def units(self) -> dict[tuple[int, int, int], tuple[Tensor, Tensor, int]]:
        """Return key, value and visits of every unit held, by row, head and position, as a view shows them."""
        view, found = self.store.view(0), {}
        held, visits = self.store.held(POSITIONS), self.store.held("visits")
        for row in range(len(held)):
            for head in range(HEADS):
                own = held[row, head] >= 0
                span = slice(int((~own).sum()), None) if view.segments is None else view.segments[row][head]
                kv = head if view.segments is None else 0
                keys, values = view.keys[row, kv, span], view.values[row, kv, span]
                assert len(keys) == int(own.sum())
                for index, position in enumerate(held[row, head][own].tolist()):
                    seen = int(visits[row, head][own][index])
                    found[row, head, position] = (keys[index].clone(), values[index].clone(), seen)
        return found

    def check(self, left_out: int = 0) -> None:
        """Check that every unit has its own key, value and columns."""
        for (row, head, position), (key, value, visits) in self.units().items():
            assert torch.equal(key, self.keys[row, head, position])
            assert torch.equal(value, self.values[row, head, position])
            assert visits == 3 * position
        for row in range(len(self.keys)):
            held = self.store.held(POSITIONS)[row]
            assert all((h[h >= 0].diff() > 0).all() for h in held)

    def evict(self, kind: str, budget: int, turned: bool = False) -> Any:
        kept = SELECTORS[kind].select(self.store, Stay(budget, 2, 1))
        self.store.keep(kept, turned)
        return kept


# -- a store by itself ------------------------------------------------------------------------------------------------


@every_store
def test_keep_says_what_stays_and_what_goes_and_keeps_it(kind: str) -> None:
    filled = Filled(kind, 40)
    before = filled.units()
    scores = {key: float(filled.store.held(SCORES)[key]) for key in before}
    kept = filled.evict(kind, 11)
    after = filled.units()
    filled.check()
    assert filled.store.fill == 11
    if isinstance(kept, KeptPerHead):
        stays, goes = kept.units, kept.gone()
        assert stays.shape[-1] + goes.shape[-1] == 40
        assert torch.equal(torch.cat([stays, goes], -1).sort(-1).values, torch.arange(40).expand(ROWS, HEADS, 40))
    else:
        assert isinstance(kept, KeptOverHeads)
        for stays, goes in zip(kept.units, kept.gone(), strict=True):
            assert sorted([*stays.tolist(), *goes.tolist()]) == list(range(HEADS * 40))
    for row in range(ROWS):
        mine = [key for key in after if key[0] == row]
        assert len(mine) == HEADS * 11
        for head in range(HEADS):
            assert {(row, head, 0), (row, head, 38), (row, head, 39)} <= set(mine)  # a sink, and the newest two
        free = [key for key in mine if key[2] not in (0, 38, 39)]
        groups = [range(HEADS)] if kind == "ragged" else [[head] for head in range(HEADS)]
        for group in groups:
            lost = [scores[k] for k in before if k[0] == row and k[1] in group and k not in after]
            assert min(scores[k] for k in free if k[1] in group) >= max(lost)


@every_store
def test_rows_are_selected_repeated_and_joined(kind: str) -> None:
    filled = Filled(kind, 20)
    filled.evict(kind, 9)
    before = filled.units()
    filled.store.select_rows(torch.tensor([1, 0, 1]))
    for (row, head, position), unit in filled.units().items():
        source = before[[1, 0, 1][row], head, position]
        assert torch.equal(unit[0], source[0])
        assert unit[2] == source[2]
    single = [Filled(kind, 12, rows=1), Filled(kind, 5, rows=1)]
    joined = Filled(kind, rows=2)
    joined.store.join([one.store for one in single], room=3)
    assert joined.store.capacity == 15
    assert {unit for unit in joined.units() if unit[0] == 1} == {
        (1, head, p) for head in range(HEADS) for p in range(5)
    }
    for (row, head, position), unit in joined.units().items():
        assert torch.equal(unit[0], single[row].keys[0, head, position])
    joined.store.select_rows(torch.tensor([1]))
    joined.store.trim()
    assert joined.store.longest == 5
    assert set(joined.units()) == {(0, head, p) for head in range(HEADS) for p in range(5)}


@every_store
def test_bytes_are_the_planned_ones(kind: str) -> None:
    for slots in (1, 9, 64):
        filled = Filled(kind, rows=3)
        filled.store.reserve(slots)
        assert filled.store.nbytes == 0
        filled.append(1)
        assert filled.store.nbytes == 3 * HEADS * slots * unit_bytes(DIM, 4, 2)
        filled.store.reserve(slots + 5)
        filled.store.shrink(slots)
        assert filled.store.nbytes == 3 * HEADS * slots * unit_bytes(DIM, 4, 2)


# -- a store in a cache -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Visits(Scorer):
    """Counts the passes that a unit has been there for, and scores by it."""

    name: ClassVar[str] = "visits"
    causal: ClassVar[bool] = False
    by_head: ClassVar[bool] = True
    columns: ClassVar[dict[str, torch.dtype]] = {"visits": torch.int16}

    def score(self, chunk: Chunk) -> Rated:
        visits = chunk.columns["visits"] + 1
        return Rated(chunk.unit_positions.float() % 7 + visits / 1000, {"visits": visits})


@every_store
@pytest.mark.parametrize("positions", ["compact", "original"])
def test_columns_of_a_scorer_travel_with_their_units(kind: str, positions: str, tmp_path: Path) -> None:
    model = build("llama")
    policy = RetentionPolicy(
        budget=24, chunk_size=10, stabilizers=0, local_len=5, positions=positions, **POLICIES[kind]
    )
    cache = RetentionCache(model, Visits(), policy)
    passes: list[int] = []

    def watch(cache: RetentionCache) -> None:
        passes.append(cache.seen)
        held, visits = cache.kept_positions(1), cache.governed[1].store.held("visits")
        for position, count in zip(held[held >= 0].tolist(), visits[held >= 0].tolist(), strict=True):
            assert count == sum(1 for end in passes if position < end)

    prefill(model, prompt(95), cache, on_chunk=watch, new_tokens=4)
    assert len(passes) == 9
    memory = cache.memory()
    assert memory.actual == memory.planned
    slots = [layer.capacity for layer in cache.governed]
    assert memory.planned == cache_bytes(cache.backbone, slots, 4, column_bytes=2)
    save_cache(cache, tmp_path / "visits.safetensors")
    loaded = load_cache(tmp_path / "visits.safetensors", model, Visits())
    for one in (cache, loaded, cache.copy()):
        assert torch.equal(one.governed[0].store.held("visits"), cache.governed[0].store.held("visits"))
    answers = [generate(model, cache=one.copy(), max_new_tokens=6, do_sample=False) for one in (cache, loaded)]
    assert torch.equal(*answers)


FILE = """
from locret.cache.ragged import RaggedStore
from locret.cache.store import DenseStore, Store


class Counting(DenseStore):
    name = "counting"
    kept = 0

    def keep(self, kept, turned):
        Counting.kept += 1
        super().keep(kept, turned)


class Ragged(RaggedStore):
    name = "own_ragged"


class Unfinished(Store):
    name = "unfinished"


class Strange(DenseStore):
    holds = "gases"
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "stores.py").write_text(FILE)
    return str(tmp_path / "stores.py")


@pytest.mark.parametrize(("kind", "changes"), [("Counting", {}), ("Ragged", {"head_budgets": "adaptive"})])
def test_a_store_of_a_file_holds_what_ours_holds(file: str, kind: str, changes: dict[str, Any]) -> None:
    model, answers = build("llama"), []
    for store in (None, f"{file}:{kind}"):
        cache = RetentionCache(model, "snapkv:window=4", policy(**changes), store=store)
        answers.append(generate(model, prompt(61), cache=cache, max_new_tokens=8, **GREEDY))
    assert torch.equal(*answers)
    held = {type(layer.store).__name__ for one in (cache, cache.copy(), cache.fresh()) for layer in one.governed}
    assert held == {kind}
    if kind == "Counting":
        assert type(cache.governed[0].store).kept == 9  # type: ignore[attr-defined] # three layers, three chunks beyond the budget


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("Counting", None),
        ("Ragged", 'store own_ragged holds "ragged" units, but head_budgets="uniform" selects "dense" ones'),
        ("Unfinished", "does not define _allocate"),
        ("Strange", 'holds "gases" units; choose one of dense, ragged'),
        ("Contains", "has no Contains; did you mean"),
    ],
)
def test_what_cannot_hold_the_units_is_refused(file: str, kind: str, sentence: str | None) -> None:
    if sentence is None:
        RetentionCache(build("llama"), "tova", policy(), store=f"{file}:{kind}")
        return
    with pytest.raises(ValueError, match="store") as caught:
        RetentionCache(build("llama"), "tova", policy(), store=f"{file}:{kind}")
    assert sentence in str(caught.value)


@pytest.mark.parametrize("store", ["dens", "no.such.module:Store", dict, "json:JSONDecoder"])
def test_what_is_no_store_is_refused(store: Any) -> None:
    with pytest.raises(ValueError, match="did you mean dense|Python finds no module no|is no subclass of locret.cache"):
        RetentionCache(build("llama"), "tova", policy(), store=store)
    assert issubclass(DenseStore, Store)
