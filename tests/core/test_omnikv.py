"""OmniKV: its selectors by hand, its layers and its memory as published, and the oracle against full attention."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import oracle as reference
import pytest
import torch
from families import build, prompt
from lookup_runs import LAYERS, answered, differs_from_oracle, fresh, method
from transformers import AutoModelForCausalLM

from locret import RetentionCache, RetentionPolicy, load_cache, lookups, prefill, save_cache
from locret.lookups.omnikv import dense_layers, memory_share
from locret.shipped import find

PUBLISHED = {
    "Llama-3-8B": ((2, 8, 18), 32, (0, 1, 2, 3, 8, 9, 18, 19)),
    "Yi-9B": ((6, 11, 30), 48, (0, 1, 2, 3, 4, 5, 6, 7, 11, 12, 30, 31)),
    "Yi-9B, multi-step": ((3, 11, 30), 48, (0, 1, 2, 3, 4, 11, 12, 30, 31)),
    "Llama-3.1-70B": ((4, 19, 41), 80, (0, 1, 2, 3, 4, 5, 19, 20, 41, 42)),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_dense_layers_and_memory_are_the_published_ones(name: str) -> None:
    filters, layers, dense = PUBLISHED[name]
    assert tuple(reference.dense_layers(filters, layers)) == dense
    assert tuple(dense_layers(filters, layers)) == dense
    assert reference.memory_share(filters, layers, 0.0) == len(dense) / layers
    for ratio in (0.0, 0.0667, 0.5, 1.0):
        share = reference.memory_share(filters, layers, ratio)
        assert math.isclose(share, memory_share(filters, layers, ratio))


def test_selectors_weigh_the_window_as_the_paper_says() -> None:
    assert reference.window_weights("uniform", 3) == [1, 1, 1]
    assert reference.window_weights("exp", 3) == [1 / 8, 1 / 4, 1 / 2]
    assert reference.window_weights("last", 3) == [0, 0, 1]


# -- the lookup -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
@pytest.mark.parametrize(
    ("options", "newest"),
    [
        ("", 1),
        (",selector=raw", 1),
        (",selector=exp,window=5", 5),
        (",selector=uniform,window=5", 5),
        (",prefill=1", 1),
    ],
)
@pytest.mark.parametrize("tokens", [61, 20, 3])
def test_answers_are_the_oracles(family: str, options: str, newest: int, tokens: int) -> None:
    model, spec = build(family, **LAYERS), f"omnikv:filter_layers=0-3{options}"
    lookup: Any = lookups.get(spec)
    scaling, sparse = model.model.layers[0].self_attn.scaling, 17 if lookup.prefill else tokens
    rest = tokens - 1
    passes = [min(sparse, rest - start) for start in range(0, rest, sparse)]
    numbers = (lookup.selector, lookup.window, min(newest, rest), lookup.prefill)
    visible = reference.omnikv_visible((0, 3), 6, rest, 12, scaling, *numbers)
    ours, full = differs_from_oracle(model, prompt(tokens), method(spec, 12), passes, visible)
    assert ours < 3e-5
    assert (full > 0.1) == (tokens > 14 + newest)


@pytest.mark.parametrize("options", ["", ",selector=exp,window=5", ",tokens=0.25"])
def test_rows_turns_and_files_do_not_matter(options: str, tmp_path: Path) -> None:
    model, ids = build("llama", **LAYERS), prompt(61, batch=2)
    policy = method(f"omnikv:filter_layers=0-3{options}", 9)
    mask = torch.ones_like(ids)
    mask[1, :20] = 0
    both = answered(model, fresh(model, policy), ids, attention_mask=mask).logits
    first, second = (answered(model, fresh(model, policy), row).logits for row in (ids[:1], ids[1:, 20:]))
    turns = fresh(model, policy)
    prefill(model, ids[:1, :40], turns)  # a second text is read densely too, the first one's units included
    prefill(model, ids[:1, 40:], turns)
    later = answered(model, turns.copy(), None).logits
    save_cache(turns, tmp_path / "text.ctx")
    loaded = answered(model, load_cache(tmp_path / "text.ctx", model, "streaming:sinks=0"), None).logits
    for pair, one, other, third, fourth in zip(both, first, second, later, loaded, strict=True):
        torch.testing.assert_close(pair, torch.cat([one, other]), atol=1e-4, rtol=0)
        torch.testing.assert_close(third, one, atol=1e-4, rtol=0)
        torch.testing.assert_close(fourth, third, atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def tiny() -> Any:
    return AutoModelForCausalLM.from_pretrained(find("checkpoints/tiny")).eval()


def test_layers_share_one_set_of_tokens_and_heads_that_differ_take_the_best_they_hold() -> None:
    model, ids = build("llama", **LAYERS), prompt(61)
    policy = method("omnikv:filter_layers=1", 9)
    taken: list[Any] = []

    class Spy(lookups.OmniKVLookup):
        def choose(self, ask: Any) -> Any:
            ranks = super().choose(ask)
            taken.append((ask.nth, ask.positions, ranks))
            return ranks

    for scorer, shared in (("streaming:sinks=0", True), ("random", False)):
        taken.clear()
        cache = RetentionCache(model, scorer, policy)
        for layer in cache.governed:
            layer.host.lookup = Spy(filter_layers=1)  # type: ignore[union-attr]
        answered(model, cache, ids, tokens=1)
        chosen = [(positions, ranks) for _, positions, ranks in taken[-3:]]
        assert [nth for nth, _, ranks in taken if ranks is None][-3:] == [0, 1, 2]
        tokens = [p.gather(2, r[:, :, 0].expand(-1, 2, -1)) for p, r in chosen]
        assert all(one.shape == (1, 2, 9) for one in tokens)
        alike = all(bool((one == tokens[0][:, :1]).all()) for one in tokens)
        assert alike == shared


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("filter_layers=8-2", "filter_layers=8-2 are not layers in ascending order; write 2-8-18"),
        ("filter_layers=2-x", "filter_layers=2-x are not layers"),
        ("selector=first", 'selector="first" is unknown; choose one of uniform, exp, last, raw'),
        ("tokens=0", "tokens=0 is neither a number of units nor a share"),
        ("tokens=1.5", "tokens=1.5 is neither"),
        ("memory=1.5", "memory=1.5 is not a share"),
        ("tokens=9,memory=0.5", "tokens=9 and memory=0.5 both say"),
        ("window=0", "window=0 is too small"),
        ("window=4", "window=4 is what uniform and exp look from"),
        ("prefill=-1", "prefill=-1 is too small"),
        ("filters=2", 'has no option "filters"; did you mean filter_layers'),
    ],
)
def test_options_that_mean_nothing_are_refused(options: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        lookups.get(f"omnikv:{options}")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("filter_layers=2-9", "filter_layers=2-9 names layers that a backbone of 6 does not have"),
        ("filter_layers=4", "filter_layers=4 leave no sparse layer of 6"),
        ("memory=0.5", "memory=0.5 is no more than the dense layers take, 0.5"),
        ("tokens=100", "tokens=100, but recall=8; leave tokens out, or recall as many"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_anything_is_read(options: str, says: str) -> None:
    policy = RetentionPolicy(budget=8, host_budget=64, recall=8, recall_by=f"omnikv:{options}")
    with pytest.raises(ValueError, match=says):
        RetentionCache(build("llama", **LAYERS), "random", policy)
