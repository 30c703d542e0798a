"""`--chunk-size auto` takes what helps and fits; `--dtype auto` takes what the CPU does well."""

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
from transformers import AutoModelForCausalLM, LlamaConfig

from locret import RetainingHeads, RetentionCache, RetentionPolicy, loading, prefill
from locret.infer import chunk_size
from locret.loading.backbone import _cpu_multiplies_bfloat16

Infer = Callable[..., Any]


def policy_of(budget: int) -> Callable[[int], RetentionPolicy]:
    return lambda size: RetentionPolicy(budget=budget, stabilizers=0, chunk_size=size)


@pytest.mark.parametrize(
    ("budget", "size"), [(16384, 8192), (100_000, 8192), (6000, 2048), (1024, 512), (1023, 256), (100, 256)]
)
def test_the_chunk_is_at_most_half_the_budget_where_memory_abounds(budget: int, size: int) -> None:
    choice = chunk_size.choose(policy_of(budget), lambda _: 1, device="cpu", free=None)
    assert choice.chunk_size == size


@pytest.mark.parametrize(("free", "size"), [(10_000, 8192), (9103, 8192), (9102, 4096), (100, 64)])
def test_the_chunk_is_halved_until_a_run_fits_into_nine_tenths(free: int, size: int) -> None:
    choice = chunk_size.choose(policy_of(16384), lambda policy: policy.chunk_size, device="cpu", free=free)
    assert choice.to_dict() == {"chunk_size": size, "needed_bytes": size, "free_bytes": free}


def test_the_chunk_is_never_smaller_than_a_scorer_can_work_with() -> None:
    choice = chunk_size.choose(policy_of(16384), lambda policy: policy.chunk_size, device="cpu", free=200, least=100)
    assert choice.chunk_size == 128
    with pytest.raises(ValueError, match="with 100 tokens a run takes 100 bytes, but only 90 are free on cpu; lower"):
        chunk_size.choose(policy_of(16384), lambda policy: policy.chunk_size, device="cpu", free=90, least=100)


@pytest.mark.parametrize(("inner", "hidden_dim"), [(384, 16), (40, 16), (40, 700)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chunk_works_in_no_more_memory_than_counted_on(inner: int, hidden_dim: int, dtype: torch.dtype) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=96, intermediate_size=inner, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    heads = RetainingHeads.for_model(model, hidden_dim, seed=0)
    policy = RetentionPolicy(budget=64, chunk_size=512, stabilizers=8, local_len=8)
    ids = torch.randint(3, 64, (1, 2000))
    caches: list[RetentionCache] = []

    def read() -> None:
        caches.append(RetentionCache(model, heads, policy))
        prefill(model, ids, caches[-1])

    read()  # once before, because copies of the heads' weights stay
    measured = peak_bytes(read) - caches[-1].memory().planned
    counted = chunk_size.working_bytes(config, heads, dtype, policy.chunk_size)
    assert 0.4 * counted < measured <= counted


def test_free_memory_is_what_the_system_says_and_what_a_container_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=7 * 1024))
    monkeypatch.setattr(chunk_size, "_GROUP", tmp_path)
    assert chunk_size.free_bytes(torch.device("cpu")) == 7 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert chunk_size.free_bytes(torch.device("cpu")) == 7 * 1024
    (tmp_path / "memory.max").write_text("5000\n")
    assert chunk_size.free_bytes(torch.device("cpu")) == 4000


@pytest.mark.slow
def test_the_command_plans_and_reads_with_the_same_chunk(
    infer: Infer, backbone: Path, heads: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--model", backbone, "--heads", heads, "--prompt-file", text, "--max-new-tokens", 4, "--json")
    numbers = ("--budget", 600, "--stabilizers", 8, "--chunk-size", "auto")
    plan = json.loads(infer(*arguments, *numbers, "--dry-run").out)
    assert plan["policy"]["chunk_size"] == plan["chunk_choice"]["chunk_size"] == plan["steps"][0]["chunk"] == 256
    assert plan["planned_cache_bytes"] < plan["chunk_choice"]["needed_bytes"] < plan["chunk_choice"]["free_bytes"]
    record = json.loads(infer(*arguments, *numbers).out)
    assert record["policy"] == plan["policy"]
    assert record["peak_cache_bytes"] == plan["planned_cache_bytes"]
    needed = plan["chunk_choice"]["needed_bytes"]
    monkeypatch.setattr(chunk_size, "free_bytes", lambda _device: needed)
    tight = json.loads(infer(*arguments, *numbers, "--dry-run").out)
    assert tight["chunk_choice"]["chunk_size"] == 128
    monkeypatch.setattr(chunk_size, "free_bytes", lambda _device: 1000)
    refused = infer(*arguments, *numbers)
    assert (refused.code, refused.out) == (2, "")
    assert "--chunk-size auto finds no size that fits: with 64 tokens a run takes" in refused.err
    assert refused.err.count("\n") == 1


def test_memory_and_chunk_are_not_both_left_open(infer: Infer, backbone: Path, text: Path) -> None:
    arguments = ("--model", backbone, "--scorer", "random", "--prompt-file", text)
    refused = infer(*arguments, "--kv-memory", "1MiB", "--chunk-size", "auto")
    assert refused.code == 2
    assert "--kv-memory 1MiB holds the budget and the chunk" in refused.err
    assert infer(*arguments, "--chunk-size", "many").code == 2


@pytest.mark.parametrize("growth", [("--memory", "linear", "--decremental"), ("--when", "prompt_end")])
def test_a_chunk_is_chosen_for_plans_that_depend_on_the_prompt(
    infer: Infer, backbone: Path, text: Path, growth: tuple[str, ...]
) -> None:
    arguments = ("--model", backbone, "--scorer", "snapkv", "--prompt-file", text, "--budget-share", 0.2)
    outcome = infer(*arguments, "--chunk-size", "auto", "--dry-run", *growth)
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["policy"]["chunk_size"] >= 64


@pytest.mark.parametrize(
    ("own", "fast", "expected"),
    [
        ("bfloat16", True, torch.bfloat16),
        ("bfloat16", False, torch.float32),
        ("float16", True, torch.float32),
        ("float32", True, torch.float32),
    ],
)
def test_auto_dtype_on_the_cpu_is_bfloat16_where_that_is_the_backbones_and_fast(
    monkeypatch: pytest.MonkeyPatch, own: str, fast: bool, expected: torch.dtype
) -> None:
    monkeypatch.setattr("locret.loading.backbone._cpu_multiplies_bfloat16", lambda: fast)
    config = LlamaConfig(dtype=own)
    assert loading.resolve_dtype("auto", config, torch.device("cpu")) == expected
    assert loading.resolve_dtype("auto", config, torch.device("cuda")) == getattr(torch, own)
    assert loading.resolve_dtype("float16", config, torch.device("cpu")) == torch.float16


@pytest.mark.parametrize(
    ("capabilities", "native"),
    [
        ({"avx512_bf16": True}, True),
        ({"amx_bf16": True, "avx512_bf16": False}, True),
        ({"neon": True, "bf16": True}, True),
        ({"avx2": True, "avx512_bf16": False}, False),
        ({}, False),
    ],
)
def test_the_cpu_says_whether_it_multiplies_bfloat16(
    monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, bool], native: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert _cpu_multiplies_bfloat16() == native


def test_a_pytorch_that_does_not_say_leaves_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert not _cpu_multiplies_bfloat16()
