"""A step's memory, counted byte by byte: at most three layers' activations above the weights, and what the plan says.

One layer's activations are what one decoder layer of the plain backbone holds at its peak, its input included, while it
reads the same tokens without gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
from allocations import peak_bytes
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, PreTrainedModel

from locret import RetainingHeads
from locret.backbone.adapters import describe, find_decoder
from locret.backbone.chunk import Attended, Projections
from locret.infer.speed.shapes import random_model
from locret.labels.labels import layer_labels, logit_bytes
from locret.train.memory_plan import memory_plan
from locret.train.optimizer import head_optimizer
from locret.train.step import train_step
from locret.train.training_options import Loss, OptimizerOptions

TOKENS = 512
SHAPES = {
    "cpu-512": ({}, 64),
    "wide heads": ({}, 256),
    "thin MLP": ({"intermediate_size": 256}, 128),
    "no groups": ({"num_key_value_heads": 8}, 64),
}


@dataclass(frozen=True)
class Step:
    """One row of training on one backbone, and its parts."""

    model: PreTrainedModel
    heads: RetainingHeads
    prompt_1T: Tensor
    answer_1A: Tensor
    kind: str

    @cached_property
    def both_1S(self) -> Tensor:
        return torch.cat([self.prompt_1T, self.answer_1A], dim=1)

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        return head_optimizer(self.heads, OptimizerOptions())[0]

    def row(self) -> None:
        """Read the row, and add its gradients to those of the heads."""
        half = self.model.dtype in (torch.bfloat16, torch.float16)
        with torch.autocast("cpu", dtype=self.model.dtype if half else None, enabled=half):
            train_step(self.model, self.heads, self.prompt_1T, self.answer_1A, Loss(label_kind=self.kind))

    def step(self) -> None:
        """Do all that one optimizer step of the paper's recipe does, batch 1."""
        self.row()
        nn.utils.clip_grad_value_(self.heads.parameters(), 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()


def layer_activations(model: PreTrainedModel, ids_1S: Tensor) -> int:
    """Return the bytes of one layer's activations over these tokens, as defined above."""
    layer: Any = find_decoder(model).layers[describe(model).layers[0]]
    given: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    hook = layer.register_forward_pre_hook(lambda _, args, kwargs: given.append((args, kwargs)), with_kwargs=True)
    with torch.no_grad():
        model.get_decoder()(input_ids=ids_1S, use_cache=False)
        hook.remove()
        (hidden, *more), options = given[0]
        return peak_bytes(lambda: layer(hidden.clone(), *more, **options))


def row(
    name: str, kind: str, answer: int, layers: int = 3, dtype: torch.dtype = torch.float32, neighbours: int = 0
) -> Step:
    changes, hidden_dim = SHAPES[name]
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
    model = random_model(LlamaConfig(**numbers), dtype=dtype)
    heads = RetainingHeads.for_model(model, hidden_dim, seed=0, neighbours=neighbours)
    ids = torch.randint(3, 256, (1, TOKENS + answer), generator=torch.Generator().manual_seed(0))
    return Step(model, heads, ids[:, :TOKENS], ids[:, TOKENS:], kind)


@pytest.mark.parametrize(("kind", "answer"), [("logit", 16), ("logit", 400), ("log_attention", 400)])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.slow
def test_a_first_step_holds_at_most_three_layers_activations(name: str, kind: str, answer: int) -> None:
    """All that a step allocates counts: gradients and the optimizer's state too, of as many layers as there are."""
    step = row(name, kind, answer)
    layer = layer_activations(step.model, step.both_1S)
    peak = peak_bytes(step.step)
    assert layer < peak <= 3 * layer


def test_a_layers_activations_are_those_of_its_widest_moment() -> None:
    one = row("cpu-512", "logit", 16)
    tokens = TOKENS + 16
    # In the MLP: the residual, the normed states, the gate, its activation and the projection up, for each token.
    widest = tokens * 4 * (2 * 512 + 3 * 1536)
    assert layer_activations(one.model, one.both_1S) == pytest.approx(widest, rel=0.1)


@pytest.mark.parametrize("kind", ["logit", "log_attention"])
@pytest.mark.slow
def test_layers_add_nothing_but_gradients(kind: str) -> None:
    peaks = []
    for layers in (2, 6):
        step = row("cpu-512", kind, 64, layers)
        step.row()  # gradients are there from now on
        peaks.append(peak_bytes(step.row))
    assert peaks[1] - peaks[0] < 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.slow
def test_the_plan_is_what_a_row_takes(name: str, dtype: torch.dtype) -> None:
    step = row(name, "log_attention", 200, layers=2, dtype=dtype)
    step.row()
    taken = peak_bytes(step.row)
    tokens = {"tokens": TOKENS + 200, "trained_tokens": TOKENS}
    hidden_dim = step.heads.config.hidden_dim
    plan = memory_plan(
        step.model.config, 0, hidden_dim=hidden_dim, dtype=dtype, autocast=dtype != torch.float32, **tokens
    )
    assert 0.75 * plan["one_layer"] <= taken <= 1.01 * plan["one_layer"]


@pytest.mark.slow
def test_the_plan_counts_heads_that_look_at_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = {"hidden_size": 256, "intermediate_size": 128, "head_dim": 32}
    monkeypatch.setitem(SHAPES, "narrow", (narrow, 1024))
    numbers: dict[str, Any] = {
        "dtype": torch.float32,
        "autocast": False,
        "tokens": TOKENS + 8,
        "trained_tokens": TOKENS,
    }
    taken, planned = [], []
    for near in (0, 3):
        step = row("narrow", "log_attention", 8, layers=2, neighbours=near)
        step.row()
        taken.append(peak_bytes(step.row))
        planned.append(memory_plan(step.model.config, 0, hidden_dim=1024, neighbours=near, **numbers))
        assert planned[-1]["heads"] == sum(weights.numel() * 4 for weights in step.heads.parameters())
        assert 0.75 * planned[-1]["one_layer"] <= taken[-1] <= 1.01 * planned[-1]["one_layer"]
    assert taken[1] - taken[0] == pytest.approx(planned[1]["one_layer"] - planned[0]["one_layer"], rel=0.05)


@pytest.mark.slow
def test_the_plan_counts_values_behind_the_output_projection(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 32, "head_dim": 64}
    monkeypatch.setitem(SHAPES, "wide", (wide, 64))
    step = row("wide", "kvzip_plus", 8, layers=2)
    step.row()
    taken = peak_bytes(step.row)
    numbers: dict[str, Any] = {"dtype": torch.float32, "tokens": TOKENS + 8, "trained_tokens": TOKENS}
    plain, weighed = (
        memory_plan(step.model.config, 0, hidden_dim=64, autocast=False, weighed_labels=flag, **numbers)["one_layer"]
        for flag in (False, True)
    )
    assert plain < 0.9 * weighed
    assert 0.75 * weighed <= taken <= 1.01 * weighed


class LargestTensor(TorchDispatchMode):
    """Notes the elements of the largest tensor that anything returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return out


@pytest.mark.parametrize("kind", ["logit", "log_attention"])
@pytest.mark.slow
def test_no_matrix_of_answer_by_prompt_exists(kind: str) -> None:
    prompt, answer, heads, dim = 3000, 1500, 4, 8
    query = torch.randn(1, heads, prompt + answer, dim)
    key = torch.randn(1, 2, prompt + answer, dim)
    nothing = Projections(None)  # type: ignore[arg-type]
    chunk = Attended(layer_idx=0, query=query, key=key, value=key, scaling=1.0, softcap=None, projections=nothing)
    with LargestTensor() as seen:
        layer_labels(chunk, prompt, kind, False)
    assert seen.elements <= query.numel() < prompt * answer / 20
    # The three of them that the plan counts are what is alive at once, beside what is as small as the keys.
    with torch.no_grad():
        peak = peak_bytes(lambda: layer_labels(chunk, prompt, kind, False))
    assert peak <= logit_bytes(heads, dim, prompt + answer) + key.nbytes
