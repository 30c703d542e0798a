"""The engine agrees with the original implementation (tests/golden), at the tolerances its README gives."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from locret import RetainingHeads, RetentionCache, RetentionPolicy, generate, prefill

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = sorted(folder.name for folder in GOLDEN.iterdir() if folder.is_dir())
RUNS = [(case, run) for case in CASES for run in json.loads((GOLDEN / case / "meta.json").read_text())["settings"]]


@cache
def load(case: str) -> tuple[Any, RetainingHeads, dict[str, torch.Tensor], dict[str, Any]]:
    folder = GOLDEN / case
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    heads = RetainingHeads.from_official(folder / "heads.safetensors", model.config)
    tensors = load_file(folder / "inputs.safetensors") | load_file(folder / "outputs.safetensors")
    return model, heads, tensors, json.loads((folder / "meta.json").read_text())


def new_cache(case: str, run: str) -> RetentionCache:
    model, heads, _, meta = load(case)
    numbers = meta["settings"][run]
    policy = RetentionPolicy(
        budget=numbers["budget"],
        chunk_size=numbers["chunk"],
        stabilizers=numbers["stabilizers"],
        local_len=numbers["local"],
    )
    return RetentionCache(model, heads, policy)


@pytest.mark.parametrize(("case", "run"), RUNS)
def test_every_chunk_keeps_what_the_original_keeps(case: str, run: str) -> None:
    model, _, tensors, meta = load(case)
    numbers = meta["settings"][run]
    seen = []

    def compare(cache: RetentionCache) -> None:
        chunk = len(seen)
        for layer in range(meta["num_layers"]):
            kept = cache.kept_positions(layer)[0]
            if chunk in numbers["chunks_with_all_kept"]:
                expected = torch.arange(numbers["chunks"][chunk][1]).expand_as(kept)
            else:
                expected = tensors[f"run.{run}.kept.{chunk}"][layer].long()
            assert torch.equal(kept, expected), f"chunk {chunk}, layer {layer}"
        seen.append(chunk)

    logits = prefill(model, tensors["prompt_ids"], new_cache(case, run), on_chunk=compare)
    assert len(seen) == len(numbers["chunks"])
    torch.testing.assert_close(logits[0], tensors[f"run.{run}.prompt_logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize(("case", "run"), RUNS)
def test_greedy_tokens_equal_the_original_ones(case: str, run: str) -> None:
    model, _, tensors, meta = load(case)
    ids = generate(model, tensors["prompt_ids"], cache=new_cache(case, run), max_new_tokens=12, do_sample=False)
    assert ids[0, -12:].tolist() == meta["settings"][run]["tokens"]


@pytest.mark.parametrize("case", CASES)
def test_step_logits_equal_the_original_ones(case: str) -> None:
    model, _, tensors, _ = load(case)
    out = generate(
        model,
        tensors["prompt_ids"],
        cache=new_cache(case, "s1_b64_B32"),
        max_new_tokens=12,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    torch.testing.assert_close(torch.cat(out.logits), tensors["run.s1_b64_B32.step_logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("run", ["s1_b64_B32", "s6_ns_gt_B"])
def test_scores_given_on_the_evicted_cache_equal_the_original_ones(case: str, run: str) -> None:
    model, _, tensors, meta = load(case)
    expected = tensors[f"run.{run}.chunk_scores"]
    compared = 0

    def compare(cache: RetentionCache) -> None:
        nonlocal compared
        for layer in range(meta["num_layers"]):
            kept, scores = cache.kept_positions(layer)[0], cache.kept_scores(layer)[0]
            for head in range(kept.shape[0]):
                torch.testing.assert_close(scores[head], expected[layer, kept[head], head], atol=1e-4, rtol=0)
                compared += kept.shape[1]

    prefill(model, tensors["prompt_ids"], new_cache(case, run), on_chunk=compare)
    assert compared > 0


@pytest.mark.parametrize("case", CASES)
def test_scores_and_logits_of_the_whole_prompt_equal_the_original_ones(case: str) -> None:
    model, heads, tensors, meta = load(case)
    cache = RetentionCache(model, heads, RetentionPolicy(budget=1000, chunk_size=1000, stabilizers=0, local_len=1))
    logits = prefill(model, tensors["prompt_ids"], cache)
    torch.testing.assert_close(logits[0], tensors["full.last_logits"], atol=1e-4, rtol=0)
    for layer in range(meta["num_layers"]):
        scores = cache.kept_scores(layer)[0].transpose(0, 1)
        torch.testing.assert_close(scores, tensors["full.scores"][layer], atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_generation_stops_at_eos_as_the_original_does_but_never_before_it_says_so(case: str) -> None:
    # The original emits an eos that comes first and then goes on; transformers' generate stops there, and keeps it.
    model, _, tensors, meta = load(case)
    for row in meta["eos_cases"]:
        if row["eos_token_id"] < 0 or row["tokens"][0] == row["eos_token_id"]:
            continue
        ids = generate(
            model,
            tensors["prompt_ids"],
            cache=new_cache(case, row["setting"]),
            max_new_tokens=row["max_new_tokens"],
            do_sample=False,
            eos_token_id=row["eos_token_id"],
            pad_token_id=0,
        )
        new = ids[0, tensors["prompt_ids"].shape[1] :].tolist()
        assert new == [*row["tokens"], row["eos_token_id"]]
