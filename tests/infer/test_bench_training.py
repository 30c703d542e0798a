"""What the benchmark of a training step measures is the trainer's own step, and what it counts is what is allocated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from locret import RetainingHeads
from locret.infer.speed.lab import training_cost as bench
from locret.infer.speed.lab.training_setup import TrainingSetup
from locret.infer.speed.shapes import random_model

SMALL = LlamaConfig(
    vocab_size=99,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    bos_token_id=1,
    eos_token_id=2,
)


def setup() -> TrainingSetup:
    model, ids = random_model(SMALL), torch.randint(3, 99, (1, 24), generator=torch.Generator().manual_seed(0))
    heads = RetainingHeads.for_model(model, 8, seed=0)
    return TrainingSetup(model, heads, ids[:, :20], ids[:, 20:], "logit")


@pytest.mark.slow
def test_a_record_holds_ratios_bytes_and_rates_of_real_steps(tmp_path: Path) -> None:
    random_model(SMALL).save_pretrained(tmp_path / "model")
    numbers = ["--tokens", "32", "--answer-tokens", "4", "--repeats", "2", "--hidden-dim", "8", "--threads", "1"]
    paths = ["--model", str(tmp_path / "model"), "--output", str(tmp_path / "record"), "--device", "cpu"]
    assert bench.command([*paths, *numbers]) == 0
    record = json.loads((tmp_path / "record.json").read_text())
    assert set(record["ratios"]) == {"training/forward", "labels/forward", "optimizer/forward"}
    for ratio in record["ratios"].values():
        assert 0 < ratio["p20"] <= ratio["p50"] <= ratio["p80"]
    held = record["bytes"]
    assert held["layer"] < held["forward"] < held["row"] < held["first_step"]
    # Gradients and two moments of 2 layers of 8 x (64 + 1) weights are the least that a first step adds.
    assert held["first_step"] - held["row"] < 3 * 4 * 2 * 8 * 65
    # Per token and layer: q, k, v, o, gate, up, down; and logits and sums of the 36 x 37 / 2 pairs of each head.
    linear = 16 * (16 + 8 + 8 + 16 + 3 * 24)
    assert record["forward_flops"] == 2 * (2 * 36 * linear + 4 * 16 * 36 * 37 // 2)
    assert all(share["p50"] > 0 for share in record["share_of_matrix_rate"].values())
    assert record["where"]["options"]["threads"] == 1
    assert "shape" not in record["where"]["options"]
    assert "| training/forward |" in (tmp_path / "record.md").read_text()


def test_a_step_is_a_row_clipping_and_adamw_and_leaves_no_gradients() -> None:
    row, twin = setup(), setup()
    for group in row.optimizer.param_groups:
        group["lr"] = 1e-2  # at its first step the trainer's schedule is at 0
    row.step()
    twin.row()
    torch.nn.utils.clip_grad_value_(twin.heads.parameters(), 0.5)
    torch.optim.AdamW(twin.heads.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.01, foreach=False).step()
    for ours, theirs in zip(row.heads.parameters(), twin.heads.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
        assert ours.grad is None
    assert not torch.equal(next(row.heads.parameters()), next(setup().heads.parameters()))


def test_its_own_heads_are_not_the_others() -> None:
    row = setup()
    other = row.with_own_heads()
    other.row()
    assert all(weight.grad is None for weight in row.heads.parameters())
    assert other.optimizer.param_groups[0]["params"][0] is next(other.heads.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--answer-tokens", "0"], "--answer-tokens 0 is too small; give 1 or more"),
        (["--label-kind", "softmax"], 'label kind "softmax" is unknown'),
        (["--shape", "gpt"], "--shape gpt is unknown; choose one of cpu-512"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bench.command(arguments)
