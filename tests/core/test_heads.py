"""Retaining heads: their arithmetic, their dtype, the match with a backbone, and fingerprints of weights."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from transformers import LlamaConfig

from locret.heads.fingerprint import weight_fingerprint
from locret.heads.heads import RetainingHead, RetainingHeads


@pytest.fixture
def heads(tiny_llama) -> RetainingHeads:
    return RetainingHeads.for_model(tiny_llama, hidden_dim=12, seed=3)


def same_weights(one: RetainingHeads, other: RetainingHeads) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_head_is_two_products_with_the_activation_between():
    head = RetainingHead(6, 5, 2, "gelu_pytorch_tanh")
    features = torch.randn(3, 4, 6)
    by_hand = torch.nn.functional.gelu(features @ head.fc1.weight.T, approximate="tanh") @ head.fc2.weight.T
    torch.testing.assert_close(head(features), by_hand)
    with pytest.raises(ValueError, match="features are 7 wide but this retaining head reads 6"):
        head(torch.zeros(1, 7))
    with pytest.raises(ValueError, match="activation 'sulu' is unknown to transformers; use one of .*silu"):
        RetainingHead(6, 5, 2, "sulu")


def test_low_precision_gives_float32_scores_and_gradients_near_the_exact_ones():
    head = RetainingHead(64, 32, 2, initializer_range=0.2)
    features = torch.randn(500, 64).bfloat16()
    with torch.no_grad():
        exact, fast = head(features.float()), head(features)
    assert fast.dtype == torch.float32
    torch.testing.assert_close(fast, exact, atol=0.05, rtol=0.05)
    assert not torch.equal(fast, exact)  # else the product did not run in the features' dtype
    assert fast[:, 0].unique().numel() > 490  # scores rounded to bfloat16 would tie in their hundreds
    found = []
    for given in (features, features.float()):
        head.zero_grad()
        head(given).sum().backward()
        found.append(head.fc1.weight.grad.clone())
    assert torch.equal(*found)
    with torch.autocast("cpu", torch.bfloat16):
        assert head(features.float()).dtype == torch.float32


def test_low_precision_sees_every_kind_of_change_of_the_weights():
    head = RetainingHead(8, 4, 1)
    features = torch.randn(5, 8).bfloat16()

    def scores():
        with torch.no_grad():
            return head(features)

    before = scores()
    for change in (
        lambda: torch.optim.AdamW(head.parameters(), lr=0.1).step(),
        lambda: head.load_state_dict({name: value + 1 for name, value in head.state_dict().items()}),
        lambda: head.fc1.weight.mul_(2),
        lambda: setattr(head.fc1, "weight", torch.nn.Parameter(torch.ones(4, 8))),
    ):
        head.fc1.weight.grad = torch.ones(4, 8)
        with torch.no_grad():
            change()
        after = scores()
        assert not torch.equal(before, after)
        before = after


def test_weights_stay_float32_whatever_dtype_is_asked_for(heads):
    before = copy.deepcopy(heads)
    heads.bfloat16()
    assert {weight.dtype for weight in heads.parameters()} == {torch.float32}
    assert same_weights(heads, before)  # not rounded on the way either


def test_the_seed_decides_and_the_global_generator_is_untouched(tiny_llama):
    tiny_llama.config.initializer_range = 0.5
    state = torch.random.get_rng_state()
    one, two, other = (RetainingHeads.for_model(tiny_llama, 512, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(state, torch.random.get_rng_state())
    assert same_weights(one, two)
    assert not same_weights(one, other)
    assert one[0].fc1.weight.std().item() == pytest.approx(0.5, abs=0.01)
    with pytest.raises(ValueError, match="hidden_dim=0 is too small; it must be 1 or more"):
        RetainingHeads.for_model(tiny_llama, 0)


def test_a_mismatch_names_every_difference_with_both_sides(heads, tiny_llama):
    heads.check_matches(tiny_llama)
    heads.check_matches(tiny_llama.config)
    other = LlamaConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, head_dim=8, hidden_act="gelu"
    )
    with pytest.raises(ValueError, match="the retaining heads do not belong to this model") as error:
        heads.check_matches(other)
    for text in (
        "layers is [0, 1] (2 layers) in the heads and [0, 1, 2] (3 layers) in the model",
        "num_key_value_heads is 2 in the heads and 4 in the model",
        "train heads for this model",
    ):
        assert text in str(error.value)


def test_another_base_model_of_equal_shape_is_refused_unless_allowed(tiny_llama, tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    tiny_llama.config._name_or_path = f"/home/me/.cache/huggingface/hub/models--org--base/snapshots/{commit}"
    RetainingHeads.for_model(tiny_llama, 4).save_pretrained(tmp_path / "h")
    heads = RetainingHeads.from_pretrained(tmp_path / "h")
    assert (heads.config.base_model, heads.config.base_model_revision) == ("org/base", commit)
    tiny_llama.config._name_or_path = "org/finetune"
    message = "base_model is org/base in the heads and org/finetune in the model; .*pass allow_other_base=True"
    with pytest.raises(ValueError, match=message):
        heads.check_matches(tiny_llama)
    heads.check_matches(tiny_llama, allow_other_base=True)
    RetainingHeads.from_pretrained(tmp_path / "h", allow_other_base=True).check_matches(tiny_llama)
    for name in ("Org/Base", str(tmp_path)):  # the Hub ignores case, and a folder proves nothing
        tiny_llama.config._name_or_path = name
        heads.check_matches(tiny_llama)


# -- fingerprints ----------------------------------------------------------------------------------------------------


def test_a_fingerprint_is_the_same_in_bfloat16_and_another_for_other_weights_names_or_shapes(tiny_llama):
    first = weight_fingerprint(tiny_llama)
    assert first == weight_fingerprint(copy.deepcopy(tiny_llama).bfloat16())
    assert first != weight_fingerprint(type(tiny_llama)(tiny_llama.config))
    one, other, third = torch.nn.Linear(4, 2, bias=False), torch.nn.Linear(2, 4, bias=False), torch.nn.Module()
    for layer in (one, other):
        torch.nn.init.ones_(layer.weight)
    third.register_parameter("gain", torch.nn.Parameter(torch.ones(2, 4)))
    assert len({weight_fingerprint(module) for module in (one, other, third)}) == 3
    assert weight_fingerprint(copy.deepcopy(tiny_llama).half()) is None
    assert weight_fingerprint(tiny_llama.to("meta")) is None


def test_heads_on_other_weights_warn_once_for_each_backbone(tiny_llama, tmp_path):
    heads = RetainingHeads.for_model(tiny_llama, 4).annotate(base_weights=weight_fingerprint(tiny_llama))
    heads.save_pretrained(tmp_path)
    loaded, other = RetainingHeads.from_pretrained(tmp_path), type(tiny_llama)(tiny_llama.config)
    with pytest.warns(UserWarning, match=r"trained on other weights of this shape \(fingerprint \w{12}, the model's"):
        loaded.check_matches(other)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded.check_matches(other)
        loaded.check_matches(tiny_llama)
        loaded.check_matches(tiny_llama.config)  # a config has no weights
