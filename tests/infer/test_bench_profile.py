"""The profile command: what it marks, how it shares time out, and that nothing stays behind."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from locret.backbone import instrument
from locret.cache import layer as layers
from locret.cache import reader
from locret.infer.speed.lab import profile as bench
from locret.infer.speed.lab.stages import ELSEWHERE, MARK, by_stage, marked_stages
from locret.infer.speed.shapes import TINY, random_model

LAYERS = TINY.num_hidden_layers
SMALL = ["--shape", "tiny", "--threads", "1", "--device", "cpu", "--answer-tokens", "4"]
BUDGET = ["--budget", "24", "--chunk-size", "16", "--stabilizers", "4", "--local-len", "8"]


def profiled(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    line = [*SMALL, "--tokens", "64", *arguments, "--output", str(tmp_path / "profile")]
    assert bench.command(line) == 0
    record: dict[str, Any] = json.loads((tmp_path / "profile.json").read_text())
    return record


def stage_names(record: dict[str, Any]) -> set[str]:
    return {row["name"] for row in record["stages"]}


BACKBONE = {"MLP", "q, k, v projections", "output projection", "norms", "attention kernel", "embeddings"}


@pytest.mark.slow
def test_a_profile_of_prefill_knows_its_stages_and_adds_up(tmp_path: Path) -> None:
    record = profiled(tmp_path, *BUDGET)
    assert stage_names(record) >= BACKBONE | {"scores", "eviction", "cache update: append"}
    assert sum(row["share"] for row in record["stages"]) == pytest.approx(1, abs=0.01)
    calls = {row["name"]: row["calls"] for row in record["operations"]}
    # 4 chunks, the last of which has 8 tokens and is followed by 8 local ones; q, k, v, o, gate, up, down, fc1, fc2 of
    # Five chunks, and the language-model head.
    assert calls["aten::mm"] == 5 * LAYERS * 9 + 1
    assert record["where"]["options"]["stabilizers"] == 4
    page = (tmp_path / "profile.md").read_text()
    assert "| MLP |" in page
    assert "`python -m locret.infer.speed.lab.profile --shape tiny" in page


@pytest.mark.slow
def test_a_profile_of_decoding_leaves_out_the_prompt(tmp_path: Path) -> None:
    record = profiled(tmp_path, "--what", "decode", "--method", "full", "--top", "100")
    calls = {row["name"]: row["calls"] for row in record["operations"]}
    assert calls["aten::mm"] == 4 * (LAYERS * 7 + 1)
    assert "eviction" not in stage_names(record)


def test_a_profile_of_training_has_labels_heads_and_one_optimizer_step(tmp_path: Path) -> None:
    record = profiled(tmp_path, "--what", "training", "--top", "100", "--trace", str(tmp_path / "trace.json"))
    assert stage_names(record) >= BACKBONE | {
        "labels",
        "retaining heads: forward and backward",
        "optimizer: clip, AdamW",
    }
    assert "eviction" not in stage_names(record)
    calls = {row["name"]: row["calls"] for row in record["operations"]}
    assert calls["aten::_fused_adamw_"] == 1
    assert calls["aten::topk"] == 2 * LAYERS  # of scores and of labels, layer by layer: what the log shows
    assert any(
        event.get("name") == MARK + "labels"
        for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    )


def test_shapes_tell_products_apart(tmp_path: Path) -> None:
    record = profiled(tmp_path, "--what", "training", "--by-shape", "--top", "100")
    products = [row["shapes"] for row in record["operations"] if row["name"] == "aten::mm"]
    assert len(products) == len(set(products)) > 4
    assert "[[68, 192], [192, 384], []]" in products or "[[68, 192], [192, 384]]" in products  # the gate of the MLP


def test_no_mark_stays_behind() -> None:
    model = random_model(TINY)
    before = (instrument.attend, reader.Reader.attended, layers.RetentionLayer.evict)
    with marked_stages(model, training=True):
        assert instrument.attend is not before[0]
    assert before == (instrument.attend, reader.Reader.attended, layers.RetentionLayer.evict)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_time_belongs_to_the_innermost_stage() -> None:
    def event(name: str, time: float, parent: Any = None, device: Any = DeviceType.CPU) -> Any:
        return SimpleNamespace(name=name, time=time, cpu_parent=parent, device_type=device)

    outer = event(MARK + "scores", 1.0)
    inner = event(MARK + "eviction", 2.0, outer)
    call = event("aten::gather", 4.0, inner)
    events = [outer, inner, call, event("aten::copy_", 8.0, call), event("aten::mm", 16.0, outer)]
    events += [event("aten::add", 32.0), event("a kernel", 64.0, device=DeviceType.CUDA)]
    events += [event("autograd::engine::evaluate_function: MmBackward0", 128.0)]
    assert by_stage(events, lambda one: one.time) == {
        "scores": 17.0,
        "eviction": 14.0,
        ELSEWHERE: 32.0,
        "retaining heads: forward and backward": 128.0,
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "--tokens 0 is too small; give 1 or more"),
        (["--trace", "nowhere/trace.json"], "--trace nowhere/trace.json: there is no folder nowhere; make it first"),
        (["--method", "h20"], "h20"),
    ],
)
def test_what_cannot_be_profiled_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bench.command([*SMALL, *arguments])


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_without_a_gpu_its_cost_stays_unknown() -> None:
    with pytest.raises(
        ValueError, match="--shape llama-3.1-8b --device auto: no CUDA device is here, so its cost stays"
    ):
        bench.command(["--shape", "llama-3.1-8b"])
