"""Two tiers on a GPU: the second one lies in pinned host memory, the first and what is recalled on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from embedded import many_keys
from test_cuda import model, prompt  # noqa: F401 (a fixture)
from transformers import AutoModelForCausalLM, AutoTokenizer

from locret import RetainingHeads, RetentionCache, RetentionPolicy, generate, prefill

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; none is here"),
]
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
