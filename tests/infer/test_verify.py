"""`locret-verify`: every planted fault is found by a check that says what is wrong, and by no check beside it; where
nothing is planted no family and no policy raises an alarm; and the command's own manners.
"""

from __future__ import annotations

import json
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
import locret.policy.selectors
from locret import RetainingHeads, RetentionCache, RetentionPolicy
from locret.backbone.chunk import Projections
from locret.cache.limits import Limits
from locret.cache.store import DenseStore
from locret.infer.verify import command, verify
from locret.infer.verify.checks import CHECKS
from locret.lookups.exact import ExactLookup
from locret.policy import planned_bytes as budgets
from locret.policy.selectors import Stay
from locret.scorers import RetainingHeadScorer

sys.path.append(str(Path(__file__).parents[1] / "core"))

from families import FAMILIES, build
from registry import random_model, tiny_config

POLICY = RetentionPolicy(budget=24, chunk_size=12, stabilizers=6, local_len=4)
TIERS = POLICY.changed(host_budget=32, recall=4)
EVERYTHING = {"full-budget", "batch", "eviction", "prefix", "training-scores"}
"""Checks that compare what is computed, all of which a fault in computing may show in."""
GUARDS = {"budget", "bytes"}
"""Checks that run beside those which a fault is for, and must not cry too."""
BIAS = 0.5
TINY = ["--model", "checkpoints/tiny", "--heads", "checkpoints/tiny-heads"]


@dataclass(frozen=True)
class Fault:
    """A fault, the checks that must find it, and those that may."""

    home: Any
    name: str
    change: Callable[..., Any]
    """Stands for that function of the engine, which is its first argument, or takes (`after`) what that returned."""
    found_by: set[str]
    perhaps: frozenset[str] | set[str] = frozenset()
    after: bool = False
    family: str = "llama"
    policy: RetentionPolicy = POLICY

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        own = getattr(self.home, self.name)

        def other(*args: Any, **kwargs: Any) -> Any:
            return self.change(own(*args, **kwargs) if self.after else partial(own, **kwargs), *args)

        patch.setattr(self.home, self.name, other)


def padding_shifted(found: tuple[Tensor, Tensor], cache: RetentionCache, *_: Any) -> tuple[Tensor, Tensor]:
    original, rotary = found
    return original, rotary + (0 if cache.pad is None else (cache.pad > 0).long()[:, None])


def growing_memory(own: Any, store: Any, *more: Any) -> None:
    own(store, *more)
    store.reserve(store.capacity + 8)


ATTEND = locret.backbone.attention, "_attend"
FAULTS = {
    "sinks and stabilizers dropped": Fault(
        *(locret.policy.selectors, "pinned_units", lambda found, *_: torch.zeros_like(found)), {"budget"}, after=True
    ),
    "rotation off by one": Fault(
        *(DenseStore, "turn_keys", lambda own, to, base, *more: own(to, base + 1, *more)), {"eviction"}, EVERYTHING
    ),
    "budget ignored": Fault(
        *(Limits, "after_chunk", lambda stay, *_: Stay(10**6, stay.recent, stay.sinks)), *({"budget"}, {"bytes"}, True)
    ),
    "padding rows shifted": Fault(RetentionCache, "number", padding_shifted, {"batch"}, after=True),
    "planned bytes lie": Fault(budgets, "unit_bytes", lambda found, *_: found - 8, {"bytes"}, after=True),
    "memory grows": Fault(DenseStore, "keep", growing_memory, {"bytes"}),
    "query groups swapped": Fault(
        *(*ATTEND, lambda own, query, *more: own(query.roll(1, 1), *more).roll(-1, 1)),
        *({"full-budget", "eviction"}, EVERYTHING),
    ),
    "scores of another arithmetic": Fault(
        *(RetainingHeadScorer, "score_features", lambda own, scorer, heads, nth, x: own(scorer, heads, nth, x / 2)),
        {"training-scores"},
    ),
    "an interrupted read not refused": Fault(RetentionCache, "check_whole", lambda *_: None, {"save"}),
    "the worst units recalled": Fault(
        *(ExactLookup, "choose", lambda own, lookup, ask: own(lookup, replace(ask, query=-ask.query))),
        {"second-tier"},
        policy=TIERS,
    ),
    "heads' features without the keys' bias": Fault(
        *(Projections, "feature_parts", lambda found, *_: [found[0], found[1] - BIAS, found[2]]),
        {"training-scores"},
        after=True,
        family="qwen2",
    ),
    "values of another head in a file": Fault(
        DenseStore, "state", lambda found, *_: {**found, "values": found["values"].roll(1, 1)}, {"save"}, after=True
    ),
    "a prefix rotated wrongly": Fault(
        locret.cache.export, "turned_back", lambda own, keys, rotary, now: own(keys, rotary, now + 1), {"prefix"}
    ),
    "noise in every pass": Fault(
        *ATTEND, lambda found, *_: found + 1e-7 * torch.randn_like(found), {"determinism"}, {"save"}, after=True
    ),
}


def report_of(policy: RetentionPolicy, only: Collection[str] = (), family: str = "llama") -> Any:
    model = build(family)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # which are made as zeros
            torch.nn.init.constant_(parameter, BIAS)
    return verify(model, RetainingHeads.for_model(model, hidden_dim=12, seed=0), policy, tokens=88, only=only)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    fault.plant(monkeypatch)
    report = report_of(fault.policy, fault.found_by | GUARDS, fault.family)
    found = {row.check for row in report.failures}
    assert fault.found_by <= found <= fault.found_by | set(fault.perhaps), report.table()
    assert all(row.means for row in report.failures)
    compared = {row.check for row in report.failures if row.measured is not None}
    assert compared >= fault.found_by, "by a comparison, not by breaking"


@pytest.mark.parametrize("where", ["hidden states", "logits"])
def test_numbers_that_are_not_finite_are_said_before_anything_is_compared(where: str) -> None:
    model = build("llama")
    module = model.lm_head if where == "logits" else model.model.norm
    module.register_forward_hook(lambda _module, _args, out: out.index_fill(-1, torch.tensor(3), torch.inf))
    report = verify(model, "snapkv", POLICY, tokens=88, only=("bytes", "determinism"))
    (row,) = report.rows
    assert (row.check, row.measured) == ("backbone", f"NaN or infinite {where} in float32")
    assert "--dtype float32 or bfloat16" in row.means


# Two rotations; learned sinks; layers that do not rotate; latent attention; layers of different shapes.
KINDS = ((1, "phi3-longrope"), (4, "gpt-oss"), (6, "cohere2"), (7, "deepseek_v3"), (8, "gemma4_text"))


@pytest.mark.parametrize(("number", "family"), KINDS)
def test_no_family_raises_a_false_alarm(number: int, family: str) -> None:
    model = build(family, seed=number) if family in FAMILIES else random_model(tiny_config(family), seed=number)
    model = model.to(torch.bfloat16 if number % 2 else torch.float32)
    heads = RetainingHeads.for_model(model, hidden_dim=12, seed=number)
    report = verify(model, heads, tokens=96, seed=number)
    assert report.ok, report.table()
    assert {row.check for row in report.rows} == set(CHECKS)


POLICIES: tuple[dict[str, Any], ...] = (
    {"head_budgets": "adaptive"},
    {"host_budget": "all", "recall": 4, "key_bits": 8, "value_bits": 4},
    {"when": "prompt_end", "diversity": 0.2},
    {"positions": "original", "decode_budget": 40, "decode_interval": 4},
)


@pytest.mark.parametrize("changes", POLICIES, ids=str)
def test_no_policy_raises_a_false_alarm(changes: dict[str, Any]) -> None:
    report = report_of(POLICY.changed(**changes), family="qwen2")
    assert report.ok, report.table()


def test_the_embedded_pair_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.command([*TINY, "--tokens", "256", "--quiet", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["ok"]
    assert {row["check"] for row in shown["rows"]} == set(CHECKS)
    assert {"scorer", "policy", "tokens", "seed", "dtype", "device", "versions", "model", "options"} < set(shown)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--tokens", "10"], "--tokens 10 leaves nothing to cut into chunks"),
        (["--output", "record"], 'locret-verify "--output" was retired'),
        (["--only", "bytess"], '--only "bytess" is unknown; did you mean bytes'),
        (["--budget", "1000", "--tokens", "512"], "--tokens 512 is too short to evict anything with --budget 1000"),
    ],
    ids=str,
)
def test_what_cannot_be_verified_is_refused(line: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        command.command([*TINY, "--quiet", *line])


def test_checks_are_listed_and_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.command(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(CHECKS)
    assert command.command([*TINY, "--quiet", "--dry-run", "--only", "bytes"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["checks"], plan["tokens"], plan["policy"]["budget"]) == (["bytes"], 1024, 256)
    assert plan["planned_cache_bytes"] == 2224128
