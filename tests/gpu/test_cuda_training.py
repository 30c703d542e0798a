"""Training on a GPU: labels and gradients against the CPU's."""

from __future__ import annotations

import pytest
import torch

from locret import RetainingHeads
from locret.infer.speed.plan import random_model, shape_of
from locret.train.step import train_step

TINY = shape_of("tiny").config
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; none is here"),
]


@pytest.fixture(autouse=True)
def _exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def prompt(length: int) -> torch.Tensor:
    return torch.randint(3, 900, (1, length), generator=torch.Generator().manual_seed(0))


def test_a_training_step_on_the_device_gives_the_gradients_of_the_cpu() -> None:
    model, gradients = random_model(TINY), []
    for device in ("cpu", "cuda"):
        heads = RetainingHeads.for_model(model, hidden_dim=64, seed=0).to(device)
        train_step(model.to(device), heads, prompt(500), prompt(40))
        gradients.append([weight.grad.cpu() for weight in heads.parameters() if weight.grad is not None])
    assert len(gradients[0]) == 2 * TINY.num_hidden_layers
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-2)
