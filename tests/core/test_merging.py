"""Evicted units folded into kept ones: what is added to what, and that nothing else about a cache changes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build, prompt
from test_scorers import CAUSAL, GREEDY, NUMBERS, make, padded
from torch import Tensor

from locret import RetentionCache, RetentionPolicy, generate, load_cache, mergers, prefill, reference, save_cache
from locret.backbone.adapters import find_decoder
from locret.backbone.attention import View
from locret.backbone.rotary import Rotary, rotate
from locret.cache.layers import STORES
from locret.cache.merging import Folding
from locret.cache.store import POSITIONS, SCORES, DenseStore, Store, Workspace
from locret.mergers import base
from locret.mergers.base import Units, take
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


@pytest.mark.parametrize(("name", "threshold"), [("d2o", None), ("kvmerger", 0.1), ("d2o", 0.2), ("kvmerger", -1.0)])
@pytest.mark.parametrize(("held", "kept"), [(63, 5), (7, 3), (2, 1), (40, 39), (33, 1)])
def test_what_is_added_is_what_the_reference_adds(
    monkeypatch: pytest.MonkeyPatch, name: str, threshold: float | None, held: int, kept: int
) -> None:
    units = units_of(held, kept)
    merger = mergers.get(name if threshold is None else f"{name}:threshold={threshold}")
    merged = merger.fold(units, None)
    if threshold in (None, -1.0):
        assert not torch.allclose(merged.values, take(units.values, units.kept))
    for row in range(ROWS):
        for head in range(HEADS):
            stays, goes = units.kept[row, head].tolist(), units.gone[row, head].tolist()
            slow = {"d2o": reference.d2o, "kvmerger": reference.kvmerger}[name]
            keys, values = slow(units.keys[row, head], units.values[row, head], stays, goes, threshold)
            torch.testing.assert_close(merged.keys[row, head], keys, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(merged.values[row, head], values, rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(base, "BLOCK_NUMBERS", 3 * kept * ROWS * HEADS)  # three units at a time
    again = merger.fold(units, None)
    torch.testing.assert_close(again.keys, merged.keys, rtol=1e-5, atol=1e-5)
    assert torch.equal(merged.positions, take(units.positions, units.kept))


@pytest.mark.parametrize("spec", ["d2o", "kvmerger:threshold=-1"])
def test_empty_slots_are_left_out(spec: str) -> None:
    units, merger = units_of(20, 6, empty=5), mergers.get(spec)
    whole = merger.fold(units, None)
    without = Units(
        **{
            **vars(units),
            "gone": units.gone[..., 5:],  # the empty slots have the worst scores and lie first
        }
    )
    torch.testing.assert_close(whole.values, merger.fold(without, None).values)


def test_weights_sum_to_one() -> None:
    units = units_of(23, 6)
    basis = torch.eye(23).expand(ROWS, HEADS, 23, 23)
    for spec in ("d2o", "kvmerger:threshold=0"):
        merged = mergers.get(spec).fold(Units(**{**vars(units), "values": basis}), None)
        torch.testing.assert_close(merged.values.sum(-1), torch.ones(ROWS, HEADS, 6))
        assert (merged.values >= 0).all()
        assert (merged.values > 0).sum() > ROWS * HEADS * 6, f"{spec} has merged nothing"


# -- in a store -------------------------------------------------------------------------------------------------------


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
    stay, folding = Stay(7, 2, 1), Folding(mergers.D2OMerger(), None, 0)

    def kept_after(store: Store, by_text: bool) -> Store:
        kept = SELECTORS[kind].select(store, stay)
        folding.fold(store, kept, stay, by_text=by_text)
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


def test_heads_with_as_many_units_merge_alike_in_both_stores() -> None:
    rotary, found = Rotary(find_decoder(build("llama"))), []
    for kind in STORES:
        store, stay = filled(kind, rotary), Stay(7, 2, 1)
        kept = SELECTORS[kind].select(store, stay)
        Folding(mergers.D2OMerger(), None, 0).fold(store, kept, stay, by_text=False)
        store.keep(kept, turned=False)
        assert torch.equal(store.held("visits").long(), store.held(POSITIONS).long())
        found.append(units_held(store))
    for one, other in zip(*found, strict=True):
        for mine, theirs in zip(one, other, strict=True):
            torch.testing.assert_close(mine, theirs)


# -- in a cache -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"head_budgets": "adaptive"}, {"positions": "original"}])
@pytest.mark.parametrize("name", CAUSAL)
def test_merging_works_with_every_causal_scorer_in_the_same_bytes(name: str, changes: dict[str, Any]) -> None:
    model, ids = build("llama"), prompt(60)
    memory, logits = [], []
    for merge in ("none", "kvmerger:threshold=0"):
        policy = RetentionPolicy(**{**NUMBERS, **changes, "merge": merge})
        cache = RetentionCache(model, make(name, model), policy)
        logits.append(prefill(model, ids, cache))
        assert cache.memory().planned == cache.memory().actual
        memory.append(cache.memory())
        positions = cache.kept_positions(0)
        assert all((head[head >= 0].diff() > 0).all() for row in positions for head in row)
    assert memory[0] == memory[1]
    assert not torch.allclose(*logits)


class Showing(DenseStore):
    """Shows copies of what it holds."""

    name = "showing"

    def view(self, base: int) -> View:
        shown = super().view(base)
        return View(shown.keys.clone(), shown.values.clone(), shown.row_start)


@pytest.mark.parametrize("changes", [{"merge": "d2o"}, {"refit": True}])
def test_a_store_that_shows_copies_is_refused(changes: dict[str, Any]) -> None:
    model, policy = build("llama"), RetentionPolicy(**NUMBERS, **changes)
    cache = RetentionCache(model, "random", policy, store=Showing)
    with pytest.raises(ValueError, match="^store showing shows copies of its units"):
        prefill(model, prompt(60), cache)
    with pytest.raises(ValueError, match="interrupted"):
        generate(model, cache=cache, max_new_tokens=1)


@pytest.mark.parametrize("merge", ["none", "d2o", "kvmerger"])
def test_a_budget_of_the_whole_prompt_leaves_nothing_to_merge(merge: str) -> None:
    model, ids = build("llama"), prompt(40)
    cache = RetentionCache(model, "random", RetentionPolicy(budget=64, chunk_size=9, local_len=4, merge=merge))
    full = model(ids).logits[:, -1]
    torch.testing.assert_close(prefill(model, ids, cache), full, rtol=1e-3, atol=1e-4)


def test_what_stays_is_chosen_by_scores_alone() -> None:
    model, ids = build("llama"), prompt(60)
    kept = []
    for merge in ("none", "d2o"):
        cache = RetentionCache(model, "random", RetentionPolicy(**NUMBERS, merge=merge))
        prefill(model, ids, cache)
        kept.append(cache.kept_positions(1))
    assert torch.equal(*kept)


@pytest.mark.parametrize("changes", [{}, {"decode_budget": 32, "decode_interval": 4}, {"head_budgets": "adaptive"}])
def test_rows_copies_beams_and_files_keep_what_was_merged(tmp_path: Path, changes: dict[str, Any]) -> None:
    model, policy = build("llama"), RetentionPolicy(**NUMBERS, merge="d2o", **changes)
    rows = [prompt(60, seed=1), prompt(47, seed=2)]
    ids, mask = padded(rows)
    cache = RetentionCache(model, "random", policy)
    both = generate(model, ids, attention_mask=mask, cache=cache, max_new_tokens=12, **GREEDY)[:, -12:]
    for row, alone in zip(both, rows, strict=True):
        single = RetentionCache(model, "random", policy)
        assert torch.equal(generate(model, alone, cache=single, max_new_tokens=12, **GREEDY)[0, -12:], row)
    cache = RetentionCache(model, "random", policy)
    prefill(model, rows[0], cache)
    save_cache(cache, tmp_path / "book.ctx")
    loaded = load_cache(tmp_path / "book.ctx", model, "random")
    assert loaded.policy.merge == "d2o"
    answers = [generate(model, cache=one, max_new_tokens=12, **GREEDY) for one in (cache.copy(), loaded, cache)]
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])
    beams = RetentionCache(model, "random", policy)
    prefill(model, rows[0], beams)
    assert generate(model, cache=beams, max_new_tokens=6, num_beams=2, **GREEDY).shape[0] == 1


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("d3o", 'merge "d3o" is unknown; did you mean d2o?'),
        ("d2o:treshold=0.5", 'merge d2o: it has no option "treshold"; did you mean threshold?'),
        ("d2o:threshold=2", "merge d2o: threshold=2 is not a cosine; give -1 to 1, such as 0.5, or leave it out"),
        ("d2o:threshold=high", "merge d2o: threshold='high' is not"),
        ("d2o+compact", 'merge "d2o+compact": +compact is for the whole method'),
        ("", 'merge "" is not NAME'),
    ],
)
def test_a_spec_that_says_nothing_is_refused_before_reading(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        RetentionCache(build("llama"), "random", RetentionPolicy(**NUMBERS, merge=spec))


@pytest.mark.parametrize("changes", [{"merge": "d2o"}, {"refit": True}])
def test_what_a_second_tier_keeps_is_not_made_up_for(changes: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match="^(merge=d2o|refit=True) makes up for units that are lost, but host_budget=64 keeps"
    ):
        RetentionPolicy(**NUMBERS, **changes, host_budget=64, recall=4)
    with pytest.raises(
        ValueError, match='^refit=True fits values to keys that are kept as they were, but merge="d2o" changes'
    ):
        RetentionPolicy(**NUMBERS, merge="d2o", refit=True)
