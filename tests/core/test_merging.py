"""Evicted units folded into kept ones: what is added to what, and that nothing else about a cache changes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from families import build, merger, prompt
from test_scorers import CAUSAL, NUMBERS, make
from torch import Tensor

from locret import RetentionCache, RetentionPolicy, prefill
from locret.backbone.adapters import find_decoder
from locret.backbone.rotary import Rotary, rotate
from locret.cache.layers import STORES
from locret.cache.merging import Folding
from locret.cache.store import POSITIONS, SCORES, Store, Workspace
from locret.mergers.base import Units
from locret.mergers.kernels import MergingKernel
from locret.mergers.loco import LoCoMerger
from locret.policy.selectors import OverHeads, PerHead, Stay

ROWS, HEADS, DIM = 2, 2, 8
SELECTORS: dict[str, Any] = {"dense": PerHead(), "ragged": OverHeads(floor=1.0, relative=False)}


def units_of(held: int, kept: int, empty: int = 0, seed: int = 0) -> Units:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(ROWS, HEADS, held, DIM, generator=generator) for _ in range(2))
    scores = torch.randn(ROWS, HEADS, held, generator=generator)
    positions = torch.arange(held).expand(ROWS, HEADS, held) - empty
    scores[..., :empty] = -torch.inf
    chosen = scores.topk(kept).indices.sort().values
    stays = torch.zeros(ROWS, HEADS, held).scatter_(2, chosen, 1)
    gone = stays.argsort(dim=-1, stable=True)[..., : held - kept]
    return Units(
        layer_idx=0,
        keys=keys,
        values=values,
        scores=scores,
        positions=positions.clamp_min(-1),
        pinned=torch.zeros(ROWS, HEADS, held, dtype=torch.bool),
        kept=chosen,
        gone=gone,
        free=kept,
    )


# -- in a store -------------------------------------------------------------------------------------------------------


def folding() -> Folding:
    kernel = MergingKernel(2, DIM, 5, torch.Generator().manual_seed(1)).requires_grad_(False)
    return Folding(LoCoMerger(kernels="of the layer"), {0: kernel}, 0)


def filled(kind: str, rotary: Rotary, held: int = 21) -> Store:
    store = STORES[kind](rotary, Workspace(), {"visits": torch.int16})
    generator = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(ROWS, HEADS, held, DIM, generator=generator) for _ in range(2))
    positions = torch.arange(0, 2 * held, 2, dtype=torch.int32)[None, None]
    store.append(keys, values, positions)
    store.write(SCORES, torch.randn(ROWS, HEADS, held, generator=generator))
    store.write("visits", positions.expand(ROWS, HEADS, held))
    return store


def units_held(store: Store) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return keys, values and positions of every row and head."""
    view, found = store.view(0), []
    for row in range(ROWS):
        for head in range(HEADS):
            span = slice(None) if view.segments is None else view.segments[row][head]
            kv = head if view.segments is None else 0
            positions = store.held(POSITIONS)[row, head]
            found.append((view.keys[row, kv, span], view.values[row, kv, span], positions[positions >= 0]))
    return found


@pytest.mark.parametrize("kind", list(STORES))
def test_keys_are_merged_before_rotation_however_they_are_held(kind: str) -> None:
    rotary = Rotary(find_decoder(build("llama")))
    stay = Stay(7, 2, 1)

    def kept_after(store: Store, by_text: bool) -> Store:
        kept = SELECTORS[kind].select(store, stay)
        folding().fold(store, kept, stay, by_text=by_text)
        store.keep(kept, turned=False)
        return store

    plain = kept_after(filled(kind, rotary), by_text=False)
    rotated = filled(kind, rotary)
    for part in rotated.parts(rotated.view(0), 0, newest_only=False):
        part.keys.copy_(rotate(part.keys, *rotary.at(part.columns[POSITIONS], part.keys)))
    rotated = kept_after(rotated, by_text=True)
    before = {
        int(p): v
        for _, values, positions in units_held(filled(kind, rotary))[:1]
        for p, v in zip(positions, values, strict=True)
    }
    _, values, positions = units_held(plain)[0]
    assert any(not torch.equal(before[int(p)], v) for p, v in zip(positions, values, strict=True))
    for (keys, values, positions), theirs in zip(units_held(plain), units_held(rotated), strict=True):
        torch.testing.assert_close(theirs[0], rotate(keys, *rotary.at(positions, keys)), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(theirs[1], values, rtol=1e-4, atol=1e-5)
        assert torch.equal(theirs[2], positions)


# -- in a cache -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"head_budgets": "adaptive"}, {"positions": "original"}])
@pytest.mark.parametrize("name", CAUSAL)
def test_merging_works_with_every_causal_scorer_in_the_same_bytes(name: str, changes: dict[str, Any]) -> None:
    model, ids = build("llama"), prompt(60)
    memory, logits = [], []
    for merge in ("none", merger("llama")):
        policy = RetentionPolicy(**{**NUMBERS, **changes, "merge": merge})
        cache = RetentionCache(model, make(name, model), policy)
        logits.append(prefill(model, ids, cache))
        assert cache.memory().planned == cache.memory().actual
        memory.append(cache.memory())
        positions = cache.kept_positions(0)
        assert all((head[head >= 0].diff() > 0).all() for row in positions for head in row)
    assert memory[0] == memory[1]
    assert not torch.allclose(*logits)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("lococo", 'merge "lococo" is unknown; did you mean loco?'),
        ("d2o:threshold=0.5", 'merge "d2o" was retired; release 0.1.0'),
        ("loco:kernel=a", 'merge loco: it has no option "kernel"; did you mean kernels?'),
        ("loco+compact", 'merge "loco+compact": +compact is for the whole method'),
        ("", 'merge "" is not NAME'),
    ],
)
def test_a_spec_that_says_nothing_is_refused_before_reading(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        RetentionCache(build("llama"), "random", RetentionPolicy(**NUMBERS, merge=spec))
