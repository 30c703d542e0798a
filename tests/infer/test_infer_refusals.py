"""How `locret-infer` refuses: one sentence with the setting, its value and the way out; 2 for usage, 1 for failure."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from locret import RetainingHeads, scorers

QUESTION = "What is the pass key?"
Infer = Callable[..., Any]


def refused(outcome: Any, *parts: str, code: int = 2) -> None:
    assert outcome.code == code
    assert outcome.out == ""
    last = outcome.err.strip().splitlines()[-1]
    assert len(outcome.err.strip().splitlines()) == 1, outcome.err
    for part in parts:
        assert part in last


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("--budget", 0), ("budget=0 is too small", "1 or more")),
        (("--budget", 8, "--stabilizers", 16), ("stabilizers=16 leaves no room", "budget=8")),
        (("--prompt-file", "nowhere.txt"), ("--prompt-file nowhere.txt: no such file",)),
        (("--prompt-file", "."), ("--prompt-file .: that is a folder",)),
        (("--model", "no/such/model"), ("--model no/such/model: there is no such folder",)),
        (("--model", "setup.cfg"), ("--model setup.cfg is a file",)),
        (("--model", "tests"), ("--model tests has no config.json",)),
        (
            ("--model", "checkpoints/tiny-heads"),
            ("--model checkpoints/tiny-heads holds retaining heads", "--heads checkpoints/tiny-heads"),
        ),
        (("--allow-other-scorer",), ("--allow-other-scorer is about --context",)),
        (("--heads", "no/such/heads"), ("--heads no/such/heads: there is no folder",)),
        (("--scorer", "streaming"), ("exclude each other", "--heads", "--scorer")),
        (("--device", "tpu"), ("--device tpu is unknown", "cuda:N")),
        (("--device", "cuda:99"), ("--device cuda:99", "--device auto")),
        (("--dtype", "int8"), ("--dtype int8 is unknown", "bfloat16")),
        (("--attn", "eager"), ("--attn eager is unknown", "sdpa")),
        (("--attn", "flash_attention_2"), ("locret[flash]", "--attn auto")),
        (("--positions", "relative"), ('positions="relative" is unknown', "compact")),
        (("--template", "alpaca"), ("--template alpaca", "original")),
        (("--question", " "), ("--question is empty",)),
        (("--max-new-tokens", 0), ("--max-new-tokens 0", "1 or more")),
        (("--temperature", -1), ("--temperature -1.0 is negative",)),
        (("--temperature", 1e-40), ("--temperature 1e-40", "0.001")),
        (("--top-p", 0.5), ("--top-p", "set a temperature")),
        (("--top-p", 1.5, "--temperature", 1), ("--top-p 1.5",)),
        (("--top-k", -1), ("--top-k -1",)),
        (("--compile",), ('option "compile" was retired', "captured and replayed by itself", "leave it out")),
        (("--repetition-penalty", 0), ("--repetition-penalty 0.0",)),
        (("--picture", "no/such/folder/kept.png"), ("--picture", "there is no folder")),
        (("--adapter", "no/such/adapter"), ("--adapter no/such/adapter cannot be put on",)),
        (("--scorer-options.sinks", 3), ("--scorer-options belongs to --scorer",)),
    ],
)
def test_refusals_name_setting_value_and_way_out(
    infer: Infer, backbone: Path, heads: Path, text: Path, arguments: tuple[object, ...], parts: tuple[str, ...]
) -> None:
    usual = ("--model", backbone, "--heads", heads, "--prompt-file", text)
    refused(infer(*usual, *arguments), *parts)


def test_without_heads_and_scorer_a_fallback_decides_and_one_warning_says_so(
    infer: Infer, backbone: Path, text: Path
) -> None:
    numbers = ("--budget", 32, "--chunk-size", 32, "--stabilizers", 8, "--local-len", 8, "--max-new-tokens", 2)
    outcome = infer("--model", backbone, "--prompt-file", text, "--json", *numbers)
    assert outcome.code == 0, outcome.err
    assert outcome.err.count("decides which units stay") == 1
    assert "--heads" in outcome.err
    assert "--scorer" in outcome.err
    record = json.loads(outcome.out)
    assert record["scorer"] == scorers.FALLBACK
    assert record["policy"]["positions"] == scorers.find(scorers.FALLBACK).positions


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("--scorer", "quest:page=8"), "quest is a lookup; give --host-budget all --recall N --recall-by quest"),
        (("--scorer", "locret+recall"), "locret means trained heads; give --heads"),
        (("--scorer", "streamin"), 'scorer "streamin" is unknown; did you mean streaming'),
        (("--scorer", "streaming", "--scorer-options.sink", 3), "scorer streaming: "),
        (("--scorer", "streaming", "--budget", 0, "--model", "org/not-asked-for"), "budget=0 is too small"),
    ],
)
def test_scorer_that_does_not_exist_lists_the_nearest(
    infer: Infer, backbone: Path, text: Path, options: tuple[object, ...], part: str
) -> None:
    refused(infer("--model", backbone, "--prompt-file", text, *options), part)


@pytest.mark.parametrize("content", ["", " \n\t\n"])
def test_empty_prompt_is_refused(infer: Infer, backbone: Path, heads: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "empty.txt").write_text(content)
    arguments = ("--model", backbone, "--heads", heads, "--prompt-file", tmp_path / "empty.txt")
    refused(infer(*arguments, "--question", QUESTION), "empty.txt is empty; give a text")


def test_prompt_that_is_no_text_is_refused(infer: Infer, backbone: Path, heads: Path, tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x81")
    refused(infer("--model", backbone, "--heads", heads, "--prompt-file", tmp_path / "binary"), "not UTF-8")


def test_heads_of_another_backbone_show_both_sides(infer: Infer, backbone: Path, text: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(backbone)
    config.num_hidden_layers = 3
    RetainingHeads.for_model(config, hidden_dim=8).save_pretrained(tmp_path / "other")
    outcome = infer("--model", backbone, "--heads", tmp_path / "other", "--prompt-file", text)
    refused(outcome, "num_hidden_layers is 3 in the heads and 2 in the model")


def test_folder_of_another_kind_is_no_heads(infer: Infer, backbone: Path, text: Path) -> None:
    refused(infer("--model", backbone, "--heads", backbone, "--prompt-file", text), "--heads", "not the config of")


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"model_type": "t5"}, "encoder-decoder"),
        ({"model_type": "mamba"}, "no layer of mamba has softmax attention"),
        ({"model_type": "longcat_flash"}, "longcat_flash"),
        ({"model_type": "nonsense"}, "cannot be read"),
    ],
)
def test_unsupported_architecture_is_refused_from_the_config_alone(
    infer: Infer, heads: Path, text: Path, tmp_path: Path, config: dict[str, str], part: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused(infer("--model", tmp_path, "--heads", heads, "--prompt-file", text), part)


def test_backbone_without_weights_is_refused(
    infer: Infer, backbone: Path, heads: Path, text: Path, tmp_path: Path
) -> None:
    for file in backbone.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    refused(infer("--model", tmp_path, "--heads", heads, "--prompt-file", text), f"--model {tmp_path} cannot be loaded")


@pytest.mark.parametrize("flag", ["--model", "--heads"])
def test_name_that_is_neither_folder_nor_downloaded_says_both(
    infer: Infer, backbone: Path, heads: Path, text: Path, flag: str
) -> None:
    usual = {"--model": backbone, "--heads": heads, "--prompt-file": text, flag: "nobody/tinny"}
    outcome = infer(*(part for pair in usual.items() for part in pair))
    refused(outcome, "cannot load nobody/tinny", "neither a folder here nor", code=1)


@pytest.mark.parametrize(("line", "part"), [("budgett: 3", "budgett"), ("budget: many", "budget")])
def test_recipe_with_an_unknown_key_or_type_is_refused(infer: Infer, tmp_path: Path, line: str, part: str) -> None:
    (tmp_path / "recipe.yaml").write_text(f"model: x\nheads: y\n{line}\n")
    outcome = infer("--config", tmp_path / "recipe.yaml")
    refused(outcome, part, "recipe.yaml")
