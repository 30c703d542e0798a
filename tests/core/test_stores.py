"""A contract that every store keeps, by itself and in a cache; stores of somebody else's; and two tiers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import build, prompt
from scorer_passes import GREEDY, policy
from torch import Tensor

from locret import RetentionCache, RetentionPolicy, generate, load_cache, prefill, save_cache
from locret.backbone.adapters import find_decoder
from locret.backbone.rotary import Rotary
from locret.cache.layers import STORES
from locret.cache.store import POSITIONS, SCORES, Store, Workspace
from locret.policy.selectors import KeptOverHeads, KeptPerHead, OverHeads, PerHead, Stay

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
        kept = SELECTORS[STORES[kind].holds].select(self.store, Stay(budget, 2, 1))
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


# -- stores of one's own ----------------------------------------------------------------------------------------------

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
    ("store", "sentence"),
    [
        ("FILE:Ragged", 'store own_ragged holds "ragged" units, but head_budgets="uniform" selects "dense" ones'),
        ("FILE:Unfinished", "does not define _resize"),
        ("FILE:Strange", 'holds "gases" units; choose one of dense, ragged'),
        ("FILE:Contains", "has no Contains; did you mean"),
        ("no.such.module:Store", "Python finds no module no"),
        (dict, "is no subclass of locret.cache.store.Store"),
    ],
)
def test_what_cannot_hold_the_units_is_refused(file: str, store: Any, sentence: str) -> None:
    given = store.replace("FILE", file) if isinstance(store, str) else store
    with pytest.raises(ValueError, match=sentence):
        RetentionCache(build("llama"), "tova", policy(), store=given)


NUMBERS = {"budget": 16, "chunk_size": 12, "stabilizers": 4, "local_len": 5, "host_budget": 19, "recall": 4}
EVERYTHING = {"when": "prompt_end", "host_budget": "all", "recall": 500}
UNIT = 2 * 8 * 4 + 8
"""Bytes of key, value, score and position."""
both_positions = pytest.mark.parametrize("positions", ["compact", "original"])
both_heads = pytest.mark.parametrize("heads", ["uniform", "adaptive"])


def new_cache(model: Any, **changes: Any) -> RetentionCache:
    return RetentionCache(model, "key_norm", RetentionPolicy(**{**NUMBERS, **changes}))


def read(model: Any, tokens: int = 71, **changes: Any) -> RetentionCache:
    cache = new_cache(model, **changes)
    prefill(model, prompt(tokens), cache)
    return cache


def answer(model: Any, cache: RetentionCache, ids: torch.Tensor | None = None, new: int = 9) -> torch.Tensor:
    options = {"output_logits": True, "return_dict_in_generate": True, **GREEDY}
    return torch.stack(generate(model, ids, cache=cache, max_new_tokens=new, **options).logits, dim=1)


@both_positions
@both_heads
@pytest.mark.parametrize("tokens", [47, 1])
def test_an_answer_that_evicts_loses_nothing_where_everything_is_recalled(
    model: Any, positions: str, heads: str, tokens: int
) -> None:
    ids, changes = prompt(tokens), {"positions": positions, "decode_budget": 22, "decode_interval": 5, **EVERYTHING}
    changes["head_budgets"] = heads
    cache = new_cache(model, **changes)
    theirs: Any = model.generate(ids, max_new_tokens=40, output_logits=True, return_dict_in_generate=True, **GREEDY)
    torch.testing.assert_close(answer(model, cache, ids, 40), torch.stack(theirs.logits, 1), atol=2e-4, rtol=0)
    assert cache.memory().units <= 22
    assert cache.memory().host_units >= tokens + 39 - 22


@pytest.mark.parametrize("tokens", [30, 71, 130, 300])
def test_a_tier_is_as_large_as_the_text_although_its_length_is_unknown(model: Any, tokens: int) -> None:
    known, streamed = read(model, tokens, host_budget=100), new_cache(model, host_budget=100)
    prefill(model, iter(prompt(tokens)[0].tolist()), streamed)
    assert streamed.memory().host_units == known.memory().host_units
    assert streamed.memory().host == known.memory().host <= 3 * 2 * min(100, tokens) * UNIT


def test_bytes_of_a_tier_and_of_what_is_recalled_are_what_one_counts_by_hand(model: Any) -> None:
    cache = read(model)
    memory = cache.memory()
    assert memory.host == 3 * 2 * 19 * UNIT
    answer(model, cache, new=5)
    # The last token of the prompt is fed again for its logits, and the fifth new one is never fed.
    assert cache.memory().moved - memory.moved == 5 * 3 * 2 * 4 * 8 * 8


@both_heads
def test_a_tier_that_an_answer_filled_is_no_larger_than_it_may_be_and_is_saved_in_order(
    model: Any, heads: str, tmp_path: Path
) -> None:
    cache = read(model, 20, decode_budget=22, decode_interval=1, head_budgets=heads)
    answer(model, cache, new=40)
    memory = cache.memory()
    assert memory.host == memory.host_planned == 3 * 2 * 19 * UNIT
    save_cache(cache, tmp_path / "a.ctx")
    again = load_cache(tmp_path / "a.ctx", model, "key_norm")
    prefill(model, prompt(9), cache), prefill(model, prompt(9), again)
    assert torch.equal(answer(model, again), answer(model, cache))
