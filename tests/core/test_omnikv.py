"""OmniKV: its selectors by hand, its layers and its memory as published, and the oracle against full attention."""

from __future__ import annotations

import math

import pytest
import torch
from families import build, prompt

from locret import reference

PUBLISHED = {
    "Llama-3-8B": ((2, 8, 18), 32, (0, 1, 2, 3, 8, 9, 18, 19)),
    "Yi-9B": ((6, 11, 30), 48, (0, 1, 2, 3, 4, 5, 6, 7, 11, 12, 30, 31)),
    "Yi-9B, multi-step": ((3, 11, 30), 48, (0, 1, 2, 3, 4, 11, 12, 30, 31)),
    "Llama-3.1-70B": ((4, 19, 41), 80, (0, 1, 2, 3, 4, 5, 19, 20, 41, 42)),
}
FIVE = {"num_hidden_layers": 5, "layer_types": ["full_attention"] * 5}
INV_FREQ = 10000.0 ** -(torch.arange(0, 8, 2).float() / 8)


@pytest.mark.parametrize("name", PUBLISHED)
def test_dense_layers_and_memory_are_the_published_ones(name: str) -> None:
    filters, layers, dense = PUBLISHED[name]
    assert tuple(reference.dense_layers(filters, layers)) == dense
    assert reference.memory_share(filters, layers, 0.0) == len(dense) / layers
    ratio = (0.3 - len(dense) / layers) / (1 - len(dense) / layers)
    assert math.isclose(reference.memory_share(filters, layers, ratio), 0.3)


def test_selectors_weigh_the_window_as_the_paper_says() -> None:
    assert reference.window_weights("uniform", 3) == [1, 1, 1]
    assert reference.window_weights("exp", 3) == [1 / 8, 1 / 4, 1 / 2]
    assert reference.window_weights("last", 3) == [0, 0, 1]


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        # Head 0 shares 1/4, 3/4 and then 1/2, 1/2; head 1 shares 1/2, 1/2 and then 4/5, 1/5.
        ("uniform", [1 / 2 + 4 / 5, 3 / 4 + 1 / 2]),
        ("exp", [1 / 2 / 4 + 4 / 5 / 2, 3 / 4 / 4 + 1 / 2 / 2]),
        ("last", [4 / 5, 1 / 2]),
        ("raw", [math.log(4), 0.0]),
    ],
)
def test_context_scores_of_two_tokens_by_hand(selector: str, expected: list[float]) -> None:
    key_KSD = torch.eye(2)[None]
    logits = torch.tensor([[[0.0, math.log(3)], [0.0, 0.0]], [[0.0, 0.0], [math.log(4), 0.0]]])  # (N, W, S)
    found = reference.context_scores(logits, key_KSD, 1.0, selector)
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
@torch.no_grad()
def test_oracle_that_selects_everything_is_full_attention(family: str) -> None:
    model, ids = build(family, **FIVE), prompt(43)
    scaling = model.model.layers[0].self_attn.scaling
    answers = reference.omnikv_visible((1, 3), 5, 38, 38, scaling)
    reading = reference.omnikv_prefill_visible((1, 3), 5, 38, 9, 38 / 9, scaling)
    for passes, visible in (([38, 1, 1, 1, 1, 1], answers), ([9, 9, 9, 9, 2, 1, 1, 1, 1, 1], reading)):
        logits = reference.read_by_choice(model, ids[0], passes, INV_FREQ, 1.0, visible)
        torch.testing.assert_close(logits[-5:], model(ids).logits[0, -5:], atol=1e-4, rtol=0)
