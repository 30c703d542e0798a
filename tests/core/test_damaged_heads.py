"""Files of retaining heads, ours and those of the original authors, that are damaged or not what they say they are."""

from __future__ import annotations

import functools
import io
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import mutations
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save
from transformers import LlamaConfig

from locret import RetainingHeads, RetentionPolicy

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads") / "heads"
    heads = RetainingHeads.for_model(CONFIG, hidden_dim=4, seed=0)
    heads.annotate(
        label={"kind": "logit", "include_last_prompt_token": False},
        policy={"budget": 64, "chunk_size": 32, "stabilizers": 4},
        training={"steps": 3, "earlier": {"steps": 2}},
        evaluation={"passkey": 50.0},
    )
    heads.save_pretrained(folder)
    return folder


@given(data=st.data())
def test_damaged_heads_are_refused_or_work(saved: Path, data: st.DataObject) -> None:
    folder = saved.parent / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(saved, folder)
    kind = data.draw(st.sampled_from(("config", "config", "weights", "gone")))
    if kind == "config":
        values = json.loads((saved / "config.json").read_text())
        mutations.put(folder, "config.json", mutations.json_text_of(data.draw, values))
    elif kind == "weights":
        tensors = load_file(saved / "model.safetensors")
        mutations.put(folder, "model.safetensors", mutations.safetensors_of(data.draw, tensors, {"format": "pt"}))
    else:
        (folder / data.draw(st.sampled_from(("config.json", "model.safetensors", "README.md")))).unlink()
    heads = mutations.loaded_or_refused(lambda: RetainingHeads.from_pretrained(folder))
    if heads is not None:
        assert heads.generate_model_card()
        mutations.loaded_or_refused(lambda: heads.check_matches(CONFIG))
        mutations.loaded_or_refused(lambda: RetentionPolicy.from_dict(heads.config.policy or {}, "policy"))
        heads.save_pretrained(saved.parent / "again")
        shutil.rmtree(saved.parent / "again")


def published(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    heads = RetainingHeads.for_model(CONFIG, hidden_dim=4, seed=0)
    return {
        f"model.layers.{layer}.self_attn.{name}.weight": getattr(heads[layer], name).weight.detach().to(dtype)
        for layer in heads
        for name in ("fc1", "fc2")
    }


def as_bin(value: Any, zipped: bool = True) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


@functools.cache
def published_bin(zipped: bool) -> bytes:
    # Once: a pickle is some bytes longer or shorter with what Python happens to share, and places in it are drawn.
    return as_bin(published(), zipped)


@given(data=st.data())
def test_damaged_official_weights_are_refused_or_work(tmp_path_factory: Any, data: st.DataObject) -> None:
    folder = tmp_path_factory.getbasetemp() / "official"
    shutil.rmtree(folder, ignore_errors=True)
    weights = published()
    form = data.draw(st.sampled_from(("bin", "old bin", "safetensors", "index")))
    if form == "safetensors":
        mutations.put(folder, "heads.safetensors", mutations.safetensors_of(data.draw, weights, {}))
    elif form == "index":
        mutations.put(folder, "a.safetensors", save(weights))
        index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(weights, "a.safetensors")}
        mutations.put(folder, "model.safetensors.index.json", mutations.json_text_of(data.draw, index))
    elif data.draw(st.booleans()):
        changed = mutations.tensors_of(data.draw, weights)
        mutations.put(folder, "heads.bin", as_bin(changed, form == "bin"))
    else:
        mutations.put(folder, "heads.bin", mutations.bytes_of(data.draw, published_bin(form == "bin")))
    mutations.loaded_or_refused(lambda: RetainingHeads.from_official(folder, CONFIG))


NAME = "model.layers.0.self_attn.fc1.weight"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"just a text, no weights", "not a file that torch.save wrote"),
        (b"", "not a file that torch.save wrote"),
        (pickle.dumps({"a": Path("x")}), "could run code|not a file that torch.save wrote"),
        (as_bin(torch.zeros(3)), "holds a Tensor and not weights by name"),
        (as_bin({NAME: torch.zeros(())}), "has retaining heads for 1 layers|is \\[\\]"),
        (as_bin({**published(), NAME: torch.zeros(())}), "is \\[\\]"),
        (as_bin({**published(), NAME: torch.zeros(4, 256).to_sparse()}), "no plain tensor"),
        (as_bin({**published(), NAME: torch.zeros(4, 256, device="meta")}), "no plain tensor"),
        (as_bin({**published(), NAME: "a text"}), "no plain tensor"),
        (as_bin({**published(), NAME: torch.zeros(4, 256, dtype=torch.float8_e4m3fn)}), "is of float8_e4m3fn"),
    ],
)
def test_a_bin_that_holds_something_else_is_refused_in_a_sentence(tmp_path: Path, content: bytes, said: str) -> None:
    path = mutations.put(tmp_path, "heads.bin", content)
    with pytest.raises(ValueError, match=said) as refused:
        RetainingHeads.from_official(path, CONFIG)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "place", ["../a.safetensors", "/etc/passwd", 5, None, ["a"], "", ".", "sub/../../a.safetensors"]
)
def test_an_index_names_files_of_its_own_folder_only(tmp_path: Path, place: Any) -> None:
    mutations.put(tmp_path, "a.safetensors", save(published()))
    index = {"weight_map": {**dict.fromkeys(published(), "a.safetensors"), NAME: place}}
    mutations.put(tmp_path / "heads", "model.safetensors.index.json", json.dumps(index).encode())
    with pytest.raises(ValueError, match="is not the name of a file of its folder") as refused:
        RetainingHeads.from_official(tmp_path / "heads", CONFIG)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["label", "training", "evaluation"])
@pytest.mark.parametrize("value", [float("nan"), [float("inf")], {1: 2}, object(), mutations.DEEP])
def test_notes_that_json_cannot_hold_are_refused_at_once(name: str, value: Any) -> None:
    heads = RetainingHeads.for_model(CONFIG, hidden_dim=4, seed=0)
    with pytest.raises(ValueError, match=f"{name} .*plain") as refused:
        heads.annotate(**{name: {"a": value}})
    assert "\n" not in str(refused.value)


def test_a_key_given_twice_is_refused(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "heads")
    text = (saved / "config.json").read_text().rstrip()
    (tmp_path / "heads" / "config.json").write_text(text[:-2] + ',\n  "hidden_dim": 8\n}')
    with pytest.raises(ValueError, match="has hidden_dim twice"):
        RetainingHeads.from_pretrained(tmp_path / "heads")
