"""The fingerprint of weights: equal for equal weights however loaded, different for others, and a warning, no more."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

from locret.heads.fingerprint import weight_fingerprint
from locret.heads.heads import RetainingHeads


def test_the_fingerprint_is_of_the_weights_whatever_their_type(tiny_llama, tmp_path):
    fingerprint = weight_fingerprint(tiny_llama)
    assert len(fingerprint) == 64
    tiny_llama.save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        assert weight_fingerprint(type(tiny_llama).from_pretrained(tmp_path, dtype=dtype)) == fingerprint


def test_other_values_names_or_shapes_have_another_fingerprint(tiny_llama):
    first = weight_fingerprint(tiny_llama)
    changed = copy.deepcopy(tiny_llama)
    with torch.no_grad():
        changed.model.layers[1].mlp.up_proj.weight.mul_(1.1)
    assert weight_fingerprint(changed) != first
    one, other, third = torch.nn.Linear(4, 2, bias=False), torch.nn.Linear(2, 4, bias=False), torch.nn.Module()
    for layer in (one, other):
        torch.nn.init.ones_(layer.weight)
    third.register_parameter("gain", torch.nn.Parameter(torch.ones(2, 4)))
    assert len({weight_fingerprint(module) for module in (one, other, third)}) == 3


def test_weights_that_are_not_as_they_were_saved_have_none(tiny_llama):
    assert weight_fingerprint(copy.deepcopy(tiny_llama).half()) is None
    assert weight_fingerprint(tiny_llama.to("meta")) is None


def test_heads_on_other_weights_warn_in_one_sentence_and_on_their_own_do_not(tiny_llama, tmp_path):
    heads = RetainingHeads.for_model(tiny_llama, 4).annotate(base_weights=weight_fingerprint(tiny_llama))
    heads.save_pretrained(tmp_path)
    loaded = RetainingHeads.from_pretrained(tmp_path)
    assert (
        f"| Backbone weights | fingerprint {loaded.config.base_weights[:12]} |" in (tmp_path / "README.md").read_text()
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded.check_matches(tiny_llama)
        loaded.check_matches(tiny_llama.config)  # a config has no weights
        RetainingHeads.for_model(tiny_llama, 4).check_matches(type(tiny_llama)(tiny_llama.config))
    with pytest.warns(
        UserWarning, match=r"trained on other weights of this shape \(fingerprint \w{12}, the model's is"
    ):
        loaded.check_matches(type(tiny_llama)(tiny_llama.config))


def test_a_backbone_is_read_once_for_all_its_caches_and_another_one_anew(tiny_llama, tmp_path, monkeypatch):
    heads = RetainingHeads.for_model(tiny_llama, 8).annotate(base_weights=weight_fingerprint(tiny_llama))
    read = []
    monkeypatch.setattr(
        "locret.heads.heads.weight_fingerprint", lambda model: read.append(model) or weight_fingerprint(model)
    )
    other = copy.deepcopy(tiny_llama)
    for model in (tiny_llama, tiny_llama, other, tiny_llama, other):
        heads.check_matches(model)
    assert len(read) == 2
    assert read[0] is tiny_llama
    assert read[1] is other
