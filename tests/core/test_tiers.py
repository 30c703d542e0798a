"""Two tiers, where no random run goes: all of an answer recalled, a disk that is full, and what is refused."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import build, prompt
from test_disk import files_of_at_most

from locret import RetentionCache, RetentionPolicy, generate, load_cache, prefill, save_cache

GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None}
NUMBERS = {"budget": 16, "chunk_size": 12, "stabilizers": 4, "local_len": 5, "host_budget": 19, "recall": 4}
EVERYTHING = {"when": "prompt_end", "host_budget": "all", "recall": 500}
UNIT = 2 * 8 * 4 + 8
"""Bytes of key, value, score and position."""
both_positions = pytest.mark.parametrize("positions", ["compact", "original"])


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama")


def new_cache(model: Any, disk: Any = None, **changes: Any) -> RetentionCache:
    return RetentionCache(model, "key_norm", RetentionPolicy(**{**NUMBERS, **changes}), disk=disk)


def read(model: Any, tokens: int = 71, disk: Any = None, **changes: Any) -> RetentionCache:
    cache = new_cache(model, disk, **changes)
    prefill(model, prompt(tokens), cache)
    return cache


def answer(model: Any, cache: RetentionCache, ids: torch.Tensor | None = None, new: int = 9) -> torch.Tensor:
    options = {"output_logits": True, "return_dict_in_generate": True, **GREEDY}
    return torch.stack(generate(model, ids, cache=cache, max_new_tokens=new, **options).logits, dim=1)


@both_positions
@pytest.mark.parametrize("tokens", [47, 1])
def test_an_answer_that_evicts_loses_nothing_where_everything_is_recalled(
    model: Any, positions: str, tokens: int
) -> None:
    ids, changes = prompt(tokens), {"positions": positions, "decode_budget": 22, "decode_interval": 5, **EVERYTHING}
    cache = new_cache(model, **changes)
    theirs: Any = model.generate(ids, max_new_tokens=40, output_logits=True, return_dict_in_generate=True, **GREEDY)
    torch.testing.assert_close(answer(model, cache, ids, 40), torch.stack(theirs.logits, 1), atol=2e-4, rtol=0)
    assert cache.memory().units <= 22
    assert cache.memory().host_units >= tokens + 39 - 22


def test_beams_that_recall_everything_are_those_of_full_attention(model: Any) -> None:
    options = {"max_new_tokens": 8, "num_beams": 3, **GREEDY}
    assert torch.equal(
        generate(model, prompt(47), cache=new_cache(model, **EVERYTHING), **options),
        model.generate(prompt(47), **options),
    )


@pytest.mark.parametrize("tokens", [30, 71, 130, 300])
def test_a_tier_is_as_large_as_the_text_although_its_length_is_unknown(model: Any, tokens: int) -> None:
    known, streamed = read(model, tokens, host_budget=100), new_cache(model, host_budget=100)
    prefill(model, iter(prompt(tokens)[0].tolist()), streamed)
    assert streamed.memory().host_units == known.memory().host_units
    assert streamed.memory().host == known.memory().host <= 3 * 2 * min(100, tokens) * UNIT


def test_bytes_of_a_tier_and_of_what_is_recalled_are_what_one_counts_by_hand(model: Any, tmp_path: Path) -> None:
    for disk in (None, tmp_path / "scratch"):
        cache = read(model, disk=disk)
        memory = cache.memory()
        assert memory.host + memory.disk == 3 * 2 * 19 * UNIT
        assert (memory.disk > 0) == (disk is not None)
        answer(model, cache, new=5)
        # The last token of the prompt is fed again for its logits, and the fifth new one is never fed.
        assert cache.memory().moved - memory.moved == 5 * 3 * 2 * 4 * 8 * 8
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("host_by", ["score", "recency"])
def test_a_tier_that_an_answer_filled_is_no_larger_than_it_may_be_and_is_saved_in_order(
    model: Any, tmp_path: Path, host_by: str
) -> None:
    cache = read(model, 20, host_by=host_by, decode_budget=22, decode_interval=1)
    answer(model, cache, new=40)
    memory = cache.memory()
    assert memory.host == memory.host_planned == 3 * 2 * 19 * UNIT
    save_cache(cache, tmp_path / "a.ctx")
    again = load_cache(tmp_path / "a.ctx", model, "key_norm")
    prefill(model, prompt(9), cache), prefill(model, prompt(9), again)
    assert torch.equal(answer(model, again), answer(model, cache))


# -- a disk -----------------------------------------------------------------------------------------------------------


def test_a_disk_without_room_is_refused_before_anything_is_read(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, chunks = new_cache(model, tmp_path / "scratch"), []
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=4096))
    with pytest.raises(OSError, match=r"cannot hold [\d,]+ bytes .* \(No space left"):
        prefill(model, prompt(71), cache, on_chunk=lambda _: chunks.append(1))
    assert not chunks
    monkeypatch.undo()
    prefill(model, prompt(71), cache)  # there is room now, and nothing had begun
    assert cache.memory().host_units == 19


def test_a_disk_that_fills_in_the_middle_leaves_the_cache_marked(model: Any, tmp_path: Path) -> None:
    changes = {"decode_budget": 22, "decode_interval": 5, "host_budget": "all"}
    cache = read(model, disk=tmp_path / "scratch", **changes)
    with files_of_at_most(50_000), pytest.raises(OSError, match=r"\(File too large\); make room there"):
        answer(model, cache, new=4000)
    for use in (lambda: answer(model, cache), cache.copy, lambda: save_cache(cache, tmp_path / "a.ctx")):
        with pytest.raises(ValueError, match="was interrupted; start again with"):
            use()
    assert list(tmp_path.iterdir()) == []


def test_the_space_comes_back_with_the_last_cache(model: Any, tmp_path: Path) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    cache = read(model, disk=tmp_path / "scratch")
    forks = [cache.copy() for _ in range(3)]
    answer(model, forks[0])
    del cache, forks
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_a_disk_or_a_file_cannot_hold_is_refused(model: Any, tmp_path: Path) -> None:
    endless = new_cache(model, tmp_path / "scratch", host_budget="all")
    with pytest.raises(ValueError, match=r'host_budget="all" of a text of unknown length; give host_budget as'):
        prefill(model, iter(prompt(300)[0].tolist()), endless)
    with pytest.raises(ValueError, match=r"disk=.*scratch holds a second tier, but there is none"):
        new_cache(model, tmp_path / "scratch", host_budget=None, recall=0)
    save_cache(read(model, host_budget=None, recall=0), tmp_path / "a.ctx")
    with pytest.raises(ValueError, match=r"disk=.*scratch holds a second tier, but there is none"):
        load_cache(tmp_path / "a.ctx", model, "key_norm", disk=tmp_path / "scratch")
