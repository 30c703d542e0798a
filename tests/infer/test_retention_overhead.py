"""The benchmark measures both sides of every ratio, and its floor really reads the same chunks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from locret.infer.speed.floor import read_static
from locret.infer.speed.lab import retention_overhead as benchmark
from locret.infer.speed.lab import rows_together
from locret.infer.speed.shapes import random_model

CONFIG = LlamaConfig(
    vocab_size=99,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    bos_token_id=1,
    eos_token_id=2,
)


@pytest.mark.slow
def test_a_record_holds_ratios_of_real_runs_and_where_they_were_taken(tmp_path: Path) -> None:
    model = random_model(CONFIG)
    model.save_pretrained(tmp_path / "model")
    numbers = ["--tokens", "64", "--train-tokens", "32", "--answer-tokens", "4", "--budget", "16", "--chunk-size", "8"]
    more = ["--stabilizers", "4", "--local-len", "4", "--repeats", "3", "--hidden-dim", "8"]
    code = benchmark.command(
        ["--model", str(tmp_path / "model"), *numbers, *more, "--threads", "1", "--output", str(tmp_path / "record")]
    )
    record = json.loads((tmp_path / "record.json").read_text())
    assert code == 0
    assert set(record["ratios"]) == {"prefill/floor", "prefill 2N/N", "training/forward"}
    for ratio in record["ratios"].values():
        assert 0 < ratio["p20"] <= ratio["p50"] <= ratio["p80"]
    assert record["where"]["shape"]["layers"] == 2
    assert "| prefill/floor |" in (tmp_path / "record.md").read_text()


def test_the_floor_feeds_the_same_tokens_in_the_same_chunks() -> None:
    model, fed = random_model(CONFIG), []
    ids = torch.randint(3, 99, (1, 53))

    def note(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        fed.append(kwargs["input_ids"])

    model.get_decoder().register_forward_pre_hook(note, with_kwargs=True)
    read_static(model, ids, budget=20, chunk_size=10, local_len=5)
    assert [part.shape[1] for part in fed] == [10, 10, 10, 10, 8, 5]
    assert torch.equal(torch.cat(fed, dim=1), ids)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.slow
def test_rows_read_together_are_timed_against_each_by_itself(tmp_path: Path) -> None:
    random_model(CONFIG).save_pretrained(tmp_path / "model")
    numbers = ["--tokens", "64", "--rows", "3", "--budget", "16", "--chunk-size", "8", "--stabilizers", "4"]
    more = ["--local-len", "4", "--repeats", "2", "--hidden-dim", "8", "--threads", "1"]
    code = rows_together.command(
        ["--model", str(tmp_path / "model"), *numbers, *more, "--output", str(tmp_path / "record")]
    )
    record = json.loads((tmp_path / "record.json").read_text())
    assert code == 0
    assert set(record["ratios"]) == {"together/apart", "equal/apart"}
    assert all(ratio["p50"] > 0 for ratio in record["ratios"].values())


def test_a_batch_of_one_row_is_refused() -> None:
    with pytest.raises(ValueError, match="--rows 1 is no batch"):
        rows_together.command(["--rows", "1"])
