"""`locret-verify`: no false alarm on any family, and the command's own manners."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from locret import RetainingHeads, RetentionPolicy
from locret.infer.verify import command, verify
from locret.infer.verify.checks import CHECKS

sys.path.append(str(Path(__file__).parents[1] / "core"))

from families import FAMILIES, build
from registry import random_model, tiny_config

KINDS = (
    *("llama-mqa", "phi3-longrope", "olmo3", "qwen3-moe", "gpt-oss"),
    # Neighbours as pairs; layers that do not rotate; latent attention; layers of different shapes.
    *("glm4", "cohere2", "deepseek_v3", "gemma4_text"),
)
TINY = ["--model", "checkpoints/tiny", "--heads", "checkpoints/tiny-heads"]


@pytest.mark.parametrize(("number", "family"), list(enumerate(KINDS)), ids=KINDS)
def test_no_family_raises_a_false_alarm(number: int, family: str) -> None:
    model = build(family, seed=number) if family in FAMILIES else random_model(tiny_config(family), seed=number)
    model = model.to(torch.bfloat16 if number % 2 else torch.float32)
    heads = RetainingHeads.for_model(model, hidden_dim=12, seed=number)
    report = verify(model, heads, tokens=96, seed=number)
    assert report.ok, report.table()
    assert {row.check for row in report.rows} == set(CHECKS)


@pytest.mark.parametrize(
    "changes",
    [
        {"head_budgets": "adaptive"},
        {"when": "prompt_end"},
        {"positions": "original"},
        {"key_bits": 8, "value_bits": 4},
        {"host_budget": "all", "recall": 4},
        {"decode_budget": 40, "decode_interval": 4},
    ],
    ids=str,
)
def test_no_policy_raises_a_false_alarm(changes: dict[str, Any]) -> None:
    model = build("qwen3")
    policy = RetentionPolicy(**{"budget": 24, "chunk_size": 12, "stabilizers": 6, "local_len": 4, **changes})
    report = verify(model, RetainingHeads.for_model(model, hidden_dim=12, seed=0), policy, tokens=88)
    assert report.ok, report.table()


def test_the_embedded_pair_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.command([*TINY, "--quick", "--quiet", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["ok"]
    assert list(shown["rows"][0]) == ["check", "status", "compared", "measured", "tolerance", "why", "means"]
    assert {row["check"] for row in shown["rows"]} == set(CHECKS)
    facts = ["backbone", "scorer", "policy", "tokens", "seed", "dtype", "device", "versions", "model", "options"]
    assert list(shown) == ["ok", "rows", *facts]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--tokens", "10"], "--tokens 10 leaves nothing to cut into chunks"),
        (["--only", "chunks"], '--only "chunks" was retired'),
        (["--output", "record"], 'locret-verify "--output" was retired'),
        (["--only", "bytess"], "--only bytess: there is no such check; did you mean bytes"),
        (["--budget", "1000", "--tokens", "512"], "--tokens 512 is too short to evict anything with --budget 1000"),
    ],
    ids=str,
)
def test_what_cannot_be_verified_is_refused(line: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        command.command([*TINY, "--quiet", *line])


def test_checks_are_listed_and_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.command(["--list", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == list(CHECKS)
    assert command.command([*TINY, "--quiet", "--dry-run", "--only", "bytes"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["checks"], plan["tokens"], plan["policy"]["budget"]) == (["bytes"], 1024, 256)
    assert plan["planned_cache_bytes"] == 2224128
