"""Folders of retaining heads: read strictly, with both sides in every refusal, and written whole or not at all."""

from __future__ import annotations

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

from locret.heads import checkpoint
from locret.heads.heads import RetainingHeads

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
        ({"policy": "small"}, "has policy='small', which is not of type dict"),
        ({"policy": {"budget": 10**15}}, "policy: budget=1000000000000000 is no bound that heads may recommend"),
        (
            {"policy": {"prefill_attention": "minference:patterns=a.json"}},
            "names a file, which heads may not recommend",
        ),
        ({"hidden_dim": 12.5}, "has hidden_dim=12.5, which is not of type int"),
        ({"hidden_dim": float("inf")}, "has hidden_dim=inf, which is not of type int"),
        ({"num_hidden_layers": True}, "has num_hidden_layers=True, which is not of type int"),
        ({"hidden_dim": 0}, "hidden_dim=0 is not a number of at least 1"),
        ({"hidden_dim": 10**12}, r"fc1.weight is \[12, 64\] in .* but \[1000000000000, 64\] by its config.json"),
        ({"initializer_range": float("nan")}, r"has initializer_range=nan, .* float \(numbers must be finite\); write"),
        ({"initializer_range": -0.1}, "initializer_range=-0.1 is negative; give one such as 0.02"),
        (
            {"policy": {"budgt": 5}},
            "policy has an unknown key 'budgt'; the keys are those of RetentionPolicy: budget, ",
        ),
        ({"hidden_act": "sulu"}, "activation 'sulu' is unknown to transformers"),
    ],
)
def test_a_config_that_is_not_exactly_right_is_refused(saved, changes, message):
    edit_config(saved, **changes)
    with pytest.raises(ValueError, match=message):
        RetainingHeads.from_pretrained(saved)


@pytest.mark.parametrize("text", ["{", "[" * 100_000])
def test_broken_json_is_named(saved, text):
    (saved / "config.json").write_text(text)
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


def test_weights_in_eight_bits_are_refused(saved):
    edit_weights(saved, lambda w: w.update({name: value.to(torch.float8_e4m3fn) for name, value in w.items()}))
    with pytest.raises(ValueError, match="is of float8_e4m3fn; give float32"):
        RetainingHeads.from_pretrained(saved)


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
    run = tmp_path / "run"
    (run / "checkpoint-2").mkdir(parents=True)
    (run / "run.json").write_text("{}")
    with pytest.raises(ValueError, match="training in .*run has not finished; go on with locret-train --resume .*run"):
        RetainingHeads.from_pretrained(run)
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
    with pytest.raises(OSError, match=r"cannot write .*x/y: .*; choose another folder"):
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
    with pytest.raises(OSError, match=f"cannot write {target}: File too large; choose another folder or make room"):
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
            with pytest.raises(PermissionError, match=f"cannot write {target}: Permission denied; choose"):
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
