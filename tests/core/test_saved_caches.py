"""Caches saved by earlier versions (commit f146390) load and answer as they did then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from families import build

from locret import generate, load_cache

FOLDER = Path(__file__).with_name("saved_caches")
ANSWERS = json.loads((FOLDER / "answers.json").read_text())


@pytest.mark.parametrize("name", ANSWERS)
def test_a_cache_saved_by_an_earlier_version_answers_as_it_did(name: str) -> None:
    saved = ANSWERS[name]
    model = build(saved["family"])
    cache = load_cache(FOLDER / f"{name}.safetensors", model, saved["scorer"])
    answer = generate(model, cache=cache, max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert answer.tolist() == saved["answer"]
    assert cache.kept_scores(cache.backbone.layers[0]).shape[:2] == (2, cache.backbone.num_kv_heads)
