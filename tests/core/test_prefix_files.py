"""What a saved cache is to an engine: read without its backbone, as strictly as with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build, prompt
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from locret import RetentionCache, RetentionPolicy, generate, load_cache, prefill, save_cache
from locret.cache.schema import checksum
from locret.engines.prefix import Prefix

NUMBERS = {"budget": 16, "chunk_size": 12, "stabilizers": 4, "local_len": 4}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "long answer": {"decode_budget": 25, "decode_interval": 6},
    "codes": {"key_bits": 4, "value_bits": 8, "exact_recent": 4},
    "codes by token": {"key_bits": 8, "rounding": "token", "exact_layers": 1},
    "second tier": {"host_budget": 9, "recall": 3},
    "codes in two tiers": {"host_budget": 9, "recall": 3, "key_bits": 8, "value_bits": 8},
}
FAMILIES = ("llama", "phi3-partial", "llama-yarn", "llama-3.1-rope", "qwen3")


def read(family: str, form: str) -> RetentionCache:
    model = build(family)
    cache = RetentionCache(model, "key_norm", RetentionPolicy(**NUMBERS, **FORMS[form]))
    prefill(model, prompt(45), cache)
    if form == "long answer":  # which evicts, so that units do not begin at position 0
        generate(model, cache=cache, max_new_tokens=40, do_sample=False, eos_token_id=None)
        assert cache.next_position > cache.memory().units
    return cache


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_is_the_prefix_that_its_cache_is(family: str, form: str, tmp_path: Path) -> None:
    cache = read(family, form)
    save_cache(cache, tmp_path / "a.ctx")
    ours, theirs = Prefix.of(cache), Prefix.from_file(tmp_path / "a.ctx")
    for mine, other in zip((*ours.keys, *ours.values), (*theirs.keys, *theirs.values), strict=True):
        assert mine.shape == other.shape
        torch.testing.assert_close(mine, other, atol=1e-6, rtol=0)
    assert (ours.tokens, ours.vocab_size, ours.model_type) == (theirs.tokens, theirs.vocab_size, theirs.model_type)
    assert ours.digest == theirs.digest


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("prefixes")
    found = {}
    for form in FORMS:
        found[form] = folder / f"{form}.ctx"
        save_cache(read("llama", form), found[form])
    return found


def content(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        return file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def changed(path: Path, **state: Any) -> Path:
    metadata, tensors = content(path)
    metadata["state"] = json.dumps({**json.loads(metadata["state"]), **state})
    metadata["checksum"] = checksum(metadata["state"], tensors)
    save_file(tensors, path.with_suffix(".changed"), metadata=metadata)
    return path.with_suffix(".changed")


def test_another_rotation_than_the_backbones_is_refused(saved: dict[str, Path]) -> None:
    metadata, _ = content(saved["plain"])
    rotary = json.loads(metadata["state"])["rotary"]
    path = changed(saved["plain"], rotary={**rotary, "rope_theta": 5.0})
    with pytest.raises(ValueError, match=r"in another way \(rope_theta 5\.0 in the file, 10000\.0 in the model"):
        load_cache(path, build("llama"), "key_norm")
    older = {name: value for name, value in rotary.items() if name != "rope_theta"}
    assert load_cache(changed(saved["plain"], rotary=older), build("llama"), "key_norm").seen == 45
