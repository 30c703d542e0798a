"""Retaining heads: their arithmetic, their dtype and the match with a backbone."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoConfig, Gemma3TextConfig, LlamaConfig

from locret.heads.heads import RetainingHead, RetainingHeads

FEATURES = (4 + 2 * 2) * 8  # of the tiny Llama


@pytest.fixture
def heads(tiny_llama) -> RetainingHeads:
    return RetainingHeads.for_model(tiny_llama, hidden_dim=12, seed=3)


def same_weights(one: RetainingHeads, other: RetainingHeads) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


# ---- one head


def test_a_head_on_the_meta_device_is_no_memory_at_all():
    with torch.device("meta"):
        head = RetainingHead(64, 10**12, 2)
    assert {weight.device.type for weight in head.parameters()} == {"meta"}


def test_a_head_is_two_products_with_the_activation_between():
    head = RetainingHead(6, 5, 2, "gelu_pytorch_tanh")
    features = torch.randn(3, 4, 6)
    by_hand = torch.nn.functional.gelu(features @ head.fc1.weight.T, approximate="tanh") @ head.fc2.weight.T
    torch.testing.assert_close(head(features), by_hand)
    assert head(features).shape == (3, 4, 2)
    assert sorted(head.state_dict()) == ["fc1.weight", "fc2.weight"]


def test_an_unknown_activation_names_the_known_ones():
    with pytest.raises(ValueError, match="activation 'sulu' is unknown to transformers; use one of .*silu"):
        RetainingHead(6, 5, 2, "sulu")


def test_features_of_another_width_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match="features are 7 wide but this retaining head reads 6"):
        RetainingHead(6, 5, 2)(torch.zeros(1, 7))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_features_give_float32_scores_near_the_exact_ones(dtype):
    head = RetainingHead(64, 32, 2, initializer_range=0.2)
    features = torch.randn(500, 64).to(dtype)
    with torch.no_grad():
        exact, fast = head(features.float()), head(features)
    assert fast.dtype == torch.float32
    torch.testing.assert_close(fast, exact, atol=0.05, rtol=0.05)
    assert not torch.equal(fast, exact)  # else the product did not run in the features' dtype
    assert fast[:, 0].unique().numel() > 490  # scores rounded to bfloat16 would tie in their hundreds


def test_weights_are_cast_once_and_again_after_every_kind_of_change():
    head = RetainingHead(8, 4, 1)
    features = torch.randn(5, 8).bfloat16()

    def scores_and_copy():
        with torch.no_grad():
            return head(features), head._cast[1]

    before, first = scores_and_copy()
    assert scores_and_copy()[1] is first
    changes = [
        lambda: torch.optim.AdamW(head.parameters(), lr=0.1).step(),
        lambda: head.load_state_dict({name: value + 1 for name, value in head.state_dict().items()}),
        lambda: head.fc1.weight.mul_(2),
        lambda: setattr(head.fc1, "weight", torch.nn.Parameter(torch.ones(4, 8))),
    ]
    for change in changes:
        head.fc1.weight.grad = torch.ones(4, 8)
        with torch.no_grad():
            change()
        after, copied = scores_and_copy()
        assert copied is not first
        assert not torch.equal(before, after)
        before, first = after, copied
        torch.testing.assert_close(copied, head.fc1.weight.detach().bfloat16())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_modes_agree(mode):
    with mode():
        head = RetainingHead(8, 4, 1, generator=torch.Generator().manual_seed(0))
        scores = head(torch.ones(2, 8).bfloat16())
    expected = RetainingHead(8, 4, 1, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(scores, expected(torch.ones(2, 8).bfloat16()))


def test_gradients_are_those_of_float32_arithmetic_even_from_bfloat16_features():
    head = RetainingHead(8, 4, 1, initializer_range=0.5)
    features = torch.randn(5, 8).bfloat16()
    head(features).sum().backward()
    low = head.fc1.weight.grad.clone()
    head.zero_grad()
    head(features.float()).sum().backward()
    assert low.dtype == torch.float32
    assert torch.equal(low, head.fc1.weight.grad)


def test_autocast_decides_the_arithmetic_but_not_the_scores_dtype():
    head = RetainingHead(8, 4, 1, initializer_range=0.5)
    features = torch.randn(5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        scores = head(features)
    assert scores.dtype == torch.float32
    assert not torch.equal(scores, head(features))
    scores.sum().backward()
    assert head.fc1.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("change", [lambda m: m.bfloat16(), lambda m: m.half(), lambda m: m.to(torch.float64)])
def test_weights_stay_float32_whatever_dtype_is_asked_for(heads, change):
    before = copy.deepcopy(heads)
    change(heads)
    assert {weight.dtype for weight in heads.parameters()} == {torch.float32}
    assert same_weights(heads, before)  # not rounded on the way either


# ---- the heads of a backbone


def test_golden_shapes(golden_case):
    config = AutoConfig.from_pretrained(golden_case)
    heads = RetainingHeads.for_model(config, hidden_dim=7)
    width = (
        (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
        if golden_case.name[0] != "C"
        else 192
    )
    scores = heads[0](torch.zeros(2, 5, width))
    assert scores.shape == (2, 5, config.num_key_value_heads)
    assert len(heads) == config.num_hidden_layers


def test_same_seed_same_heads_and_the_global_generator_is_untouched(tiny_llama):
    state = torch.random.get_rng_state()
    one, two, other = (RetainingHeads.for_model(tiny_llama, 12, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(state, torch.random.get_rng_state())
    assert same_weights(one, two)
    assert not same_weights(one, other)


def test_untrained_weights_have_the_backbones_standard_deviation(tiny_llama):
    tiny_llama.config.initializer_range = 0.5
    weight = RetainingHeads.for_model(tiny_llama, 512, seed=0)[0].fc1.weight
    assert abs(weight.std().item() - 0.5) < 0.01
    assert abs(weight.mean().item()) < 0.01


def test_only_full_attention_layers_have_a_head():
    config = Gemma3TextConfig(
        num_hidden_layers=7, sliding_window=16, num_attention_heads=4, num_key_value_heads=1, head_dim=8, hidden_size=32
    )
    heads = RetainingHeads.for_model(config, 4)
    assert list(heads) == [5]
    assert 5 in heads
    assert 0 not in heads
    with pytest.raises(KeyError, match=r"layer 0 has no retaining head; the layers with one are \[5\]"):
        heads[0]


@pytest.mark.parametrize("hidden_dim", [0, -1, 1.5])
def test_a_hidden_dim_that_is_no_positive_integer_is_refused(tiny_llama, hidden_dim):
    with pytest.raises(ValueError, match=f"hidden_dim={hidden_dim} is not a number of at least 1"):
        RetainingHeads.for_model(tiny_llama, hidden_dim)


def test_heads_match_their_backbone_given_as_model_or_config(heads, tiny_llama):
    heads.check_matches(tiny_llama)
    heads.check_matches(tiny_llama.config)


def test_a_mismatch_names_every_difference_with_both_sides(heads):
    other = LlamaConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, head_dim=8, hidden_act="gelu"
    )
    with pytest.raises(ValueError, match="the retaining heads do not belong to this model") as error:
        heads.check_matches(other)
    text = str(error.value)
    assert "num_hidden_layers is 2 in the heads and 3 in the model" in text
    assert "layers is [0, 1] (2 layers) in the heads and [0, 1, 2] (3 layers) in the model" in text
    assert "num_key_value_heads is 2 in the heads and 4 in the model" in text
    assert "hidden_act is silu in the heads and gelu in the model" in text
    assert "train heads for this model" in text
    assert "\n" not in text


def test_another_base_model_of_equal_shape_is_refused_unless_allowed(tiny_llama, tmp_path):
    tiny_llama.config._name_or_path = "org/base"
    RetainingHeads.for_model(tiny_llama, 4).save_pretrained(tmp_path / "h")
    tiny_llama.config._name_or_path = "org/finetune"
    heads = RetainingHeads.from_pretrained(tmp_path / "h")
    message = "base_model is org/base in the heads and org/finetune in the model; .*pass allow_other_base=True"
    with pytest.raises(ValueError, match=message):
        heads.check_matches(tiny_llama)
    heads.check_matches(tiny_llama, allow_other_base=True)
    RetainingHeads.from_pretrained(tmp_path / "h", allow_other_base=True).check_matches(tiny_llama)
    tiny_llama.config._name_or_path = "Org/Base"  # the Hub ignores case
    heads.check_matches(tiny_llama)


def test_a_backbone_from_a_folder_has_no_name_to_compare(tiny_llama, tmp_path):
    tiny_llama.config._name_or_path = str(tmp_path)
    heads = RetainingHeads.for_model(tiny_llama, 4)
    assert heads.config.base_model is None
    tiny_llama.config._name_or_path = "org/other"
    heads.check_matches(tiny_llama)


def test_the_download_cache_gives_name_and_revision(tiny_llama):
    commit = "0123456789abcdef0123456789abcdef01234567"
    tiny_llama.config._name_or_path = f"/home/me/.cache/huggingface/hub/models--org--base/snapshots/{commit}"
    config = RetainingHeads.for_model(tiny_llama, 4).config
    assert (config.base_model, config.base_model_revision) == ("org/base", commit)


def test_an_unknown_note_lists_the_possible_ones(heads):
    with pytest.raises(ValueError, match="'polcy' cannot be noted on retaining heads; the choices are .*policy"):
        heads.annotate(polcy={})
