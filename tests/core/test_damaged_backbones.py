"""Backbone folders that are damaged, or hold something else than a backbone, are refused in one sentence."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import mutations
import pytest
import torch
from families import build
from safetensors.torch import load_file, save

from locret import loading, shipped
from locret.loading.options import BackboneSource

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("backbones") / "backbone"
    build("llama").save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(shipped.find("checkpoints/tiny"), name), folder)
    return folder


def damaged(backbone: Path, *without: str) -> Path:
    folder = backbone.parent / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(backbone, folder, ignore=shutil.ignore_patterns(*without))
    return folder


def load(folder: Path, adapter: Path | None = None) -> Any:
    source = BackboneSource(model=str(folder), adapter=adapter and str(adapter))
    config = loading.load_config(source)
    return loading.load_model(source, config, CPU, torch.float32)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_attention_heads": 0}, "config.json that cannot be read"),
        ({"num_hidden_layers": "5"}, "expected int, got str"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000 instead of a whole number from 1 to 1,000"),
        ({"hidden_size": 10**9}, "hidden_size is 1000000000 instead of"),
        ({"vocab_size": 2**27}, r"describes [\d,]+ weights and its files hold [\d,]+ bytes"),
        ({"intermediate_size": 2**23}, r"describes [\d,]+ weights and its files hold [\d,]+ bytes"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1.0}}, "rope_type is 'spiral'; known are default, "),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": float("nan")}}, "rope_theta .* is nan"),
        ({"dtype": "float99"}, "float99"),
        ({"model_type": "no such"}, "cannot be read"),
        ({"num_hidden_layers": 4}, "9 weights are missing, such as model.layers.3"),
    ],
)
def test_an_odd_config_is_refused_in_a_sentence(backbone: Path, changes: dict[str, Any], said: str) -> None:
    folder = damaged(backbone)
    values = json.loads((backbone / "config.json").read_text())
    mutations.put(folder, "config.json", json.dumps({**values, **changes}).encode())
    with pytest.raises(ValueError, match=said) as refused:
        load(folder)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 700


@pytest.mark.parametrize(
    "content", [b"a text", b"", pickle.dumps([1, 2]), pickle.dumps(Path("x")), b"\x80\x04]\x94.", b"PK\x03\x04zip"]
)
def test_a_bin_that_holds_no_tensors_is_refused(backbone: Path, content: bytes) -> None:
    folder = damaged(backbone, "model.safetensors")
    mutations.put(folder, "pytorch_model.bin", content)
    with pytest.raises(ValueError, match=r"--model .* cannot be loaded \(.*\); check that it is whole") as refused:
        load(folder)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("place", ["../../etc/passwd", "/etc/passwd", 5, None, "..", ""])
def test_an_index_that_leaves_its_folder_is_refused(backbone: Path, place: Any) -> None:
    folder = damaged(backbone, "model.safetensors")
    weights = load_file(backbone / "model.safetensors")
    mutations.put(folder, "model-00001-of-00001.safetensors", save(weights, {"format": "pt"}))
    places = {**dict.fromkeys(weights, "model-00001-of-00001.safetensors"), "lm_head.weight": place}
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    mutations.put(folder, "model.safetensors.index.json", json.dumps(index).encode())
    with pytest.raises(ValueError, match="which is not the name of a file of its folder"):
        load(folder)


# -- adapters ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapter(backbone: Path) -> Path:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    base = build("llama")
    base.config._name_or_path = base.name_or_path = str(backbone)
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=2, init_lora_weights=False)
    model = get_peft_model(base, config)
    model.save_pretrained(backbone.parent / "adapter")
    return backbone.parent / "adapter"


def logits(model: Any) -> torch.Tensor:
    return model(torch.arange(3, 12)[None]).logits


def test_the_folder_of_an_adapter_is_its_base_model_with_the_adapter(backbone: Path, adapter: Path) -> None:
    expected = logits(load(backbone, adapter))
    assert torch.equal(logits(load(adapter)), expected)
    assert not torch.allclose(logits(load(backbone)), expected)
    assert loading.load_tokenizer(BackboneSource(model=str(adapter))).vocab_size
    with pytest.raises(ValueError, match="is an adapter itself; give its base model, or drop --adapter"):
        load(adapter, adapter)
