"""The one-pass step gives the gradients of the obvious two-pass computation, in the memory of one layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training_cases import CASES, backbone, golden, loss_of, token_ids

from locret import RetainingHeads
from locret.labels.labels import answer_labels, observe, prompt_scores
from locret.train.loss import retention_loss, top_overlap
from locret.train.step import train_step

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
        ("qwen3", {"kind": "log_attention"}, {"objective": "ranking"}),
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


def test_shares_given_to_backward_add_up_to_the_total_and_one_token_trains() -> None:
    model, shares = backbone(), []
    heads = heads_for(model)
    result = train_step(model, heads, token_ids(9), token_ids(3), backward=lambda loss: shares.append(loss.item()))
    assert len(shares) == 3
    assert sum(shares) == pytest.approx(result.total.item(), rel=1e-5)
    assert not gradients(heads)
    assert train_step(model, heads, token_ids(1), token_ids(1)).smoothness.item() == 0.0
    assert all(grad.isfinite().all() for grad in gradients(heads).values())
