"""Training on a GPU: label kernels against the plain path, gradients against the CPU's."""

from __future__ import annotations

import warnings

import pytest
import torch

from locret import RetainingHeads
from locret.backbone.chunk import Attended
from locret.infer.speed.shapes import random_model, shape_of
from locret.labels import names
from locret.labels.labels import answer_labels, layer_labels, observe
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", names())
def test_label_kernels_give_the_labels_of_the_plain_path(kind: str, dtype: torch.dtype) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    model, fused, plain = random_model(TINY, dtype=dtype, device="cuda"), [], []

    def note(chunk: Attended) -> None:
        fused.append(layer_labels(chunk, 900, kind, True, fused=True))
        plain.append(layer_labels(chunk, 900, kind, True, fused=False))

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # kernels that do not run here are warned about
        answer_labels(model, prompt(900), prompt(70), kind)
    observe(model, prompt(970).to("cuda"), note)
    for ours, theirs in zip(fused, plain, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-5)


def test_a_training_step_on_the_device_gives_the_gradients_of_the_cpu() -> None:
    model, gradients = random_model(TINY), []
    for device in ("cpu", "cuda"):
        heads = RetainingHeads.for_model(model, hidden_dim=64, seed=0).to(device)
        train_step(model.to(device), heads, prompt(500), prompt(40))
        gradients.append([weight.grad.cpu() for weight in heads.parameters() if weight.grad is not None])
    assert len(gradients[0]) == 2 * TINY.num_hidden_layers
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-2)
