"""A step's memory, counted byte by byte: one layer's whatever their number, and what the plan says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from allocations import peak_bytes
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from locret import RetainingHeads
from locret.backbone.chunk import Attended, Projections
from locret.infer.speed.shapes import random_model
from locret.labels.labels import layer_labels, logit_bytes
from locret.train.plan import memory_plan
from locret.train.step import train_step
from locret.train.training_options import Loss

TOKENS = 512
NARROW = {"hidden_size": 256, "intermediate_size": 128, "head_dim": 32}


@dataclass(frozen=True)
class Row:
    """One row of training on one backbone."""

    model: PreTrainedModel
    heads: RetainingHeads
    ids: Tensor
    kind: str

    def read(self) -> None:
        """Read the row, and add its gradients to those of the heads."""
        half = self.model.dtype in (torch.bfloat16, torch.float16)
        loss = Loss(label_kind=self.kind)
        with torch.autocast("cpu", dtype=self.model.dtype if half else None, enabled=half):
            train_step(self.model, self.heads, self.ids[:, :TOKENS], self.ids[:, TOKENS:], loss)

    def taken(self) -> int:
        """Return the bytes that are allocated at once while the row is read, its gradients being there already."""
        self.read()
        return peak_bytes(self.read)


def row(changes: Any, hidden_dim: int, kind: str, answer: int, layers: int = 2, **more: Any) -> Row:
    numbers: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_hidden_layers": layers,
        **changes,
    }
    model = random_model(LlamaConfig(**numbers), dtype=more.pop("dtype", torch.float32))
    heads = RetainingHeads.for_model(model, hidden_dim, seed=0, **more)
    ids = torch.randint(3, 256, (1, TOKENS + answer), generator=torch.Generator().manual_seed(0))
    return Row(model, heads, ids, kind)


def test_layers_add_nothing_but_gradients() -> None:
    few, many = (row({}, 64, "log_attention", 64, layers).taken() for layers in (2, 6))
    assert many - few < 4096


@pytest.mark.parametrize(
    ("changes", "hidden_dim", "answer", "dtype"),
    [
        ({}, 64, 200, torch.float32),
        ({}, 256, 200, torch.bfloat16),
        (NARROW, 1024, 8, torch.float32),
    ],
    ids=["cpu-512", "wide heads, bfloat16", "a narrow backbone"],
)
def test_the_plan_is_what_a_row_takes(changes: Any, hidden_dim: int, answer: int, dtype: Any) -> None:
    step = row(changes, hidden_dim, "log_attention", answer, dtype=dtype)
    plan = memory_plan(
        step.model.config,
        0,
        hidden_dim=hidden_dim,
        dtype=dtype,
        autocast=dtype != torch.float32,
        tokens=TOKENS + answer,
        trained_tokens=TOKENS,
    )
    assert plan["heads"] == sum(weights.numel() * 4 for weights in step.heads.parameters())
    assert 0.75 * plan["one_layer"] <= step.taken() <= 1.01 * plan["one_layer"]


@pytest.mark.parametrize("kind", ["logit", "log_attention"])
def test_no_matrix_of_answer_by_prompt_exists(kind: str) -> None:
    prompt, answer, heads, dim = 3000, 1500, 4, 8
    query, key = torch.randn(1, heads, prompt + answer, dim), torch.randn(1, 2, prompt + answer, dim)
    nothing = Projections(None)  # type: ignore[arg-type]
    chunk = Attended(layer_idx=0, query=query, key=key, value=key, scaling=1.0, softcap=None, projections=nothing)
    with torch.no_grad():
        peak = peak_bytes(lambda: layer_labels(chunk, prompt, kind, False))
    assert peak <= logit_bytes(heads, dim, prompt + answer) + key.nbytes < 4 * prompt * answer / 2
