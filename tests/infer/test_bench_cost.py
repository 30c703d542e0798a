"""Work is what a count by hand gives."""

from __future__ import annotations

import torch
from transformers import Gemma2Config, LlamaConfig, Phi3Config

from locret.infer.speed.cost import Cost, Pass, cost, sizes_of

LLAMA = LlamaConfig(
    vocab_size=11,
    hidden_size=8,
    intermediate_size=5,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=2,
)
# Per layer q 8x8, k and v 8x4 each, o 8x8, gate, up and down 8x5 each.
LINEAR = 2 * (64 + 32 + 32 + 64 + 120)


def test_weights_are_those_of_matrices() -> None:
    sizes = sizes_of(LLAMA, torch.bfloat16)
    assert (sizes.linear, sizes.lm_head, sizes.element_size) == (LINEAR, 88, 2)
    embeddings_and_norms = 88 + 5 * 8
    rotary = 2 * 4  # one frequency, in float32, held twice
    assert sizes.weight_bytes == 2 * (LINEAR + 88 + embeddings_and_norms) + rotary


def test_fused_projections_count_like_separate_ones() -> None:
    same = {name: getattr(LLAMA, name) for name in ("vocab_size", "hidden_size", "intermediate_size")}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    fused = sizes_of(Phi3Config(**same, **layers), torch.float32)
    assert fused.linear == LINEAR


def test_a_pass_multiplies_every_weight_once_per_token_and_every_visible_pair() -> None:
    sizes = sizes_of(LLAMA, torch.float32)
    # Three tokens after five units: they see 6, 7 and 8 of them, in each of two layers.
    one = cost(sizes, [Pass(3, (5, 5), 5, logits=1)])
    assert one.flops == 2 * LINEAR * 3 + 2 * 88 + 4 * 4 * 2 * (6 + 7 + 8) * 2
    # A unit is key and value of 2 heads of 2; 5 + 3 are looked at and 3 written.
    assert one.bytes == 4 * (LINEAR + 88 + 8 * 11 * 2)


def test_layers_may_hold_different_numbers_of_units() -> None:
    sizes = sizes_of(LLAMA, torch.float32)
    even, uneven = (cost(sizes, [Pass(1, held, 9)]) for held in ((4, 4), (1, 7)))
    assert even == uneven == Cost(2 * LINEAR + 32 * 10, 4 * (LINEAR + 8 * 12))


def test_a_window_bounds_what_sliding_layers_look_at() -> None:
    config = Gemma2Config(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=5,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=2,
        sliding_window=3,
    )
    sizes = sizes_of(config, torch.float32)
    assert sizes.backbone.layers == (1,)
    # Four tokens after one: the sliding layer's see 2, 3, 3 and 3, the other's 2, 3, 4 and 5.
    first = cost(sizes, [Pass(4, (1,), 1)])
    assert first.flops == 2 * LINEAR * 4 + 32 * (11 + 14)
    assert first.bytes == 4 * (LINEAR + 8 * 2 * (1 + 2 * 4))
    # After nine: always 3 of them, of which two are held.
    later = cost(sizes, [Pass(4, (9,), 9)])
    assert later.flops == 2 * LINEAR * 4 + 32 * (12 + 10 + 11 + 12 + 13)
    assert later.bytes == 4 * (LINEAR + 8 * (2 + 8 + 9 + 8))
