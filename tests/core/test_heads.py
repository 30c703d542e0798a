"""Retaining heads: arithmetic, dtype, the match with a backbone, fingerprints of weights, and their files."""

from __future__ import annotations

import copy
import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import mutations
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaConfig

from locret import RetainingHeads
from locret.heads.fingerprint import weight_fingerprint
from locret.heads.heads import RetainingHead


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
