"""What a saved cache is to an engine: read without its backbone, as strictly as with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build, prompt
from safetensors.torch import save_file
from test_damaged_files import content

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


def test_another_rotation_than_the_backbones_is_refused(tmp_path: Path) -> None:
    save_cache(read("llama", "plain"), path := tmp_path / "a.ctx")
    metadata, tensors = content(path)
    state = json.loads(metadata["state"])

    def load(rotary: dict[str, Any]) -> RetentionCache:
        text = json.dumps({**state, "rotary": rotary})
        save_file(tensors, path, metadata={**metadata, "state": text, "checksum": checksum(text, tensors)})
        return load_cache(path, build("llama"), "key_norm")

    with pytest.raises(ValueError, match=r"in another way \(rope_theta 5\.0 in the file, 10000\.0 in the model"):
        load({**state["rotary"], "rope_theta": 5.0})
    older = {name: value for name, value in state["rotary"].items() if name != "rope_theta"}
    assert load(older).seen == 45
