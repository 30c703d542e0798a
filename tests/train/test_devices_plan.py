"""`locret-train --dry-run --devices 8x80GB`: what each way of loading a backbone takes of a card, and which to take."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from training_cases import refused
from transformers import LlamaConfig, Qwen3Config

from locret.load_options import BackboneSource
from locret.loading import load_config
from locret.train.command import command
from locret.train.devices_plan import Devices, PlannedRow, choices, sequence_ranks, taken
from locret.train.memory_plan import sketch
from locret.weights.plan import plan_weights
from locret.weights.shares import WeightCount

GIB = 2**30
LAYERS, WIDTH, MLP, VOCABULARY, DIM = 80, 8192, 28672, 128256, 128
LAYER = WIDTH * (2 * 64 * DIM + 2 * 8 * DIM) + 3 * WIDTH * MLP + 2 * WIDTH
TOTAL = LAYERS * LAYER + 2 * VOCABULARY * WIDTH + WIDTH
HEADS = LAYERS * (80 * DIM * 1024 + 1024 * 8)


@pytest.fixture(scope="module")
def llama_70b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the config of a backbone of Llama-3.1-70B's shape, and nothing else."""
    folder = tmp_path_factory.mktemp("shapes") / "70b"
    numbers: dict[str, Any] = {
        "hidden_size": WIDTH,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 131072,
        "dtype": "bfloat16",
    }
    LlamaConfig(**numbers).save_pretrained(folder)
    return folder


def plan(model: Path, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    AcceleratorState._reset_state(reset_partial_state=True)
    assert command([f"--model={model}", "--dry-run", "--json", *more]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


def test_eight_cards_take_fsdp_for_70b(llama_70b: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(llama_70b, capsys, "--devices=8x80GB")
    assert (found["dtype"], found["tokens"]) == ("bfloat16", 10240)
    ways = {way["name"]: way for way in found["choices"]}
    whole, fsdp = ways["data parallel"]["bytes_per_card"], ways["FSDP or ZeRO-3 over 8"]["bytes_per_card"]
    assert whole["backbone"] == 2 * TOTAL
    assert fsdp["backbone"] == TOTAL // 4
    assert fsdp["gathered"] == 2 * (LAYER + VOCABULARY * WIDTH + WIDTH)  # the last layer, and what follows
    for parts in (whole, fsdp):
        assert (parts["heads"], parts["gradients"], parts["optimizer"]) == (4 * HEADS, 4 * HEADS, 8 * HEADS)
        assert parts["total"] == sum(count for name, count in parts.items() if name != "total")
    assert round(whole["total"] / GIB) == 146
    assert round(fsdp["total"] / GIB) == 35
    assert round(ways["4-bit (NF4) on each card"]["bytes_per_card"]["total"] / GIB) == 52
    assert ways["tensor parallel over 8"]["fits"]
    split = ways["tensor parallel over 8"]["bytes_per_card"]
    assert split["optimizer"] == HEADS
    # Norms are whole on every card, and with transformers 5.17 the embedding.
    assert 0 <= split["backbone"] - TOTAL // 4 < 2 * WIDTH * (2 * LAYERS + 1 + VOCABULARY)
    assert ways["FSDP and Ulysses over 8"]["bytes_per_card"]["one_layer"] <= whole["one_layer"] / 6
    assert ways["FSDP over 8, weights in host memory"]["host_bytes"] == 2 * TOTAL
    assert not ways["data parallel"]["fits"]
    assert found["takes"] == "FSDP or ZeRO-3 over 8"
    assert found["command"].startswith("torchrun --standalone --nproc-per-node 8 -m locret.train.command --model ")
    assert found["command"].endswith(" --shard fsdp")
    assert "data parallel: more than 95% of 74.51 GiB" in found["why"]


def test_small_cards_share_the_heads_too(llama_70b: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(llama_70b, capsys, "--devices=8x24GB")
    assert found["takes"] == "tensor parallel over 8"
    assert found["command"].endswith(" --shard tp")


def test_one_card_takes_four_bits_or_the_hosts_memory(llama_70b: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(llama_70b, capsys, "--devices=1x80GB")["takes"] == "4-bit (NF4)"
    small = plan(llama_70b, capsys, "--devices=24GB")
    assert shlex.split(small["command"])[-2:] == ["--max-memory", "{0: 6.5GiB, cpu: 132GiB}"]
    assert small["takes"] == "one card, layers in host memory"
    assert "if the host has 131.42 GiB" in small["why"]
    way = small["choices"][-1]
    assert way["bytes_per_card"]["gathered"] == 2 * VOCABULARY * WIDTH  # larger than a layer
    assert 16 < way["bytes_per_card"]["total"] / GIB < 18
    none = plan(llama_70b, capsys, "--devices=24GB", "--host-memory=64GB")
    assert (none["takes"], none["command"]) == (None, None)
    assert "none fits: one card, layers in host memory takes least" in none["why"]
    assert none["choices"][-1]["shortage"] == "more than 59.60 GiB of host memory"


def test_long_rows_and_questions_apart_are_counted(llama_70b: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = plan(llama_70b, capsys, "--devices=8x48GB", "--max-tokens=131072")
    assert long["takes"] == "FSDP and Ulysses over 8"
    assert long["command"].endswith(" --shard fsdp --sp-size 8")
    evicting = plan(llama_70b, capsys, "--devices=8x80GB", "--answers=each")
    ways = {way["name"]: way for way in evicting["choices"]}
    features = ways["FSDP or ZeRO-3 over 8"]["bytes_per_card"]["features"]
    assert features == LAYERS * 10240 * 80 * DIM * 2
    assert ways["FSDP and Ulysses over 8"]["bytes_per_card"]["features"] == features / 8


def test_the_table_says_the_same(llama_70b: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command([f"--model={llama_70b}", "--dry-run", "--devices=8x80GB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("in bfloat16, rows of 10,240 tokens, on 8 cards of 74.51 GiB (8x80GB)")
    row = next(line for line in lines if line.startswith("| data parallel |"))
    assert [cell.strip() for cell in row.split("|")[2:6]] == ["131.42", "3.13", "3.13", "6.25"]
    assert "take: FSDP or ZeRO-3 over 8" in lines


def test_a_small_backbone_is_loaded_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Without --model it is the paper's, of which nothing has to be fetched."""
    assert command(["--dry-run", "--devices=2x24GB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["takes"] == "data parallel"
    assert command(["--dry-run", "--devices=24GB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["takes"] == "whole"


def test_what_cards_cannot_share_is_said() -> None:
    shape = {"hidden_size": 64, "num_attention_heads": 6, "head_dim": 8, "num_hidden_layers": 2, "vocab_size": 50}
    config = Qwen3Config(**shape, num_key_value_heads=3, intermediate_size=96)
    row = PlannedRow(config=config, hidden_dim=8, dtype=torch.float32, autocast=False, tokens=100, trained_tokens=90)
    devices = Devices.parse("4x1GiB")
    assert sequence_ranks(config, 4) == 1
    assert sequence_ranks(config, 6) == 3
    ways = {way.name: way.shortage(devices, None) for way in choices(row, devices)}
    assert ways["tensor parallel over 4"] == "4 cards do not divide 3 KV heads"
    assert ways["Ulysses"] == "no number of ranks up to 4 divides 4 cards and the KV heads"
    best = taken(choices(row, devices), devices, None)
    assert best is not None
    assert best.name == "data parallel"


def test_tied_weights_are_counted_once() -> None:
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2}
    tied = WeightCount(sketch(LlamaConfig(**shape, vocab_size=999, tie_word_embeddings=True)), torch.float32)
    free = WeightCount(sketch(LlamaConfig(**shape, vocab_size=999, tie_word_embeddings=False)), torch.float32)
    assert free.total - tied.total == 999 * 64 * 4
    assert free.shard(2) - tied.shard(2) == 500 * 64 * 4
    assert tied.gathered() == 999 * 64 * 4 + 64 * 4 + tied.largest_layer


@pytest.mark.parametrize("shard", ["fsdp", "tp"])
def test_the_plan_of_a_run_counts_the_same(
    shard: Any, llama_70b: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one of eight processes plans for is what is planned for eight cards."""
    ways = {way["flags"]: way for way in plan(llama_70b, capsys, "--devices=8x80GB")["choices"]}
    parts = ways[f"--shard {shard}"]["bytes_per_card"]
    monkeypatch.setenv("WORLD_SIZE", "8")
    source = BackboneSource(model=str(llama_70b), shard=shard)
    card = torch.device("cuda")
    planned = plan_weights(source, load_config(source), card, torch.bfloat16)
    assert planned.on(card) == parts["backbone"] + parts.get("gathered", 0)
    if shard == "fsdp":
        source = BackboneSource(model=str(llama_70b), shard=shard, shard_offload="cpu")
        planned = plan_weights(source, load_config(source), card, torch.bfloat16)
        assert (planned.on(card), planned.places) == (parts["gathered"], {"cpu": parts["backbone"]})


PARSED = {"8x80GB": (8, 80 * 10**9), "24GB": (1, 24 * 10**9), "2x80GiB": (2, 80 * GIB), " 2 X 1.5 TiB": (2, 1536 * GIB)}


@pytest.mark.parametrize(("text", "expected"), PARSED.items())
def test_devices_are_read_as_people_write_them(text: str, expected: tuple[int, int]) -> None:
    devices = Devices.parse(text)
    assert (devices.count, devices.each) == expected


REFUSED = [
    (["--devices=8x80GB"], "--devices 8x80GB plans and trains nothing; add --dry-run, or drop it"),
    (["--dry-run", "--host-memory=1GB"], "--host-memory 1GB belongs to --devices; add --devices 8x80GB, or drop it"),
    (["--dry-run", "--devices=8x80GB", "--host-memory=much"], "--host-memory: much is not an amount of memory"),
    *(
        (["--dry-run", f"--devices={text}"], f"--devices {text} is not")
        for text in (
            "eight",
            "8",
            "8x80",
            "0x80GB",
            "8x",
            "x80GB",
            "8x8x80GB",
            "-1x80GB",
            "8x0GB",
            "9" * 9 + "x1GB",
            "8x80parrots",
        )
    ),
    (["--dry-run", "--devices=8x80GB", "--model=no/such/folder"], "--model no/such/folder: there is no such folder"),
]


@pytest.mark.parametrize(("more", "expected"), REFUSED, ids=[" ".join(more) for more, _ in REFUSED])
def test_what_makes_no_plan_is_refused(capsys: pytest.CaptureFixture[str], more: list[str], expected: str) -> None:
    code, message = refused(capsys, ["--dataset=rows.json", *more])
    assert (code, expected in message) == (2, True), message
