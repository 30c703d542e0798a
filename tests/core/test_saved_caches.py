"""Caches (commit f146390) and a context (024abd6) of earlier versions load and answer as they did then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from families import build
from safetensors.torch import save_file
from test_damaged_files import content

from locret import LongContextModel, RetentionCache, RetentionPolicy, compose, generate, load_cache, prefill, save_cache
from locret.cache.schema import checksum
from locret.engines.prefix import Prefix

FOLDER = Path(__file__).with_name("saved_caches")
ANSWERS = json.loads((FOLDER / "answers.json").read_text())


@pytest.mark.parametrize("name", ANSWERS)
def test_a_cache_saved_by_an_earlier_version_answers_as_it_did(name: str) -> None:
    saved = ANSWERS[name]
    model = build(saved["family"])
    with pytest.warns(UserWarning, match="unknown .the file does not record them"):
        cache = load_cache(FOLDER / f"{name}.safetensors", model, saved["scorer"])
    answer = generate(model, cache=cache, max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert answer.tolist() == saved["answer"]
    assert cache.kept_scores(cache.backbone.layers[0]).shape[:2] == (2, cache.backbone.num_kv_heads)


def test_a_context_of_an_earlier_version_does_what_every_context_does(tmp_path: Path) -> None:
    policy = RetentionPolicy(budget=32, chunk_size=64, stabilizers=8, local_len=8)
    lm = LongContextModel.from_pretrained("checkpoints/tiny", heads="checkpoints/tiny-heads", policy=policy)
    context, asked = lm.load(FOLDER / "context.ctx"), "What is the pass key?"
    answer, then = context.ask(asked, max_new_tokens=8), context.fork()
    then.cache.policy = then.cache.policy.changed(turns="text")  # as it was then
    assert then.ask(asked, max_new_tokens=8) == "712."
    assert context.shrink(6).memory().units == 6
    assert compose([context, lm.read("The grass is green. " * 20)]).ask(asked, max_new_tokens=8)
    context.save(tmp_path / "a.ctx")
    assert lm.load(tmp_path / "a.ctx").ask(asked, max_new_tokens=8) == answer
    with pytest.raises(ValueError, match="it was written by an earlier version; load it with its backbone, and save"):
        Prefix.from_file(FOLDER / "context.ctx")
    assert Prefix.from_file(tmp_path / "a.ctx").digest == Prefix.of(context).digest


def _read_something(scorer: str = "streaming") -> RetentionCache:
    model = build("llama")
    cache = RetentionCache(model, scorer, RetentionPolicy(budget=8, chunk_size=8, stabilizers=2, local_len=2))
    prefill(model, torch.arange(24)[None] + 3, cache)
    return cache


def test_what_retired_features_have_written_is_left_out(tmp_path: Path) -> None:
    cache, path = _read_something("expected_attention"), tmp_path / "a.ctx"
    save_cache(cache, path)
    metadata, tensors = content(path)
    state = json.loads(metadata["state"])
    state["policy"] |= {"ledger": 8, "refit": True, "merge": "d2o:threshold=0.5", "host_by": "recency"}
    state["policy"] |= {"layer_budgets": "shares", "layer_shares": [1.0, 2.0, 3.0]}
    state["scorer"]["options"] |= {"covariance": True, "value_norm": True, "epsilon": 0.0}
    for index in cache.backbone.layers:
        tensors[f"layers.{index}.ledger"] = torch.full((2, 8), -torch.inf)
        state["layers"][index] |= {"ledger_width": 32, "ledger_end": 24}
    text = json.dumps(state)
    save_file(tensors, path, metadata={"state": text, "notes": "{}", "checksum": checksum(text, tensors)})
    loaded = load_cache(path, cache.model, "expected_attention")
    assert loaded.policy == cache.policy
    assert torch.equal(loaded.kept_positions(0), cache.kept_positions(0))
    for given, what in {"ledger": (8, 'policy field "ledger"'), "merge": ("d2o:threshold=0.5", 'merge "d2o"')}.items():
        with pytest.raises(ValueError, match=f"{what[1]} was retired; release 0.1.0"):
            RetentionCache(cache.model, "streaming", {"budget": 8, given: what[0]})


def test_codes_of_a_retired_rounding_are_read(tmp_path: Path) -> None:
    """A file that says "rotated" holds what today's "earlier_rotated" writes."""
    model, path = build("llama"), tmp_path / "a.ctx"
    codes = {"budget": 8, "key_bits": 4, "value_bits": 8, "rounding": "rotated:group=4"}
    with pytest.raises(ValueError, match='rounding "rotated" was retired; release 0.1.0'):
        RetentionCache(model, "streaming", codes)
    cache = RetentionCache(model, "streaming", RetentionPolicy(**{**codes, "rounding": "earlier_rotated:group=4"}))
    prefill(model, torch.arange(24)[None] + 3, cache)
    save_cache(cache, path)
    metadata, tensors = content(path)
    text = metadata["state"].replace("earlier_rotated", "rotated")
    save_file(tensors, path, metadata={"state": text, "notes": "{}", "checksum": checksum(text, tensors)})
    answers = [generate(model, cache=one, max_new_tokens=8) for one in (cache, load_cache(path, model, "streaming"))]
    assert torch.equal(*answers)
