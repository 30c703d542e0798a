"""Retaining heads: their arithmetic and their dtype, the match with a backbone, and strict, whole checkpoints."""

from __future__ import annotations

import copy
import json
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, Gemma3TextConfig, LlamaConfig

from locret import checkpoint
from locret.heads import RetainingHead, RetainingHeads

FEATURES = (4 + 2 * 2) * 8  # of the tiny Llama


@pytest.fixture
def heads(tiny_llama) -> RetainingHeads:
    return RetainingHeads.for_model(tiny_llama, hidden_dim=12, seed=3)


@pytest.fixture
def saved(heads, tmp_path) -> Path:
    heads.save_pretrained(tmp_path / "heads")
    return tmp_path / "heads"


def edit_config(folder: Path, **changes) -> None:
    values = json.loads((folder / "config.json").read_text())
    values.update(changes)
    values = {name: value for name, value in values.items() if value != "REMOVE"}
    (folder / "config.json").write_text(json.dumps(values))


def edit_weights(folder: Path, edit) -> None:
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors")


def same_weights(one: RetainingHeads, other: RetainingHeads) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


# ---- one head


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


# ---- checkpoints


def test_saved_heads_load_identically_with_their_notes(heads, tmp_path):
    heads.annotate(
        label={"kind": "logit", "include_last_prompt_token": True}, policy={"budget": 64}, training={"steps": 3}
    )
    heads.save_pretrained(tmp_path / "deep" / "er")
    loaded = RetainingHeads.from_pretrained(tmp_path / "deep" / "er")
    assert same_weights(heads, loaded)
    assert loaded.config == heads.config
    assert not loaded.training
    assert sorted(os.listdir(tmp_path / "deep" / "er")) == ["README.md", "config.json", "model.safetensors"]
    assert len(os.listdir(tmp_path / "deep")) == 1


def test_loaded_heads_can_be_trained_even_from_inference_mode(saved):
    with torch.inference_mode():
        heads = RetainingHeads.from_pretrained(saved)
    heads[0](torch.ones(1, FEATURES)).sum().backward()
    assert heads[0].fc1.weight.grad is not None


def test_loaded_weights_do_not_change_with_the_file(saved):
    heads = RetainingHeads.from_pretrained(saved)
    before = heads[0].fc1.weight.clone()
    size = (saved / "model.safetensors").stat().st_size
    (saved / "model.safetensors").write_bytes(b"\xff" * size)
    assert torch.equal(heads[0].fc1.weight, before)


def test_config_json_holds_dimensions_and_provenance(saved):
    values = json.loads((saved / "config.json").read_text())
    expected = {
        "num_hidden_layers": 2,
        "layers": [0, 1],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    assert expected.items() <= values.items()
    assert values["hidden_dim"] == 12
    assert values["hidden_act"] == "silu"
    assert {"base_model", "base_model_revision", "label", "policy", "training", "toolkit_version"} <= values.keys()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_dim": "REMOVE"}, "is not the config of retaining heads .*give a folder written by locret-train"),
        ({"head_dim": "REMOVE"}, "lacks head_dim; the file is incomplete"),
        ({"hiden_act": "silu"}, "has an unknown key 'hiden_act'; did you mean 'hidden_act'"),
        ({"format_version": 9}, "has format_version 9, this toolkit .* reads 1; use the toolkit version that wrote it"),
        ({"head_dim": "8"}, "has head_dim='8', which is not of type int"),
        ({"layers": [0, "1"]}, r"has layers=\[0, '1'\]"),
        ({"layers": [1, 0]}, r"layers=\[1, 0\] must be ascending indices below num_hidden_layers=2"),
        ({"layers": [0, 2]}, r"layers=\[0, 2\] must be ascending indices below num_hidden_layers=2"),
        ({"policy": 5}, "has policy=5, which is not of type dict"),
        ({"hidden_act": "sulu"}, "activation 'sulu' is unknown to transformers"),
    ],
)
def test_a_config_that_is_not_exactly_right_is_refused(saved, changes, message):
    edit_config(saved, **changes)
    with pytest.raises(ValueError, match=message):
        RetainingHeads.from_pretrained(saved)


def test_broken_json_is_named(saved):
    (saved / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        RetainingHeads.from_pretrained(saved)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda w: w.pop("heads.1.fc2.weight"),
            r"has 3 weights but its config.json says 4 \(missing: heads.1.fc2.weight; unexpected: none\)",
        ),
        (
            lambda w: w.update(other=torch.zeros(1)),
            r"has 5 weights but its config.json says 4 \(missing: none; unexpected: other\)",
        ),
        (
            lambda w: w.update({"heads.2.fc1.weight": torch.zeros(1)}),
            r"has retaining heads for 3 layers \(layers 0, 1, 2\) but its config.json says 2 \(layers 0, 1\)",
        ),
        (
            lambda w: w.update({"heads.0.fc1.weight": torch.zeros(12, 60)}),
            r"heads.0.fc1.weight is \[12, 60\] in .*model.safetensors but \[12, 64\] by its config.json",
        ),
        (
            lambda w: w["heads.0.fc2.weight"].fill_(float("nan")),
            "heads.0.fc2.weight in .* holds values that are not finite",
        ),
    ],
)
def test_weights_that_do_not_fit_their_config_are_refused_with_both_sides(saved, edit, message):
    edit_weights(saved, edit)
    with pytest.raises(ValueError, match=message):
        RetainingHeads.from_pretrained(saved)


def test_weights_stored_in_bfloat16_load_as_float32(saved):
    edit_weights(saved, lambda w: w.update({name: value.bfloat16() for name, value in w.items()}))
    assert {weight.dtype for weight in RetainingHeads.from_pretrained(saved).parameters()} == {torch.float32}


def test_a_cut_off_weights_file_is_named(saved):
    whole = (saved / "model.safetensors").read_bytes()
    (saved / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a whole safetensors file"):
        RetainingHeads.from_pretrained(saved)


def test_pickled_weights_are_not_read(saved):
    torch.save(load_file(saved / "model.safetensors"), saved / "pytorch_model.bin")
    (saved / "model.safetensors").unlink()
    with pytest.raises(
        ValueError, match=r"has no model.safetensors \(it has .*pytorch_model.bin\); .* safetensors only"
    ):
        RetainingHeads.from_pretrained(saved)


def test_folders_that_are_missing_or_not_of_heads_are_named(tmp_path, golden_case, saved):
    with pytest.raises(
        ValueError, match="there is no folder './nowhere'; give a folder of retaining heads, or org/name"
    ):
        RetainingHeads.from_pretrained("./nowhere")
    with pytest.raises(ValueError, match="has no config.json, so it does not hold retaining heads"):
        RetainingHeads.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is a file; give the folder"):
        RetainingHeads.from_pretrained(saved / "config.json")
    with pytest.raises(ValueError, match="is not the config of retaining heads .*model_type is (llama|phi3)"):
        RetainingHeads.from_pretrained(golden_case)


def test_loading_without_strictness_is_refused(saved):
    with pytest.raises(ValueError, match="strict=False is not possible"):
        RetainingHeads.from_pretrained(saved, strict=False)


def test_saving_again_replaces_our_files_and_keeps_the_others(heads, saved, tiny_llama):
    (saved / "notes.txt").write_text("mine")
    other = RetainingHeads.for_model(tiny_llama, 6, seed=9)
    other.save_pretrained(saved)
    assert same_weights(RetainingHeads.from_pretrained(saved), other)
    assert sorted(os.listdir(saved)) == ["README.md", "config.json", "model.safetensors", "notes.txt"]


def test_another_models_folder_is_not_overwritten(heads, golden_case, tmp_path):
    target = shutil.copytree(golden_case, tmp_path / "model")
    before = (target / "config.json").read_bytes()
    with pytest.raises(ValueError, match="holds something else than retaining heads, which would be overwritten"):
        heads.save_pretrained(target)
    assert (target / "config.json").read_bytes() == before
    (target / "config.json").unlink()
    with pytest.raises(ValueError, match=r"holds another model's model\.safetensors"):
        heads.save_pretrained(target)


def test_a_file_in_the_place_of_the_folder_is_named(heads, tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(ValueError, match="is a file; choose a folder"):
        heads.save_pretrained(tmp_path / "x")
    with pytest.raises(OSError, match=r"cannot write retaining heads to .*x/y: .*; choose another folder"):
        heads.save_pretrained(tmp_path / "x" / "y")


@pytest.fixture
def small_files_only() -> Iterator[None]:
    """Let the operating system refuse to write more than 1,000 bytes to a file, as a full disk or a quota does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("exists", [False, True])
def test_without_room_nothing_is_left_behind_and_the_folder_is_named(heads, saved, tmp_path, small_files_only, exists):
    target = saved if exists else tmp_path / "new"
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    with pytest.raises(
        OSError, match=f"cannot write retaining heads to {target}: File too large; choose another folder or"
    ):
        heads.save_pretrained(target)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    assert sorted(os.listdir(tmp_path)) == ["heads"]


def test_a_folder_without_permission_is_named(heads, saved):
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o555)
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)  # permissions do not bind root
        for target in (folder / "new", folder):
            with pytest.raises(
                PermissionError, match=f"cannot write retaining heads to {target}: Permission denied; choose"
            ):
                heads.save_pretrained(target)
    finally:
        os.seteuid(user)
        assert os.listdir(folder) == []
        folder.rmdir()


def test_an_interruption_while_writing_leaves_the_old_heads(heads, saved, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        heads.save_pretrained(saved)
    assert same_weights(RetainingHeads.from_pretrained(saved), heads)
    assert sorted(os.listdir(saved)) == ["README.md", "config.json", "model.safetensors"]


def test_saved_files_are_as_readable_as_any(saved):
    modes = {path.name: path.stat().st_mode & 0o777 for path in saved.iterdir()}
    assert len(set(modes.values())) == 1, modes
