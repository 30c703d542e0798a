"""The one-pass step gives the gradients of the obvious two-pass computation, in the memory of one layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from training_cases import CASES, backbone, golden, loss_of, token_ids

from locret import RetainingHeads
from locret.labels.labels import answer_labels, observe, prompt_scores
from locret.train.loss import retention_loss, top_overlap
from locret.train.step import train_step
from locret.train.trainer import head_optimizer
from locret.train.training_options import OptimizerOptions

ROW = token_ids(37), token_ids(8, seed=1)


def heads_for(model: Any) -> RetainingHeads:
    return RetainingHeads.for_model(model, hidden_dim=12, seed=3).requires_grad_(True)


def naive_loss(model: nn.Module, heads: RetainingHeads, prompt: Tensor, labels: Tensor, **loss: Any) -> list[float]:
    """Features of all layers in a pass of their own, then one loss over everything."""
    features: dict[int, Tensor] = {}
    observe(model, prompt, lambda chunk: features.update({chunk.layer_idx: chunk.features()[0]}))
    scores = torch.stack([heads[layer](features[layer][: labels.shape[-1]]).T for layer in heads])
    losses = retention_loss(scores, labels, **loss)
    losses[0].backward()
    return [value.item() for value in losses]


def gradients(heads: RetainingHeads) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in heads.named_parameters() if parameter.grad is not None}


def assert_same_gradients(heads: RetainingHeads, other: RetainingHeads) -> None:
    wanted = gradients(other)
    assert wanted.keys() == gradients(heads).keys() != set()
    for name, gradient in gradients(heads).items():
        torch.testing.assert_close(gradient, wanted[name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("case", "labels"), CASES)
def test_losses_and_gradients_are_those_of_the_original(case: str, labels: str) -> None:
    g = golden(case, labels)
    result = train_step(g.model, g.heads, g.prompt_ids, g.answer_ids)
    assert result.fit.item() == pytest.approx(g.loss["regression"], abs=1e-4)
    assert result.smoothness.item() == pytest.approx(g.loss["smoothness_sum_over_layers"], abs=1e-3)
    assert result.total.item() == pytest.approx(g.loss["total"], abs=1e-4)
    assert result.overlap.mean().item() == pytest.approx(g.loss["top10_overlap"], abs=1e-6)
    prefix = f"grad.{labels}.model.layers."
    expected = {name: grad for name, grad in g.outputs.items() if name.startswith(prefix)}
    assert len(expected) == 4
    for name, grad in expected.items():
        layer, _, linear, _ = name.removeprefix(prefix).split(".")
        torch.testing.assert_close(getattr(g.heads[int(layer)], linear).weight.grad, grad, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("family", "label", "loss"),
    [
        ("llama", {}, {}),
        ("qwen3", {"kind": "log_attention"}, {"objective": "ranking", "temperature": 2.0}),
        (
            "gemma2",
            {"kind": "log_attention", "include_last_prompt_token": True},
            {"objective": "ranking", "alpha": 0.1},
        ),
    ],
)
def test_gradients_are_those_of_the_naive_two_passes(family: str, label: Any, loss: Any) -> None:
    model = backbone(family)
    heads, naive = heads_for(model), heads_for(model)
    for cut in (10**6, 20):  # the second adds to the gradient of the first
        result = train_step(model, heads, *ROW, loss_of(**label, **loss), max_prompt_tokens=cut)
        labels = answer_labels(model, *ROW, **label)[..., :cut]
        losses = naive_loss(model, naive, ROW[0], labels, **loss)
        assert [value.item() for value in (result.total, result.fit, result.smoothness)] == pytest.approx(losses)
        overlap = top_overlap(prompt_scores(model, heads, ROW[0])[..., :cut], labels)
        assert torch.equal(result.overlap, overlap)
    assert result.tokens == 45
    assert_same_gradients(heads, naive)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_step_learns_the_largest_labels_of_all_answers_that_are_asked_apart(family: str) -> None:
    model, document = backbone(family), token_ids(33)
    asked = [(token_ids(5, seed=1), token_ids(4, seed=2)), (token_ids(3, seed=3), token_ids(6, seed=4))]
    loss = loss_of("log_attention", objective="ranking", include_last_prompt_token=True)
    heads, naive = heads_for(model), heads_for(model)
    result = train_step(model, heads, document, asked[0][1], loss, asked=asked, max_prompt_tokens=30)
    labels = [
        answer_labels(model, torch.cat([document, question], dim=1), answer, "log_attention", True)[..., :30]
        for question, answer in asked
    ]
    losses = naive_loss(model, naive, document, torch.stack(labels).amax(0), objective="ranking")
    assert [value.item() for value in (result.total, result.fit, result.smoothness)] == pytest.approx(losses)
    assert result.tokens == 33 + 5 + 4 + 3 + 6
    assert_same_gradients(heads, naive)


class Waits(TorchDispatchMode):
    """Notes the operations after which the host must wait for a GPU: those whose result it has to know."""

    NAMES = ("local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.split(".")[0].lstrip("_").startswith(self.NAMES):
            self.found.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("objective", ["regression", "ranking"])
def test_a_step_waits_for_the_device_no_more_often_than_a_plain_forward(objective: str) -> None:
    model = backbone()
    heads, loss = heads_for(model), loss_of("log_attention", objective=objective)
    with Waits() as plain, torch.no_grad():
        model.get_decoder()(input_ids=torch.cat(ROW, dim=1), use_cache=False)
    with Waits() as waits:
        result = train_step(model, heads, *ROW, loss)
    assert waits.found == plain.found  # transformers looks for several texts in a row, once
    with Waits() as told:
        float(result.total)
    assert len(told.found) == 1


def test_shares_given_to_backward_add_up_to_the_total_and_one_token_trains() -> None:
    model, shares = backbone(), []
    heads = heads_for(model)
    result = train_step(model, heads, token_ids(9), token_ids(3), backward=lambda loss: shares.append(loss.item()))
    assert len(shares) == 3
    assert sum(shares) == pytest.approx(result.total.item(), rel=1e-5)
    assert not gradients(heads)
    assert train_step(model, heads, token_ids(1), token_ids(1)).smoothness.item() == 0.0
    assert all(grad.isfinite().all() for grad in gradients(heads).values())


def test_bfloat16_autocast_keeps_float32_gradients_near_those_of_float32() -> None:
    model = backbone()
    heads, exact = heads_for(model), heads_for(model)
    train_step(model, exact, *ROW)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        train_step(model, heads, *ROW)
    for name, grad in gradients(heads).items():
        assert grad.dtype == torch.float32
        assert not torch.equal(grad, gradients(exact)[name])
        assert (grad - gradients(exact)[name]).norm() < 0.1 * gradients(exact)[name].norm()


def test_the_schedule_is_the_papers() -> None:
    heads = heads_for(backbone())
    papers = head_optimizer(heads, OptimizerOptions())[1].lr_lambdas[0]
    assert [papers(step) for step in (0, 1000, 2000, 2500, 3000)] == pytest.approx([0, 0.5, 1, 0.5, 0])
