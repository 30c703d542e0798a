"""Files of retaining heads, ours and the authors': read strictly, with both sides in every refusal, written whole."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import mutations
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaConfig

from locret import RetainingHeads

GOLDEN = Path(__file__).parents[1] / "golden" / "A_llama_gqa"
CONFIG = LlamaConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8)


def made(hidden_dim: int = 12, seed: int = 3) -> RetainingHeads:
    return RetainingHeads.for_model(CONFIG, hidden_dim, seed=seed)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    heads = made().annotate(
        label={"kind": "logit", "include_last_prompt_token": False},
        policy={"budget": 64, "chunk_size": 32, "stabilizers": 4},
        training={"steps": 3, "earlier": {"steps": 2}},
        evaluation={"passkey": 50.0},
    )
    heads.save_pretrained(tmp_path_factory.mktemp("heads") / "deep" / "heads")
    return tmp_path_factory.getbasetemp() / "heads0" / "deep" / "heads"


@pytest.fixture
def saved(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "heads"))


def test_saved_heads_load_identically_with_their_notes_and_can_be_trained(saved: Path, whole: Path) -> None:
    with torch.inference_mode():
        loaded = RetainingHeads.from_pretrained(saved)
    torch.testing.assert_close(loaded.state_dict(), made().state_dict(), atol=0, rtol=0)
    assert loaded.config.policy == {"budget": 64, "chunk_size": 32, "stabilizers": 4}
    assert not loaded.training
    assert sorted(os.listdir(whole)) == ["README.md", "config.json", "model.safetensors"]
    assert len({path.stat().st_mode & 0o777 for path in whole.iterdir()}) == 1
    loaded[0](torch.ones(1, 64)).sum().backward()
    assert loaded[0].fc1.weight.grad is not None
    before = loaded[0].fc1.weight.clone()
    (saved / "model.safetensors").write_bytes(b"\xff" * (saved / "model.safetensors").stat().st_size)
    assert torch.equal(loaded[0].fc1.weight, before)


WRONG: list[tuple[Any, str]] = [
    ({"hidden_dim": None}, "is not the config of retaining heads .*give a folder written by locret-train"),
    ({"head_dim": None}, "lacks head_dim; the file is incomplete"),
    ({"layers": [1, 0]}, r"layers=\[1, 0\] must be ascending indices below num_hidden_layers=2"),
    ({"policy": {"budget": 10**15}}, "policy: budget=1000000000000000 is no bound that heads may recommend"),
    ({"policy": {"budgt": 5}}, "policy has an unknown key 'budgt'; the keys are those of RetentionPolicy: budget, "),
    ({"hidden_dim": 10**12}, r"fc1.weight is \[12, 64\] in .* but \[1000000000000, 64\] by its config.json"),
    (lambda w: w.pop("heads.1.fc2.weight"), r"3 weights but its config.json says 4 \(missing: heads.1.fc2.weight;"),
    (lambda w: w["heads.0.fc2.weight"].fill_(float("nan")), "heads.0.fc2.weight in .* values that are not finite"),
    (lambda w: w.update({n: v.to(torch.float8_e4m3fn) for n, v in w.items()}), "is of float8_e4m3fn; give float32"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[message for _, message in WRONG])
def test_a_config_or_weights_that_are_not_exactly_right_are_refused(saved: Path, changes: Any, message: str) -> None:
    if callable(changes):
        weights = load_file(saved / "model.safetensors")
        changes(weights)
        save_file(weights, saved / "model.safetensors")
    else:
        values = {**json.loads((saved / "config.json").read_text()), **changes}
        given = {name: value for name, value in values.items() if value is not None or name not in changes}
        (saved / "config.json").write_text(json.dumps(given))
    with pytest.raises(ValueError, match=message):
        RetainingHeads.from_pretrained(saved)


def test_folders_that_are_missing_or_not_of_heads_are_named(tmp_path: Path, saved: Path) -> None:
    torch.save(load_file(saved / "model.safetensors"), saved / "pytorch_model.bin")
    (saved / "model.safetensors").unlink()
    mutations.put(tmp_path / "run" / "checkpoint-2", "x", b"")
    mutations.put(tmp_path / "run", "run.json", b"{}")
    for folder, message in [
        (saved, r"has no model.safetensors \(it has .*pytorch_model.bin\); .* safetensors only"),
        ("./nowhere", "there is no folder './nowhere'; give a folder of retaining heads, or org/name"),
        (tmp_path, "has no config.json, so it does not hold retaining heads"),
        (tmp_path / "run", "training in .*run has not finished; go on with locret-train --resume .*run"),
    ]:
        with pytest.raises(ValueError, match=message):
            RetainingHeads.from_pretrained(folder)
    with pytest.raises(ValueError, match="there is no file or folder '.*nowhere'; download the published heads first"):
        RetainingHeads.from_official(tmp_path / "nowhere", CONFIG)


@pytest.mark.parametrize("value", [float("nan"), {1: 2}, object()])
def test_notes_that_json_cannot_hold_or_that_nobody_knows_are_refused_at_once(value: Any) -> None:
    with pytest.raises(ValueError, match="training .*plain"):
        made().annotate(training={"a": value})
    with pytest.raises(ValueError, match="'polcy' cannot be noted on retaining heads; the choices are .*policy"):
        made().annotate(polcy={})


# -- writing ---------------------------------------------------------------------------------------------------------


def test_saving_again_replaces_our_files_and_no_others(saved: Path, tmp_path: Path) -> None:
    (saved / "notes.txt").write_text("mine")
    made(6, seed=9).save_pretrained(saved, dtype="bfloat16")
    loaded = RetainingHeads.from_pretrained(saved)
    assert {weight.dtype for weight in loaded.parameters()} == {torch.float32}
    assert loaded.config.hidden_dim == 6
    assert sorted(os.listdir(saved)) == ["README.md", "config.json", "model.safetensors", "notes.txt"]
    target = Path(shutil.copytree(GOLDEN, tmp_path / "model"))
    with pytest.raises(ValueError, match="holds something else than retaining heads, which would be overwritten"):
        made().save_pretrained(target)
    (target / "config.json").unlink()
    with pytest.raises(ValueError, match=r"holds another model's model\.safetensors"):
        made().save_pretrained(target)


# -- weights published by the authors --------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["bin", "shards", "folder", "whole model"])
def test_every_published_layout_is_read_exactly(tmp_path: Path, form: str) -> None:
    theirs, config = load_file(GOLDEN / "heads.safetensors"), AutoConfig.from_pretrained(GOLDEN)
    prefix = "module.model." if form == "bin" else "" if form == "shards" else "model."
    weights, path = {prefix + name.removeprefix("model."): value for name, value in theirs.items()}, tmp_path
    foreign = {
        "model.layers.0.mlp.fc1.weight": torch.zeros(2),
        "model.vision.layers.0.self_attn.fc1.weight": torch.ones(2),
    }
    if form == "bin":
        path = tmp_path / "heads.bin"
        torch.save({**foreign, **weights}, path)
    elif form == "shards":
        save_file(dict(list(weights.items())[::2]), tmp_path / "a.safetensors")
        save_file(dict(list(weights.items())[1::2]), tmp_path / "b.safetensors")  # c, without heads, is not there
        places = {name: f"{'ab'[nth % 2]}.safetensors" for nth, name in enumerate(weights)}
        places |= dict.fromkeys(load_file(GOLDEN / "model.safetensors"), "c.safetensors")
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    else:
        backbone = load_file(GOLDEN / "model.safetensors") if form == "whole model" else {}
        save_file({**weights, **backbone}, tmp_path / "model.safetensors")
        path = tmp_path if form == "folder" else tmp_path / "model.safetensors"
    heads = RetainingHeads.from_official(path, config)
    assert 2 * len(heads) == len(theirs)
    for layer in heads:
        for name in ("fc1", "fc2"):
            expected = theirs[f"model.layers.{layer}.self_attn.{name}.weight"]
            assert torch.equal(getattr(heads[layer], name).weight, expected)
    heads.check_matches(config)
    assert heads.config.label == {"kind": "logit", "include_last_prompt_token": False}


def published(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    shapes = {"fc1": (4, 64), "fc2": (2, 4), **shapes}
    names = [(layer, name) for layer in range(2) for name in ("fc1", "fc2")]
    return {f"model.layers.{layer}.self_attn.{name}.weight": torch.ones(shapes[name]) for layer, name in names}


NAME = "model.layers.0.self_attn.fc1.weight"


class Payload:
    """An object whose loading runs code."""

    def __reduce__(self) -> Any:
        return (pytest.fail, ("the pickle was run",))


OFFICIAL: list[tuple[Any, str]] = [
    (published(fc1=(4, 48)), r"heads.0.fc1.weight is \[4, 48\] in .* but \[4, 64\] by the config of a llama model"),
    ({**published(), NAME.removeprefix("model."): torch.ones(4, 64)}, "has 0.fc1.weight of a layer twice"),
    ({name: value for name, value in published().items() if name != NAME}, "missing: heads.0.fc1.weight"),
    ({"a": torch.zeros(2)}, "has no retaining heads: no entry like model.layers.0.self_attn.fc1.weight"),
    ({NAME: Payload()}, "holds more than tensors, and loading it could run code; convert it to safetensors"),
    (b"just a text, no weights", "not a file that torch.save wrote"),
]


@pytest.mark.parametrize(("content", "said"), OFFICIAL, ids=[said[:30] for _, said in OFFICIAL])
def test_published_weights_that_do_not_fit_are_refused_in_a_sentence(tmp_path: Path, content: Any, said: str) -> None:
    if isinstance(content, bytes):
        (tmp_path / "h.bin").write_bytes(content)
    else:
        torch.save(content, tmp_path / "h.bin")
    for path in (tmp_path / "h.bin", tmp_path):
        with pytest.raises(ValueError, match=said) as refused:
            RetainingHeads.from_official(path, CONFIG)
        assert "\n" not in str(refused.value)
