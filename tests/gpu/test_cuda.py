"""What only a GPU can show: a flash kernel on every chunk, a flat device peak, the results of the CPU."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, LlamaConfig

from locret import RetainingHeads, RetentionCache, RetentionPolicy, generate, prefill
from locret.cache import compiled_step
from locret.infer.speed.gpu import Captured

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


def prompt(length: int) -> torch.Tensor:
    return torch.randint(3, 1000, (1, length), generator=torch.Generator().manual_seed(0))


def test_every_attention_call_reaches_a_flash_kernel(model: torch.nn.Module) -> None:
    model = model.to("cuda", torch.bfloat16)
    heads = RetainingHeads.for_model(model, hidden_dim=64, seed=0)
    # With the other backends forbidden, a dense mask or a fallback raises instead of slowing down in silence.
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        ids = generate(model, prompt(2000), cache=RetentionCache(model, heads, POLICY), max_new_tokens=8)
    assert ids.shape == (1, 2008)


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
    try:
        prefill(
            model,
            ids,
            RetentionCache(model, heads, policy),
            on_chunk=lambda _cache: torch.cuda.set_sync_debug_mode("error"),
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("captured", [False, True])
def test_a_cuda_graph_writes_the_tokens_of_steps_run_as_written(
    model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch, captured: bool
) -> None:
    if captured:
        monkeypatch.setattr(compiled_step, "_program", lambda run, *_, **__: Captured(run))
    torch.backends.cuda.matmul.allow_tf32 = False
    model = model.to("cuda")
    model.generation_config.eos_token_id = None
    heads = RetainingHeads.for_model(model, hidden_dim=64, seed=0)
    plain = RetentionCache(model, heads, POLICY)
    prefill(model, prompt(1000), plain, new_tokens=40)
    compiled = plain.copy()
    options = {"max_new_tokens": 40, "do_sample": False}
    expected = generate(model, cache=plain, **options)
    skipped = counters["inductor"]["cudagraph_skips"]
    assert torch.equal(generate(model, cache=compiled, compile=True, **options), expected)
    assert counters["inductor"]["cudagraph_skips"] == skipped
    torch.testing.assert_close(compiled.kept_scores(0), plain.kept_scores(0), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("spec", ["a_shape:sinks=8,window=100", "vertical_slash:vertical=60,slash=120", "xattention"])
def test_sparse_reading_on_the_gpu_agrees_with_the_cpu(model: torch.nn.Module, spec: str) -> None:
    policy = RetentionPolicy(budget=1024, chunk_size=512, local_len=32, prefill_attention=spec)
    expected = prefill(model, prompt(3000), RetentionCache(model, "streaming", policy))
    model = model.to("cuda")
    got = prefill(model, prompt(3000), RetentionCache(model, "streaming", policy))
    torch.testing.assert_close(got.cpu(), expected, atol=2e-2, rtol=2e-2)  # TF32 products in the kernel
