"""Two tiers in everything that is done with a cache: files, forks, rows, beams, long answers, and a disk."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import build, prompt
from families import padded
from test_disk import files_of_at_most

from locret import RetentionCache, RetentionPolicy, generate, load_cache, prefill, save_cache
from locret.cache.disk import Disk
from locret.policy.policy import RetentionPolicy as Policy

GREEDY = {"do_sample": False, "eos_token_id": None}
NUMBERS = {"budget": 16, "chunk_size": 12, "stabilizers": 4, "local_len": 5, "host_budget": 19, "recall": 4}
EVERYTHING = {"when": "prompt_end", "host_budget": "all", "recall": 500}
both_positions = pytest.mark.parametrize("positions", ["compact", "original"])


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama")


def policy(**changes: Any) -> Policy:
    return RetentionPolicy(**{**NUMBERS, **changes})


def read(model: Any, tokens: int = 71, disk: Any = None, **changes: Any) -> RetentionCache:
    cache = RetentionCache(model, "key_norm", policy(**changes), disk=disk)
    prefill(model, prompt(tokens), cache)
    return cache


def answer(model: Any, cache: RetentionCache, ids: torch.Tensor | None = None, new: int = 9) -> torch.Tensor:
    """Return the logits of an answer, to a further text if one is given."""
    if ids is not None and cache.seen:
        prefill(model, ids, cache, new_tokens=new)
        ids = None
    options = {"output_logits": True, "return_dict_in_generate": True, **GREEDY}
    out: Any = generate(model, ids, cache=cache, max_new_tokens=new, **options)
    return torch.stack(out.logits, dim=1)


@both_positions
@pytest.mark.parametrize("answered", [False, True])
def test_a_saved_cache_answers_and_reads_on_as_the_one_that_was_saved(
    model: Any, tmp_path: Path, positions: str, answered: bool
) -> None:
    cache = read(model, positions=positions)
    if answered:
        answer(model, cache)
    save_cache(cache, tmp_path / "a.ctx")
    again = load_cache(tmp_path / "a.ctx", model, "key_norm")
    assert again.memory().host_units == 19
    assert torch.equal(answer(model, again.copy(), prompt(40, seed=3)), answer(model, cache.copy(), prompt(40, seed=3)))
    if not answered:
        assert torch.equal(answer(model, again), answer(model, cache))


@pytest.mark.parametrize(("there", "here"), [(False, True), (True, False), (True, True)])
def test_where_the_second_tier_is_does_not_matter_to_a_file(
    model: Any, tmp_path: Path, there: bool, here: bool
) -> None:
    cache = read(model, disk=tmp_path / "one" if there else None)
    save_cache(cache, tmp_path / "a.ctx")
    again = load_cache(tmp_path / "a.ctx", model, "key_norm", disk=tmp_path / "two" if here else None)
    assert (again.memory().disk > 0, again.memory().host > 0) == (here, not here)
    assert torch.equal(answer(model, again), answer(model, cache))
    assert [file.name for file in tmp_path.iterdir()] == ["a.ctx"]


def test_a_file_of_one_tier_loads_with_one(model: Any, tmp_path: Path) -> None:
    save_cache(read(model, host_budget=None, recall=0), tmp_path / "a.ctx")
    assert load_cache(tmp_path / "a.ctx", model, "key_norm").memory().host_units == 0
    with pytest.raises(ValueError, match=r"disk=.*scratch holds a second tier, but there is none"):
        load_cache(tmp_path / "a.ctx", model, "key_norm", disk=tmp_path / "scratch")


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_fork_and_its_origin_do_not_know_of_each_other(model: Any, tmp_path: Path, on_disk: bool) -> None:
    cache = read(model, disk=tmp_path / "scratch" if on_disk else None)
    expected = answer(model, cache.copy())
    fork = cache.copy()
    answer(model, fork, prompt(50, seed=5))
    answer(model, fork, prompt(33, seed=6))
    assert torch.equal(answer(model, cache), expected)
    assert fork.memory().moved > cache.memory().moved


@both_positions
def test_an_answer_whose_prompt_is_fed_with_it_equals_one_after_reading(model: Any, positions: str) -> None:
    apart, together = read(model, positions=positions), RetentionCache(model, "key_norm", policy(positions=positions))
    torch.testing.assert_close(answer(model, together, prompt(71)), answer(model, apart), atol=1e-5, rtol=0)


@both_positions
@pytest.mark.parametrize("host_budget", [19, "all"])
def test_rows_of_a_ragged_batch_answer_as_they_do_alone(model: Any, positions: str, host_budget: Any) -> None:
    rows = [prompt(tokens, seed=tokens) for tokens in (71, 6, 34, 22)]  # two of them have nothing evicted, or little
    ids, mask = padded(rows)
    changes = {"positions": positions, "host_budget": host_budget}
    cache = RetentionCache(model, "key_norm", policy(**changes))
    prefill(model, ids, cache, attention_mask=mask)
    read = cache.copy()
    together = answer(model, cache)
    for row, alone in zip(together, rows, strict=True):
        own = RetentionCache(model, "key_norm", policy(**changes))
        prefill(model, alone, own)
        torch.testing.assert_close(row[None], answer(model, own), atol=1e-4, rtol=0)
    apart = [answer(model, one) for one in read.split(4)]
    torch.testing.assert_close(torch.cat(apart), together, atol=1e-4, rtol=0)


def ragged(model: Any, lengths: tuple[int, ...], **changes: Any) -> tuple[RetentionCache, list[torch.Tensor]]:
    """Return a batch that has been read, and what its rows answer to it alone."""
    rows = [prompt(tokens, seed=tokens) for tokens in lengths]
    ids, mask = padded(rows)
    cache = RetentionCache(model, "key_norm", policy(**changes))
    prefill(model, ids, cache, attention_mask=mask)
    alone = []
    for row in rows:
        own = RetentionCache(model, "key_norm", policy(**changes))
        prefill(model, row, own)
        alone.append(answer(model, own, new=30))
    return cache, alone


@both_positions
@pytest.mark.parametrize("rounding", ["channel", "token"])
def test_codes_of_rows_with_nothing_evicted_are_joined(model: Any, positions: str, rounding: str) -> None:
    codes = {"key_bits": 8, "value_bits": 8, "rounding": rounding, "positions": positions}
    cache, alone = ragged(model, (3, 71, 34, 12), **codes)
    together = answer(model, cache.copy(), new=30)
    torch.testing.assert_close(together, torch.cat(alone), atol=0.03, rtol=0)  # an answer's keys are rounded elsewhere
    again = torch.cat([answer(model, row, new=30) for row in cache.split(4)])
    torch.testing.assert_close(again, torch.cat(alone), atol=0, rtol=0)


@both_positions
@pytest.mark.parametrize("lengths", [(4, 13), (4, 71, 20)])
def test_an_answer_of_rows_of_different_length_evicts_into_the_second_tier(
    model: Any, tmp_path: Path, positions: str, lengths: tuple[int, ...]
) -> None:
    changes = {"positions": positions, "decode_budget": 22, "decode_interval": 5, **EVERYTHING}
    cache, alone = ragged(model, lengths, **changes)
    torch.testing.assert_close(answer(model, cache, new=30), torch.cat(alone), atol=2e-4, rtol=0)
    save_cache(cache, tmp_path / "a.ctx")
    again = load_cache(tmp_path / "a.ctx", model, "key_norm")
    further = prompt(9, seed=1)
    together = answer(model, cache.copy(), further.expand(len(lengths), -1))
    assert torch.equal(answer(model, again, further.expand(len(lengths), -1)), together)
    apart = torch.cat([answer(model, row, further) for row in cache.split(len(lengths))])
    torch.testing.assert_close(apart, together, atol=2e-4, rtol=0)


@both_positions
@pytest.mark.parametrize("host_by", ["score", "recency"])
def test_a_tier_that_an_answer_filled_is_saved_in_order_and_no_larger_than_it_may_be(
    model: Any, tmp_path: Path, positions: str, host_by: str
) -> None:
    changes = {"positions": positions, "host_by": host_by, "decode_budget": 22, "decode_interval": 1}
    cache = read(model, 20, **changes)
    answer(model, cache, new=40)
    memory = cache.memory()
    unit = 2 * cache.backbone.head_dim * 4 + 8
    assert memory.host == memory.host_planned == 3 * cache.backbone.num_kv_heads * 19 * unit
    save_cache(cache, tmp_path / "a.ctx")
    again = load_cache(tmp_path / "a.ctx", model, "key_norm")
    assert torch.equal(answer(model, again, prompt(9)), answer(model, cache, prompt(9)))


def test_codes_that_an_answer_of_a_ragged_batch_evicts_keep_their_places(model: Any) -> None:
    codes = {"key_bits": 8, "decode_budget": 22, "decode_interval": 5}  # rows have different numbers of local tokens
    cache, alone = ragged(model, (30, 2), **codes, **EVERYTHING)
    torch.testing.assert_close(answer(model, cache, new=30), torch.cat(alone), atol=0.05, rtol=0)


def test_beams_of_a_batch_whose_second_tier_in_codes_is_empty(model: Any) -> None:
    cache, ids = RetentionCache(model, "key_norm", policy(key_bits=8)), prompt(6, batch=2)
    out = generate(model, ids, cache=cache, max_new_tokens=8, num_beams=3, **GREEDY)
    for row in range(2):
        own = RetentionCache(model, "key_norm", policy(key_bits=8))
        one = generate(model, ids[row : row + 1], cache=own, max_new_tokens=8, num_beams=3, **GREEDY)
        assert torch.equal(out[row], one[0])


@pytest.mark.parametrize("spec", ["exact", "infllm:local=12,block=4,init=3,topk=2"])
def test_a_ragged_batch_moves_what_its_rows_move(model: Any, spec: str) -> None:
    blocks = RetentionPolicy(budget=48, chunk_size=9, recall_by=spec) if spec != "exact" else policy()
    scorer, rows = "key_norm" if spec == "exact" else "streaming", [prompt(tokens, seed=tokens) for tokens in (71, 34)]
    ids, mask = padded(rows)
    cache, alone = RetentionCache(model, scorer, blocks), [RetentionCache(model, scorer, blocks) for _ in rows]
    prefill(model, ids, cache, attention_mask=mask)
    prefill(model, prompt(29, batch=2), cache)
    for index, (row, own) in enumerate(zip(rows, alone, strict=True)):
        prefill(model, row, own)
        prefill(model, prompt(29, batch=2)[index : index + 1], own)
    assert cache.memory().moved == sum(own.memory().moved for own in alone) > 0


def test_a_ragged_batch_reads_on(model: Any) -> None:
    rows = [prompt(tokens, seed=tokens) for tokens in (71, 34)]
    ids, mask = padded(rows)
    cache = RetentionCache(model, "key_norm", policy())
    prefill(model, ids, cache, attention_mask=mask)
    together = answer(model, cache, prompt(29, batch=2, seed=8))
    for index, alone in enumerate(rows):
        own = RetentionCache(model, "key_norm", policy())
        prefill(model, alone, own)
        expected = answer(model, own, prompt(29, batch=2, seed=8)[index : index + 1])
        torch.testing.assert_close(together[index : index + 1], expected, atol=1e-4, rtol=0)


@both_positions
def test_beams_that_recall_everything_are_those_of_full_attention(model: Any, positions: str) -> None:
    ids = prompt(47)
    options = {"max_new_tokens": 8, "num_beams": 3, **GREEDY}
    cache = RetentionCache(model, "key_norm", policy(positions=positions, **EVERYTHING))
    assert torch.equal(generate(model, ids, cache=cache, **options), model.generate(ids, **options))


@both_positions
def test_an_answer_that_evicts_loses_nothing_where_everything_is_recalled(model: Any, positions: str) -> None:
    ids = prompt(47)
    changes = {"positions": positions, "decode_budget": 22, "decode_interval": 5, **EVERYTHING}
    cache = RetentionCache(model, "key_norm", policy(**changes))
    theirs: Any = model.generate(ids, max_new_tokens=40, output_logits=True, return_dict_in_generate=True, **GREEDY)
    torch.testing.assert_close(answer(model, cache, ids, 40), torch.stack(theirs.logits, 1), atol=2e-4, rtol=0)
    assert cache.memory().units <= 22
    assert cache.memory().host_units >= 47 + 39 - 22


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("rounding", ["channel", "token"])
def test_units_in_codes_are_saved_forked_and_exported_in_both_tiers(
    model: Any, tmp_path: Path, rounding: str, on_disk: bool
) -> None:
    codes = {"key_bits": 4, "value_bits": 4, "rounding": rounding}
    cache = read(model, disk=tmp_path / "scratch" if on_disk else None, **codes)
    memory = cache.memory()
    assert (memory.host, memory.disk) == (memory.host_planned, memory.disk_planned)
    expected = answer(model, cache.copy())
    save_cache(cache, tmp_path / "a.ctx")
    assert torch.equal(answer(model, load_cache(tmp_path / "a.ctx", model, "key_norm")), expected)
    assert cache.to_dynamic_cache(host=True).get_seq_length() == 16 + 5 + 19
    assert torch.equal(answer(model, cache), expected)


def test_blocks_are_in_no_file_and_on_no_disk(model: Any, tmp_path: Path) -> None:
    blocks = RetentionPolicy(budget=48, recall_by="infllm", host_budget="all", chunk_size=32)
    cache = RetentionCache(model, "streaming", blocks)
    prefill(model, prompt(150), cache)
    with pytest.raises(ValueError, match="a file has no place for the blocks that recall_by=infllm holds; keep the"):
        save_cache(cache, tmp_path / "a.ctx")
    with pytest.raises(ValueError, match="recall_by=infllm holds blocks in host memory, not in a file; leave disk out"):
        RetentionCache(model, "streaming", blocks, disk=tmp_path / "scratch")
    with pytest.raises(ValueError, match="recall_by=infllm gives far units one position, which no ordinary prefix has"):
        cache.to_dynamic_cache(host=True)
    assert list(tmp_path.iterdir()) == []


# -- a disk -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host_budget", [19, "all"])
@pytest.mark.parametrize("tokens", [30, 71, 140])
def test_a_disk_changes_no_answer_and_holds_what_was_planned(
    model: Any, tmp_path: Path, tokens: int, host_budget: Any
) -> None:
    on_disk = read(model, tokens, disk=tmp_path / "scratch", host_budget=host_budget)
    in_memory = read(model, tokens, host_budget=host_budget)
    there, here = on_disk.memory(), in_memory.memory()
    assert there.disk == there.disk_planned == here.host == here.host_planned > 0
    assert there.host == there.host_planned == here.disk == here.disk_planned == 0
    assert torch.equal(answer(model, on_disk), answer(model, in_memory))
    assert torch.equal(answer(model, on_disk, prompt(33, seed=2)), answer(model, in_memory, prompt(33, seed=2)))
    assert list(tmp_path.iterdir()) == []


def test_a_ragged_batch_on_a_disk_answers_like_one_in_memory(model: Any, tmp_path: Path) -> None:
    ids, mask = padded([prompt(tokens, seed=tokens) for tokens in (71, 34)])
    caches = [RetentionCache(model, "key_norm", policy(), disk=where) for where in (Disk(tmp_path), None)]
    for cache in caches:
        prefill(model, ids, cache, attention_mask=mask)
    assert torch.equal(answer(model, caches[0]), answer(model, caches[1]))


def test_a_disk_without_room_is_refused_before_anything_is_read(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = RetentionCache(model, "key_norm", policy(host_budget=2**40), disk=tmp_path / "scratch")
    read_chunks: list[int] = []
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=4096))
    with pytest.raises(OSError, match=r"cannot hold [\d,]+ bytes .* \(No space left"):
        prefill(model, prompt(71), cache, on_chunk=lambda _: read_chunks.append(1))
    assert not read_chunks
    monkeypatch.undo()
    prefill(model, prompt(71), cache)  # there is room now, and nothing had begun
    assert cache.memory().host_units == 71 - 16 - 5


def test_a_disk_that_fills_in_the_middle_leaves_the_cache_marked(model: Any, tmp_path: Path) -> None:
    changes = {"decode_budget": 22, "decode_interval": 5, "host_budget": "all"}
    cache = read(model, disk=tmp_path / "scratch", **changes)
    with files_of_at_most(50_000), pytest.raises(OSError, match=r"\(File too large\); make room there"):
        answer(model, cache, new=4000)
    for use in (lambda: answer(model, cache), cache.copy, lambda: save_cache(cache, tmp_path / "a.ctx")):
        with pytest.raises(ValueError, match="was interrupted; start again with"):
            use()
    assert list(tmp_path.iterdir()) == []


def test_everything_of_a_text_of_unknown_length_has_no_place_on_a_disk(model: Any, tmp_path: Path) -> None:
    cache = RetentionCache(model, "key_norm", policy(host_budget="all"), disk=tmp_path / "scratch")
    with pytest.raises(ValueError, match=r'host_budget="all" of a text of unknown length; give host_budget as'):
        prefill(model, iter(prompt(300)[0].tolist()), cache)
    bounded = RetentionCache(model, "key_norm", policy(), disk=tmp_path / "scratch")
    prefill(model, iter(prompt(300)[0].tolist()), bounded)
    assert bounded.memory().host_units == 19


def test_a_disk_without_a_second_tier_is_refused(model: Any, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"disk=.*scratch holds a second tier, but there is none; give host_budget and"
    ):
        RetentionCache(model, "key_norm", policy(host_budget=None, recall=0), disk=tmp_path / "scratch")
    assert list(tmp_path.iterdir()) == []


def test_the_space_comes_back_with_the_last_cache(model: Any, tmp_path: Path) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    cache = read(model, disk=tmp_path / "scratch")
    disk = cache.disk
    forks = [cache.copy() for _ in range(3)]
    answer(model, forks[0], prompt(40, seed=1))
    used = disk.used
    del forks
    gc.collect()
    assert disk.used < used
    del cache, disk
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
