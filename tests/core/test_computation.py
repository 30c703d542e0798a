"""What was read is answered only by a model that computes what it computed then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from families import build, prompt

from locret import RetentionCache, RetentionPolicy, generate, load_cache, prefill, save_cache
from locret.cache.compose import joined, shrunk

IDS = prompt(60)
ANSWER = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}


def adapted() -> Any:
    config = peft.LoraConfig(target_modules=["q_proj", "k_proj"], init_lora_weights=False, r=4, task_type="CAUSAL_LM")
    model = peft.get_peft_model(build("llama"), config, adapter_name="first")
    model.add_adapter("second", config)
    model.set_adapter("first")
    return model


def read(model: Any) -> RetentionCache:
    cache = RetentionCache(model, "streaming", RetentionPolicy(budget=24, chunk_size=10, stabilizers=5, local_len=6))
    prefill(model, IDS, cache)
    return cache


def every(model: Any, name: str, change: Callable[[Any], Any]) -> None:
    for module in model.modules():
        if name in vars(module):
            setattr(module, name, change(getattr(module, name)))


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "another adapter": (adapted, lambda model: model.set_adapter("second")),
    "adapters off": (adapted, lambda model: model.base_model.disable_adapter_layers()),
    "another scale": (
        adapted,
        lambda model: every(model, "scaling", lambda s: {"first": 9.0} if isinstance(s, dict) else s),
    ),
    "another epsilon": (lambda: build("llama"), lambda model: every(model, "variance_epsilon", lambda _: 1e-3)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_computation_is_refused_by_an_open_cache_and_by_a_file(change: str, tmp_path: Path) -> None:
    make, edit = CHANGES[change]
    torch.manual_seed(0)
    model = make()
    cache = read(model)
    smaller = shrunk(cache, 16)
    save_cache(cache, tmp_path / "read.safetensors")
    generate(model, cache=load_cache(tmp_path / "read.safetensors", model, "streaming"), **ANSWER)
    edit(model)
    for one in (cache.copy(), smaller):
        with pytest.raises(ValueError, match="computed something else"):
            generate(model, cache=one, **ANSWER)
    with pytest.raises(ValueError, match="computed something else"):
        joined([(cache, 0), (read(model), 0)])
    with pytest.raises(ValueError, match="computes something else|other weights"):
        load_cache(tmp_path / "read.safetensors", model, "streaming")


def test_an_adapter_that_is_not_in_force_changes_nothing(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = adapted()
    save_cache(read(model), tmp_path / "read.safetensors")
    expected = generate(model, cache=read(model), **ANSWER)
    model.delete_adapter("second")
    loaded = load_cache(tmp_path / "read.safetensors", model, "streaming")
    assert torch.equal(generate(model, cache=loaded, **ANSWER), expected)
