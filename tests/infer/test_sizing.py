"""Budgets in bytes and shares, plans that depend on the length, and what `--dry-run` shows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from allocations import peak_bytes
from embedded import write_text
from transformers import AutoModelForCausalLM, LlamaConfig

from locret import RetainingHeads, RetentionCache, RetentionPolicy, loading, prefill
from locret.infer import sizing
from locret.loading.backbone import _cpu_multiplies_bfloat16

Infer = Callable[..., Any]
SMALL = ("--scorer", "random", "--chunk-size", 32, "--local-len", 8, "--max-new-tokens", 8)


@pytest.fixture
def call(infer: Infer, backbone: Path, text: Path) -> Infer:
    """Return a function that runs the command with a training-free scorer and small numbers."""

    def run(*more: object) -> Any:
        return infer("--model", backbone, "--prompt-file", text, *SMALL, *more)

    return run


@pytest.fixture
def ask(call: Infer) -> Infer:
    """Return a function that asks for JSON and returns the record."""

    def run(*more: object) -> Any:
        outcome = call("--json", *more)
        assert outcome.code == 0, outcome.err
        return json.loads(outcome.out)

    return run


def test_memory_is_filled_but_not_exceeded(ask: Infer) -> None:
    record = ask("--kv-memory", "64KiB")
    budget = record["policy"]["budget"]
    assert record["peak_cache_bytes"] == record["planned_cache_bytes"] <= 64 << 10
    assert record["policy"]["stabilizers"] == budget // 4, "the default protects 2500, which is more than there are"
    assert ask("--budget", budget + 1, "--stabilizers", 0, "--dry-run")["planned_cache_bytes"] > 64 << 10
    growing = ask("--kv-memory", "64KiB", "--memory", "sqrt", "--decremental")
    assert growing["policy"]["budget"] >= budget
    assert growing["peak_cache_bytes"] == growing["planned_cache_bytes"] <= 64 << 10
    plan = ask("--kv-memory", "64KiB", "--max-new-tokens", 60, "--dry-run")
    assert plan["policy"]["budget"] < budget - 8, "answers take of it"
    assert plan["planned_cache_bytes"] <= 64 << 10


def test_a_share_is_that_of_the_counted_prompt(ask: Infer) -> None:
    record = ask("--keep", 0.1)
    assert record["policy"]["budget"] == record["prompt_tokens"] // 10
    assert record["kept_units"] >= record["policy"]["budget"] + 8
    plan = ask("--keep", "10%", "--dry-run")
    assert (plan["prompt_tokens"], plan["policy"]) == (record["prompt_tokens"], record["policy"])


def test_dry_run_shows_what_nobody_gave_and_what_everything_would_take(ask: Infer, call: Infer) -> None:
    plan = ask("--prompt-file", "-", "--budget", 64, "--stabilizers", 8, "--dry-run")
    assert (plan["prompt_tokens"], plan["full_cache_bytes"]) == (None, None), "standard input is left alone"
    followed, record = call("--budget", 20, "--dry-run"), ask("--budget", 20)
    plan, tokens = json.loads(followed.out), record["prompt_tokens"]
    assert plan["not_given"] == ["stabilizers"]
    assert (plan["prompt_tokens"], plan["full_cache_bytes"]) == (tokens, record["full_cache_bytes"])
    follows, share = followed.err.splitlines()
    assert follows == "not given, so from a budget of 20: stabilizers 5"
    parts = f"{tokens:,} tokens: {28 / tokens:.0%} of their units stay, a budget of 20 and the 8 last tokens; "
    assert share.startswith(parts)
    wide = call("--budget", tokens, "--dry-run").err.splitlines()[-1]
    assert "all units stay, for the budget is not less" in wide
    everything = ask("--budget", tokens)
    assert record["full_cache_bytes"] < everything["peak_cache_bytes"] < 1.5 * record["full_cache_bytes"]


def test_dry_run_counts_the_prompt_where_the_plan_depends_on_it(ask: Infer, tmp_path: Path) -> None:
    file = write_text(tmp_path / "some.txt", 3000)
    options = ("--prompt-file", file, "--budget", 32, "--stabilizers", 8, "--memory", "linear", "--decremental")
    shrinking = (*options, "--min-chunk", 8)
    plan, record = ask(*shrinking, "--dry-run"), ask(*shrinking)
    assert plan["prompt_tokens"] == record["prompt_tokens"]
    assert plan["planned_cache_bytes"] == record["peak_cache_bytes"]
    pyramid = (*options[:-1], "--layer-budgets", "pyramid")
    assert ask(*pyramid, "--dry-run")["planned_cache_bytes"] == ask(*pyramid)["peak_cache_bytes"]


def test_memory_that_grows_with_the_prompt_is_announced(call: Infer) -> None:
    outcome = call("--budget", 64, "--when", "prompt_end", "--json")
    assert "warning: --when prompt_end keeps every unit until the prompt has been read, so memory" in outcome.err
    bounded, grown = json.loads(call("--budget", 64, "--json").out), json.loads(outcome.out)
    assert grown["kept_units"] == bounded["kept_units"]
    assert grown["peak_cache_bytes"] > 10 * bounded["peak_cache_bytes"]


def test_the_largest_budget_that_suits_the_free_memory_is_taken(
    ask: Infer, call: Infer, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = ask("--kv-memory", "auto")
    assert record["policy"]["budget"] >= record["kept_units"] - 8 > 1000
    run = sizing.PlannedRun
    monkeypatch.setattr(run, "bytes_beside_weights", lambda self, policy: policy.budget * policy.chunk_size)
    monkeypatch.setattr(run, "weight_bytes", property(lambda self: 1000))
    monkeypatch.setattr(sizing, "free_bytes", lambda device: int((1000 + 32 * 100) / sizing.SHARE) + 1)
    assert ask("--kv-memory", "auto", "--dry-run")["policy"]["budget"] == 100
    monkeypatch.setattr(sizing, "free_bytes", lambda device: 1000)
    assert "--kv-memory auto is too small" in call("--kv-memory", "auto", "--dry-run").err
    monkeypatch.setattr(sizing, "free_bytes", lambda device: None)
    assert "cannot tell what is free on cpu" in call("--kv-memory", "auto", "--dry-run").err


LARGE_HEAD = {"budget": 640, "head_budgets": "shares", "head_shares": (3.7, 0.1, 0.1, 0.1)}


@pytest.mark.parametrize(("inner", "hidden_dim", "more"), [(384, 16, {}), (40, 700, {}), (40, 16, LARGE_HEAD)])
def test_a_chunk_works_in_no_more_memory_than_counted_on(inner: int, hidden_dim: int, more: dict[str, Any]) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=96, intermediate_size=inner, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    heads = RetainingHeads.for_model(model, hidden_dim, seed=0)
    policy = RetentionPolicy(**{"budget": 64, "chunk_size": 512, "stabilizers": 8, "local_len": 8, **more})
    ids = torch.randint(3, 64, (1, 4000))
    caches: list[RetentionCache] = []

    def read() -> None:
        caches.append(RetentionCache(model, heads, policy))
        prefill(model, ids, caches[-1])

    read()  # once before, because copies of the heads' weights stay
    measured = peak_bytes(read) - caches[-1].memory().planned
    counted = sizing.working_bytes(config, heads, torch.float32, policy.chunk_size, policy)
    assert 0.4 * counted < measured <= counted


def test_free_memory_is_what_the_system_says_and_what_a_container_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=7 * 1024))
    monkeypatch.setattr(sizing, "_GROUP", tmp_path)
    (tmp_path / "memory.current").write_text("1000\n")
    for limit, free in (("max\n", 7 * 1024), ("5000\n", 4000)):
        (tmp_path / "memory.max").write_text(limit)
        assert sizing.free_bytes(torch.device("cpu")) == free


def test_auto_dtype_on_the_cpu_is_bfloat16_if_that_is_the_backbones_and_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, config = torch.device("cpu"), LlamaConfig(dtype="bfloat16")
    for fast, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr("locret.loading.backbone._cpu_multiplies_bfloat16", lambda fast=fast: fast)
        assert loading.resolve_dtype("auto", config, cpu) == expected
        assert loading.resolve_dtype("auto", LlamaConfig(dtype="float16"), cpu) == torch.float32
    assert loading.resolve_dtype("auto", config, torch.device("cuda")) == torch.bfloat16
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True, "avx512_bf16": False})
    assert _cpu_multiplies_bfloat16()
