"""A store of somebody else's holds the units of a cache; what is none is refused in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import build, prompt
from scorer_passes import GREEDY, policy

from locret import RetentionCache, generate, prefill
from locret.cache.store import DenseStore, Store

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


def test_a_class_will_do() -> None:
    class Mine(DenseStore):
        name = "mine"

    cache = RetentionCache(build("llama"), "tova", policy(), store=Mine)
    prefill(cache.model, prompt(40), cache)
    assert isinstance(cache.governed[0].store, Mine)


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
