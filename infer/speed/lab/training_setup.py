"""A training step and its parts, in pieces that a clock, a byte counter or a profiler can be put around.

A layer's activations are the yardstick of a step's memory: the most bytes alive at one moment while one decoder layer
of the plain backbone, as transformers runs it, reads the same tokens without gradients, the hidden states it is given
included.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from locret import RetainingHeads
from locret.backbone.adapters import describe, find_decoder
from locret.infer.speed.allocations import peak_bytes
from locret.infer.speed.runs import BenchSetup
from locret.labels.labels import layer_labels, observe
from locret.train.optimizer import head_optimizer
from locret.train.step import train_step
from locret.train.training_options import Loss, OptimizerOptions

_CLIP = 0.5


@dataclass(frozen=True)
class TrainingSetup:
    """One row of training on one backbone."""

    model: PreTrainedModel
    heads: RetainingHeads
    prompt_1T: Tensor
    answer_1A: Tensor
    kind: str
    """Of the labels, see `answer_labels`."""

    @cached_property
    def both_1S(self) -> Tensor:
        """Prompt and answer."""
        return torch.cat([self.prompt_1T, self.answer_1A], dim=1)

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        """The trainer's own."""
        return head_optimizer(self.heads, OptimizerOptions())[0]

    @torch.no_grad()
    def forward(self) -> None:
        """Read the row with the plain backbone, as transformers runs it."""
        self.model.get_decoder()(input_ids=self.both_1S, use_cache=False)

    def labels(self) -> None:
        """Read the row and compute every layer's labels."""
        prompt = self.prompt_1T.shape[1]
        observe(self.model, self.both_1S, lambda chunk: _drop(layer_labels(chunk, prompt, self.kind, False)))

    def row(self) -> None:
        """Read the row, and add its gradients to those of the heads."""
        with self.autocast():
            train_step(self.model, self.heads, self.prompt_1T, self.answer_1A, Loss(label_kind=self.kind))

    def autocast(self) -> AbstractContextManager[object]:
        """Return what the trainer chooses for a backbone of this dtype."""
        half = self.model.dtype in (torch.bfloat16, torch.float16)
        return torch.autocast(self.model.device.type, dtype=self.model.dtype if half else None, enabled=half)

    def update(self) -> None:
        """Clip the gradients and step the heads; the gradients stay."""
        nn.utils.clip_grad_value_(self.heads.parameters(), _CLIP)
        self.optimizer.step()

    def first_step(self) -> None:
        """Do all that makes memory grow over the first optimizer step; its gradients stay."""
        self.row()
        self.update()

    def step(self) -> None:
        """Do all that one optimizer step of the paper's recipe does, batch 1."""
        self.first_step()
        self.optimizer.zero_grad()

    def with_own_heads(self) -> TrainingSetup:
        """Return the same with heads, gradients and an optimizer of its own."""
        return TrainingSetup(self.model, copy.deepcopy(self.heads), self.prompt_1T, self.answer_1A, self.kind)


def training_setup(setup: BenchSetup, answer_tokens: int, kind: str) -> TrainingSetup:
    """Return a row whose answer is the last tokens of the longest prompt."""
    assert setup.heads is not None
    end = setup.prompt_1N.shape[1] - answer_tokens
    return TrainingSetup(setup.model, setup.heads, setup.prompt_1N[:, :end], setup.prompt_1N[:, end:], kind)


def peak_above(side: Callable[[], object], device: torch.device) -> int:
    """Run something once and return the most bytes alive above what was there before."""
    if device.type == "cpu":
        return peak_bytes(side).everything
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    side()
    return torch.cuda.max_memory_allocated(device) - before


def layer_activations(model: PreTrainedModel, ids_1S: Tensor) -> int:
    """Return the bytes of one layer's activations over these tokens, as the module's docstring defines them."""
    layer: Any = find_decoder(model).layers[describe(model).layers[0]]
    given: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    hook = layer.register_forward_pre_hook(lambda _, args, kwargs: given.append((args, kwargs)), with_kwargs=True)
    with torch.no_grad():
        model.get_decoder()(input_ids=ids_1S, use_cache=False)
        hook.remove()
        (hidden, *more), options = given[0]
        return peak_above(lambda: layer(hidden.clone(), *more, **options), ids_1S.device)


def _drop(_labels: Tensor) -> None:
    """Keep no layer's labels, as training keeps none."""
