"""Every planted fault of the engine is found by a check that says what is wrong, and by no check beside it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import locret.backbone.attention
import locret.cache.export
import locret.cache.store
import locret.policy.selectors
from locret import RetainingHeads, RetentionCache, RetentionPolicy
from locret.backbone.chunk import Projections
from locret.cache.limits import Limits
from locret.cache.store import DenseStore
from locret.infer.verify import verify
from locret.lookups.exact import ExactLookup
from locret.policy import budget as budgets
from locret.policy.selectors import Stay
from locret.scorers import RetainingHeadScorer
from locret.token_ids import Stream

sys.path.append(str(Path(__file__).parents[1] / "core"))

from families import build

Patch = Callable[[pytest.MonkeyPatch], None]
POLICY = RetentionPolicy(budget=24, chunk_size=12, stabilizers=6, local_len=4)
EVERYTHING = {"full-budget", "batch", "eviction", "prefix", "training-scores"}
"""Checks that compare what is computed, all of which a fault in computing may show in."""
TIERS = POLICY.changed(host_budget=32, recall=4)
GUARDS = {"budget", "bytes"}
"""Checks that run beside those which a fault is for, and must not cry too."""


@dataclass(frozen=True)
class Fault:
    """A fault, the checks that must find it, and those that may."""

    plant: Patch
    found_by: set[str]
    perhaps: frozenset[str] | set[str] = frozenset()
    family: str = "llama"
    policy: RetentionPolicy = POLICY


def changed(
    patch: pytest.MonkeyPatch, home: Any, name: str, change: Callable[..., Any], *, after: bool = False
) -> None:
    """Let `change` stand for a function of the engine, or (`after`) for what that returns."""
    own = getattr(home, name)

    def other(*args: Any, **kwargs: Any) -> Any:
        if after:
            return change(own(*args, **kwargs), *args)
        return change(partial(own, **kwargs), *args)

    patch.setattr(home, name, other)


def no_pinned_units(patch: pytest.MonkeyPatch) -> None:
    changed(patch, locret.policy.selectors, "pinned_units", lambda found, *_: torch.zeros_like(found), after=True)


def rotation_off_by_one(patch: pytest.MonkeyPatch) -> None:
    changed(patch, DenseStore, "rotate", lambda own, store, base, *more: own(store, base + 1, *more))


def no_budget(patch: pytest.MonkeyPatch) -> None:
    changed(patch, Limits, "after_chunk", lambda stay, *_: Stay(10**6, stay.recent, stay.sinks), after=True)


def padding_shifted(patch: pytest.MonkeyPatch) -> None:
    def shifted(found: tuple[Tensor, Tensor], cache: RetentionCache, *_: Any) -> tuple[Tensor, Tensor]:
        original, rotary = found
        return original, rotary + (0 if cache.pad is None else (cache.pad > 0).long()[:, None])

    changed(patch, RetentionCache, "number", shifted, after=True)


def a_token_dropped(patch: pytest.MonkeyPatch) -> None:
    def take(own: Any, stream: Any, count: int) -> Tensor:
        found: Tensor = own(stream, count)
        return found[:, 1:] if 5 < count < 14 else found

    changed(patch, Stream, "take", take)


def lying_plan(patch: pytest.MonkeyPatch) -> None:
    changed(patch, budgets, "unit_bytes", lambda found, *_: found - 8, after=True)


def growing_memory(patch: pytest.MonkeyPatch) -> None:
    def keep(own: Any, store: Any, *more: Any) -> None:
        own(store, *more)
        store.reserve(store.capacity + 8)

    changed(patch, DenseStore, "keep", keep)


def values_of_another_head(patch: pytest.MonkeyPatch) -> None:
    changed(
        patch, DenseStore, "_write", lambda own, store, span, keys, values: own(store, span, keys, values.roll(1, 1))
    )


def groups_swapped(patch: pytest.MonkeyPatch) -> None:
    changed(
        patch, locret.backbone.attention, "_attend", lambda own, query, *more: own(query.roll(1, 1), *more).roll(-1, 1)
    )


def another_arithmetic(patch: pytest.MonkeyPatch) -> None:
    changed(
        patch,
        RetainingHeadScorer,
        "score_features",
        lambda own, scorer, heads, index, x: own(scorer, heads, index, x / 2),
    )


def noisy_attention(patch: pytest.MonkeyPatch) -> None:
    def noisy(found: Tensor, *_: Any) -> Tensor:
        return found + 1e-7 * torch.randn_like(found)

    changed(patch, locret.backbone.attention, "_attend", noisy, after=True)


def an_interrupted_read_taken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RetentionCache, "check_whole", lambda cache: None)


def the_worst_units_recalled(patch: pytest.MonkeyPatch) -> None:
    changed(patch, ExactLookup, "choose", lambda own, lookup, ask: own(lookup, replace(ask, query=-ask.query)))


def keys_without_their_bias(patch: pytest.MonkeyPatch) -> None:
    def parts(found: list[Tensor], projections: Any, *_: Any) -> list[Tensor]:
        query, key, value = found
        return [query, key - projections.module.k_proj.bias, value]

    changed(patch, Projections, "feature_parts", parts, after=True)


def values_lost_in_a_file(patch: pytest.MonkeyPatch) -> None:
    def state(found: dict[str, Tensor], *_: Any) -> dict[str, Tensor]:
        return {name: held.roll(1, 1) if name == "values" else held for name, held in found.items()}

    changed(patch, DenseStore, "state", state, after=True)


def a_wrong_export(patch: pytest.MonkeyPatch) -> None:
    changed(patch, locret.cache.export, "turned_back", lambda own, keys, rotary, now: own(keys, rotary, now + 1))


FAULTS = {
    "sinks and stabilizers dropped": Fault(no_pinned_units, {"budget"}),
    "rotation off by one": Fault(rotation_off_by_one, {"eviction"}, EVERYTHING),
    "budget ignored": Fault(no_budget, {"budget"}, {"bytes"}),
    "padding rows shifted": Fault(padding_shifted, {"batch"}),
    "a token dropped at a chunk's boundary": Fault(a_token_dropped, {"full-budget"}, EVERYTHING | GUARDS),
    "planned bytes lie": Fault(lying_plan, {"bytes"}),
    "memory grows": Fault(growing_memory, {"bytes"}),
    "values of another head": Fault(values_of_another_head, {"full-budget"}, EVERYTHING),
    "query groups swapped": Fault(groups_swapped, {"full-budget", "eviction"}, EVERYTHING),
    "scores of another arithmetic": Fault(another_arithmetic, {"training-scores"}),
    "an interrupted read not refused": Fault(an_interrupted_read_taken, {"save"}),
    "the worst units recalled": Fault(the_worst_units_recalled, {"second-tier"}, policy=TIERS),
    "heads' features without the keys' bias": Fault(keys_without_their_bias, {"training-scores"}, family="qwen2"),
    "values of another head in a file": Fault(values_lost_in_a_file, {"save"}),
    "a prefix rotated wrongly": Fault(a_wrong_export, {"prefix"}),
    "noise in every pass": Fault(noisy_attention, {"determinism"}),
}


def report_of(policy: RetentionPolicy, only: Collection[str] = (), family: str = "llama") -> Any:
    model = build(family)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # which are made as zeros
            torch.nn.init.normal_(parameter)
    return verify(model, RetainingHeads.for_model(model, hidden_dim=12, seed=0), policy, tokens=88, only=only)


def test_nothing_is_found_where_nothing_is_planted() -> None:
    report = report_of(POLICY, family="qwen2")
    assert report.ok, report.table()


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    fault.plant(monkeypatch)
    report = report_of(fault.policy, fault.found_by | GUARDS, fault.family)
    found = {row.check for row in report.failures}
    shown = [(row.check, row.compared, row.measured, row.tolerance, row.why) for row in report.failures]
    assert found >= fault.found_by, shown
    assert found <= fault.found_by | set(fault.perhaps), shown
    assert not report.ok
    assert all(row.means for row in report.failures)
    compared = {row.check for row in report.failures if row.measured is not None}
    assert compared >= fault.found_by, "by a comparison, not by breaking"


@pytest.mark.parametrize("where", ["hidden states", "logits"])
def test_numbers_that_are_not_finite_are_said_before_anything_is_compared(where: str) -> None:
    model = build("llama")
    module = model.lm_head if where == "logits" else model.model.norm
    module.register_forward_hook(lambda _module, _args, out: out.index_fill(-1, torch.tensor(3), torch.inf))
    report = verify(model, "snapkv", POLICY, tokens=88, only=("bytes", "determinism"))
    assert [(row.check, row.measured) for row in report.failures] == [
        ("backbone", f"NaN or infinite {where} in float32")
    ]
    assert len(report.rows) == 1
    assert "--dtype float32 or bfloat16" in str(report)
