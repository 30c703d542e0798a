"""What only a GPU can show: a flash kernel on every chunk, a flat device peak, the results of the CPU."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from embedded import many_keys
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from locret import RetainingHeads, RetentionCache, RetentionPolicy, generate, prefill
from locret.cache import captured_step
from locret.infer.speed.plan import random_model, shape_of
from locret.train.step import train_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; none is here"),
]
POLICY = RetentionPolicy(budget=256, chunk_size=128, stabilizers=64, local_len=32)


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=131072,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the replays of graphs."""
    found, real = list[int](), torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: found.append(1) or real(graph))
    return found


def prompt(length: int) -> torch.Tensor:
    return torch.randint(3, 1000, (1, length), generator=torch.Generator().manual_seed(0))


def test_every_attention_call_reaches_a_flash_kernel(model: torch.nn.Module) -> None:
    model = model.to("cuda", torch.bfloat16)
    heads = RetainingHeads.for_model(model, hidden_dim=64, seed=0)
    # With the other backends forbidden, a dense mask or a fallback raises instead of slowing down in silence.
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        ids = generate(model, prompt(2000), cache=RetentionCache(model, heads, POLICY), max_new_tokens=8)
    assert ids.shape == (1, 2008)


def test_a_backbone_loaded_with_flash_attn_answers_as_with_torch(model: torch.nn.Module) -> None:
    pytest.importorskip("flash_attn", reason="the extra flash is not installed")
    model = model.to("cuda", torch.bfloat16)
    logits = []
    for implementation in ("sdpa", "flash_attention_2"):
        model.set_attn_implementation(implementation)
        logits.append(prefill(model, prompt(2000), RetentionCache(model, "streaming", POLICY)).float())
    torch.testing.assert_close(*logits, atol=5e-2, rtol=0)


def test_device_peak_is_the_same_for_4k_and_64k_tokens(model: torch.nn.Module) -> None:
    model = model.to("cuda", torch.bfloat16)
    heads = RetainingHeads.for_model(model, hidden_dim=64, seed=0)
    peaks = []
    for length in (4096, 65536):
        cache = RetentionCache(model, heads, POLICY)
        ids = iter(prompt(length)[0].tolist())
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        prefill(model, ids, cache)
        peaks.append(torch.cuda.max_memory_allocated())
        del cache
    assert peaks[1] <= peaks[0] * 1.01


def test_kept_units_and_logits_agree_with_the_cpu(model: torch.nn.Module) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    heads = RetainingHeads.for_model(model, hidden_dim=64, seed=0)
    results = []
    for device in ("cpu", "cuda"):
        cache = RetentionCache(model.to(device), heads, POLICY)
        logits = prefill(model, prompt(1000), cache)
        results.append((logits.cpu(), cache.kept_positions(0).cpu()))
    same = (results[0][1] == results[1][1]).float().mean()
    assert same > 0.99
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-2, rtol=0)


@pytest.mark.parametrize("positions", ["compact", "original"])
def test_the_host_never_waits_for_the_device_after_the_first_chunk(model: torch.nn.Module, positions: str) -> None:
    model = model.to("cuda", torch.bfloat16)
    heads = RetainingHeads.for_model(model, hidden_dim=64, seed=0)
    policy = RetentionPolicy(budget=256, chunk_size=128, stabilizers=64, local_len=32, positions=positions)
    ids = prompt(1000).to("cuda")
    cache = RetentionCache(model, heads, policy)
    try:
        prefill(model, ids, cache, on_chunk=lambda _cache: torch.cuda.set_sync_debug_mode("error"))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def both_answers(cache: RetentionCache, new: int) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Return the ids of steps as written and of captured ones, and the cache of these."""
    cache.model.generation_config.eos_token_id = None
    captured, options = cache.copy(), {"max_new_tokens": new, "do_sample": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captured_step, "DEVICES", ())
        expected = generate(cache.model, cache=cache, **options)
    with warnings.catch_warnings():  # a capture that fails says so
        warnings.simplefilter("error")
        found = generate(captured.model, cache=captured, **options)
    return expected, found, captured


SHARES = (0.7, 1.3, 1.2, 0.8, 1.0, 1.0, 0.9, 1.1)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("head_budgets", ["uniform", "shares"])
def test_a_graph_writes_the_tokens_of_steps_run_as_written(
    model: torch.nn.Module, rows: int, head_budgets: str, replays: list[int]
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    heads = RetainingHeads.for_model(model.to("cuda"), hidden_dim=64, seed=0)
    shares = SHARES if head_budgets == "shares" else None
    cache = RetentionCache(model, heads, replace(POLICY, head_budgets=head_budgets, head_shares=shares))
    prefill(model, torch.cat([prompt(1000)] * rows), cache, new_tokens=40)
    expected, found, captured = both_answers(cache, 40)
    assert len(replays) == 40
    assert torch.equal(found, expected)
    for layer in range(4):
        assert torch.equal(captured.kept_positions(layer), cache.kept_positions(layer))
        torch.testing.assert_close(captured.kept_scores(layer), cache.kept_scores(layer), atol=1e-3, rtol=1e-3)


def test_a_graph_draws_what_steps_as_written_draw_and_its_memory_is_free_afterwards(
    model: torch.nn.Module, replays: list[int]
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    heads = RetainingHeads.for_model(model.to("cuda"), hidden_dim=64, seed=0)
    cache = RetentionCache(model, heads, POLICY)
    prefill(model, prompt(1000), cache, new_tokens=16)
    held = []
    for _ in range(4):
        twin = cache.copy()
        answers = []
        for devices in ((), ("cuda",)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(captured_step, "DEVICES", devices)
                torch.manual_seed(1)
                answers.append(generate(model, cache=twin.copy(), max_new_tokens=16, do_sample=True, eos_token_id=None))
        assert torch.equal(*answers)
        del twin, answers
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        held.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert len(replays) == 64
    assert held[1:] == [held[1]] * 3  # cuBLAS keeps a workspace from the first on


TINY = str(Path(__file__).resolve().parents[2] / "checkpoints" / "tiny")
SETTINGS = {"budget": 128, "chunk_size": 128, "stabilizers": 32, "local_len": 16, "host_budget": 512, "recall": 8}
GREEDY = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 12}


def answer(model: torch.nn.Module, cache: RetentionCache) -> torch.Tensor:  # noqa: F811
    options = {**GREEDY, "output_logits": True, "return_dict_in_generate": True}
    out: Any = generate(model, cache=cache, **options)
    return torch.cat(out.logits).cpu()


@pytest.fixture(scope="module")
def asked() -> tuple[Any, ...]:
    """The embedded backbone, whose choices are no near-ties that rounding decides, its heads, and a question."""
    trained = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    turn = [{"role": "user", "content": many_keys(tokenizer, 1500, seed=7).content}]
    given = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    ids = tokenizer.apply_chat_template(turn, **given)["input_ids"]
    return trained, RetainingHeads.from_pretrained(f"{TINY}-heads"), ids


@pytest.mark.parametrize("positions", ["compact", "original"])
def test_both_tiers_answer_as_on_the_cpu(asked: Any, positions: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    (trained, heads, ids), logits = asked, []
    small = {"budget": 24, "stabilizers": 4, "local_len": 4, "host_budget": 256}
    policy = RetentionPolicy(**{**SETTINGS, **small}, positions=positions)
    for device in ("cpu", "cuda"):
        cache = RetentionCache(trained.to(device), heads.to(device), policy)
        prefill(trained, ids, cache)
        logits.append(answer(trained, cache))
    torch.testing.assert_close(logits[0], logits[1], atol=1e-2, rtol=0)  # a unit that is not recalled: 3 or more


def test_the_second_tier_is_pinned_and_never_on_the_device(model: torch.nn.Module) -> None:  # noqa: F811
    model = model.to("cuda", torch.bfloat16)
    peaks = []
    for length in (4096, 32768):
        cache = RetentionCache(model, "key_norm", RetentionPolicy(**SETTINGS))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        prefill(model, iter(prompt(length)[0].tolist()), cache)
        answer(model, cache)
        peaks.append(torch.cuda.max_memory_allocated())
        for layer in cache.governed:
            assert layer.host is not None
            assert layer.host.store.keys is not None
            assert layer.host.store.keys.is_pinned()
        del cache
    assert peaks[1] <= peaks[0] * 1.01


def test_a_training_step_on_the_device_gives_the_gradients_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    model, gradients = random_model(shape_of("tiny").config), []
    for device in ("cpu", "cuda"):
        heads = RetainingHeads.for_model(model, hidden_dim=64, seed=0).to(device)
        train_step(model.to(device), heads, prompt(500) % 900, prompt(40) % 900)
        gradients.append([weight.grad.cpu() for weight in heads.parameters() if weight.grad is not None])
    assert len(gradients[0]) == 2 * model.config.num_hidden_layers
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-2)
