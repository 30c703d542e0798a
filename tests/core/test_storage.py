"""A context read once can be saved, loaded and asked again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import build, prompt

from locret import RetainingHeads, RetentionCache, RetentionPolicy, generate, load_cache, prefill, save_cache

POLICY = RetentionPolicy(budget=24, chunk_size=10, stabilizers=5, local_len=6)


def answer(model: Any, cache: RetentionCache) -> torch.Tensor:
    return generate(model, None, cache=cache, max_new_tokens=8, do_sample=False, eos_token_id=None)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_loaded_cache_answers_and_reads_on_like_the_saved_one(family: str, tmp_path: Path) -> None:
    model = build(family)
    heads = RetainingHeads.for_model(model, hidden_dim=8, seed=0)
    cache = RetentionCache(model, heads, POLICY)
    prefill(model, prompt(90), cache)
    save_cache(cache, tmp_path / "book.safetensors")
    loaded = load_cache(tmp_path / "book.safetensors", model, heads)
    assert torch.equal(answer(model, loaded.copy()), answer(model, cache.copy()))
    more = prompt(40, seed=9)
    torch.testing.assert_close(prefill(model, more, loaded), prefill(model, more, cache), atol=1e-6, rtol=0)
    assert [p.name for p in tmp_path.iterdir()] == ["book.safetensors"]


def test_a_loaded_batch_keeps_its_padding(tmp_path: Path) -> None:
    model = build("llama")
    heads = RetainingHeads.for_model(model, hidden_dim=8, seed=0)
    ids = prompt(50, batch=2)
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    cache = RetentionCache(model, heads, POLICY)
    prefill(model, ids, cache, attention_mask=mask)
    save_cache(cache, tmp_path / "two.safetensors")
    assert torch.equal(answer(model, load_cache(tmp_path / "two.safetensors", model, heads)), answer(model, cache))


def test_another_backbone_is_refused_and_both_sides_are_shown(tmp_path: Path) -> None:
    model, other = build("llama"), build("llama-mha")
    cache = RetentionCache(model, "random", POLICY)
    prefill(model, prompt(30), cache)
    save_cache(cache, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="num_kv_heads 2 in the file, 4 in the model"):
        load_cache(tmp_path / "a.safetensors", other, "random")


def test_an_empty_cache_and_a_foreign_file_are_refused(tmp_path: Path) -> None:
    model = build("llama")
    with pytest.raises(ValueError, match="has read nothing yet"):
        save_cache(RetentionCache(model, "random", POLICY), tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").write_text("not a cache")
    with pytest.raises(ValueError, match="is not a saved cache"):
        load_cache(tmp_path / "b.safetensors", model, "random")
    with pytest.raises(ValueError, match="does not exist"):
        load_cache(tmp_path / "c.safetensors", model, "random")


def test_a_folder_that_does_not_exist_leaves_nothing_behind(tmp_path: Path) -> None:
    model = build("llama")
    cache = RetentionCache(model, "random", POLICY)
    prefill(model, prompt(30), cache)
    with pytest.raises(OSError, match="cannot write .*a.safetensors: there is no folder .*missing; make it"):
        save_cache(cache, tmp_path / "missing" / "a.safetensors")
    assert not list(tmp_path.iterdir())
