"""Weights published by the original authors: every layout they come in, and strict refusal of what does not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaConfig

from locret.heads.heads import RetainingHeads


@pytest.fixture
def published(golden_case) -> dict[str, torch.Tensor]:
    return load_file(golden_case / "heads.safetensors")


@pytest.fixture
def config(golden_case):
    return AutoConfig.from_pretrained(golden_case)


def assert_exactly(heads: RetainingHeads, published: dict[str, torch.Tensor]) -> None:
    assert 2 * len(heads) == len(published)
    for layer in heads:
        for name in ("fc1", "fc2"):
            weight = getattr(heads[layer], name).weight
            assert torch.equal(weight, published[f"model.layers.{layer}.self_attn.{name}.weight"])


def test_reference_weights_are_read_exactly(golden_case, published, config):
    heads = RetainingHeads.from_official(golden_case / "heads.safetensors", config)
    assert_exactly(heads, published)
    heads.check_matches(config)
    assert heads.config.label == {"kind": "logit", "include_last_prompt_token": False}


def test_reference_scores_of_the_first_layer_come_out(golden_case, config):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(golden_case)
    heads = RetainingHeads.from_official(golden_case / "heads.safetensors", config)
    layer = model.model.layers[0]
    with torch.no_grad():
        hidden = layer.input_layernorm(
            model.model.embed_tokens(load_file(golden_case / "inputs.safetensors")["prompt_ids"])
        )
        attention = layer.self_attn
        fused = getattr(attention, "qkv_proj", None)
        parts = [fused] if fused else [attention.q_proj, attention.k_proj, attention.v_proj]
        scores = heads[0](torch.cat([part(hidden) for part in parts], dim=-1))
    expected = load_file(golden_case / "outputs.safetensors")["full.scores"][0]
    torch.testing.assert_close(scores[0], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("prefix", ["model.", "", "module.model."])
@pytest.mark.parametrize("form", ["bin", "old_bin", "safetensors", "folder", "whole_model", "sharded"])
def test_every_published_layout_is_read(golden_case, published, config, tmp_path, prefix, form):
    weights = {prefix + name.removeprefix("model."): value for name, value in published.items()}
    path = write(form, weights, load_file(golden_case / "model.safetensors"), tmp_path)
    assert_exactly(RetainingHeads.from_official(path, config), published)


def write(form: str, weights: dict[str, torch.Tensor], backbone: dict[str, torch.Tensor], folder: Path) -> Path:
    if form in ("bin", "old_bin"):
        torch.save(weights, folder / "heads.bin", _use_new_zipfile_serialization=form == "bin")
        return folder / "heads.bin"
    if form == "sharded":
        parts = {"a.safetensors": {}, "b.safetensors": {}, "c.safetensors": backbone}
        for index, (name, value) in enumerate(weights.items()):
            parts["ab"[index % 2] + ".safetensors"][name] = value
        save_file(parts["a.safetensors"], folder / "a.safetensors")
        save_file(parts["b.safetensors"], folder / "b.safetensors")  # c, without heads, is not even there
        places = {name: file for file, part in parts.items() for name in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        return folder
    save_file({**weights, **(backbone if form == "whole_model" else {})}, folder / "model.safetensors")
    return folder if form == "folder" else folder / "model.safetensors"


def test_bfloat16_weights_become_float32(published, config, tmp_path):
    torch.save({name: value.bfloat16() for name, value in published.items()}, tmp_path / "h.bin")
    heads = RetainingHeads.from_official(tmp_path / "h.bin", config)
    assert {weight.dtype for weight in heads.parameters()} == {torch.float32}


def test_fc1_and_fc2_of_the_backbones_own_mlp_are_left_alone(published, config, tmp_path):
    foreign = {
        "model.layers.0.mlp.fc1.weight": torch.zeros(2),
        "model.vision.layers.0.self_attn.fc1.weight": torch.zeros(2),
    }
    torch.save({**foreign, **published}, tmp_path / "h.bin")
    assert_exactly(RetainingHeads.from_official(tmp_path / "h.bin", config), published)
    torch.save(foreign, tmp_path / "none.bin")
    with pytest.raises(
        ValueError, match=r"has no retaining heads: no entry like .* among its 2 \(model.layers.0.mlp.fc1.weight, "
    ):
        RetainingHeads.from_official(tmp_path / "none.bin", config)


def official(layers: int = 2, hidden: int = 4, width: int = 64, kv_heads: int = 2) -> dict[str, torch.Tensor]:
    weights = {}
    for layer in range(layers):
        weights[f"model.layers.{layer}.self_attn.fc1.weight"] = torch.ones(hidden, width)
        weights[f"model.layers.{layer}.self_attn.fc2.weight"] = torch.ones(kv_heads, hidden)
    return weights


LLAMA = LlamaConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (official(layers=3), r"for 3 layers \(layers 0, 1, 2\) but the config of a llama model says 2 \(layers 0, 1\)"),
        (official(layers=1), r"for 1 layers \(layer 0\) but the config of a llama model says 2 \(layers 0, 1\)"),
        (official(width=48), r"heads.0.fc1.weight is \[4, 48\] in .* but \[4, 64\] by the config of a llama model"),
        (official(kv_heads=4), r"heads.0.fc2.weight is \[4, 4\] in .* but \[2, 4\] by the config of a llama model"),
        (
            {**official(), "model.layers.0.self_attn.fc1.bias": torch.ones(4)},
            "fc1.bias, but retaining heads have no biases",
        ),
        ({**official(), "layers.0.self_attn.fc1.weight": torch.ones(4, 64)}, "has 0.fc1.weight of a layer twice"),
        (
            {**official(), "model.layers.1.self_attn.fc2.weight": torch.full((2, 4), float("inf"))},
            "that are not finite",
        ),
    ],
)
def test_weights_of_another_shape_are_refused_with_both_sides(tmp_path, weights, message):
    torch.save(weights, tmp_path / "h.bin")
    with pytest.raises(ValueError, match=message):
        RetainingHeads.from_official(tmp_path / "h.bin", LLAMA)


def test_a_missing_weight_is_named(tmp_path):
    weights = official()
    del weights["model.layers.1.self_attn.fc2.weight"]
    save_file(weights, tmp_path / "h.safetensors")
    with pytest.raises(ValueError, match="missing: heads.1.fc2.weight"):
        RetainingHeads.from_official(tmp_path / "h.safetensors", LLAMA)


class Payload:
    """An object whose loading runs code."""

    def __reduce__(self):
        return (print, ("loaded",))


def test_pickled_code_is_not_run(tmp_path, capsys):
    torch.save({"model.layers.0.self_attn.fc1.weight": Payload()}, tmp_path / "h.bin")
    with pytest.raises(
        ValueError, match="holds more than tensors, and loading it could run code; convert it to safetensors"
    ):
        RetainingHeads.from_official(tmp_path / "h.bin", LLAMA)
    assert capsys.readouterr().out == ""


def test_files_that_are_missing_ambiguous_or_broken_are_named(tmp_path):
    with pytest.raises(ValueError, match="there is no file or folder '.*nowhere'; download the published heads first"):
        RetainingHeads.from_official(tmp_path / "nowhere", LLAMA)
    with pytest.raises(ValueError, match=r"has no \.safetensors or \.bin file"):
        RetainingHeads.from_official(tmp_path, LLAMA)
    for name in ("a.bin", "b.bin"):
        (tmp_path / name).write_bytes(b"not torch")
    with pytest.raises(ValueError, match=r"has several \.bin files \(a\.bin, b\.bin\); name one of them"):
        RetainingHeads.from_official(tmp_path, LLAMA)
    with pytest.raises(ValueError, match=r"a\.bin (is not a file that torch.save wrote|holds more than tensors)"):
        RetainingHeads.from_official(tmp_path / "a.bin", LLAMA)
    (tmp_path / "c.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ValueError, match=r"c\.safetensors is not a whole safetensors file"):
        RetainingHeads.from_official(tmp_path / "c.safetensors", LLAMA)
    torch.save([torch.ones(1)], tmp_path / "d.bin")
    with pytest.raises(ValueError, match=r"d\.bin holds a list and not weights by name"):
        RetainingHeads.from_official(tmp_path / "d.bin", LLAMA)


def test_a_missing_shard_and_a_broken_index_are_named(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(official(), "gone.safetensors")}))
    with pytest.raises(ValueError, match=r"names 'gone\.safetensors', which is not in its folder"):
        RetainingHeads.from_official(tmp_path, LLAMA)
    index.write_text("{}")
    with pytest.raises(ValueError, match="is not an index of a sharded checkpoint"):
        RetainingHeads.from_official(tmp_path, LLAMA)
