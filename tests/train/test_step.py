"""The one-pass step gives the gradients of the obvious two-pass computation, in one layer's memory; and its loss."""

from __future__ import annotations

from typing import Any

import oracle as reference
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
    observe(model, prompt, lambda chunk: features.update({chunk.layer_idx: chunk.projections.features()[0]}))
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


def pair(shape: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random scores and labels."""
    generator = torch.Generator().manual_seed(0)
    scores, labels = (torch.randn(shape, generator=generator) * 2 for _ in range(2))
    return scores, labels


@pytest.mark.parametrize("shape", [(1, 1, 2), (3, 2, 7), (2, 4, 31)])
def test_losses_are_those_of_the_oracle(shape: tuple[int, int, int]) -> None:
    scores, labels = pair(shape)
    expected = reference.loss(scores, labels, 0.3)
    assert [value.item() for value in retention_loss(scores, labels, 0.3)] == pytest.approx(expected, abs=1e-5)
    total, fit, smoothness = retention_loss(scores, labels, 0.3, objective="ranking")
    assert fit.item() == pytest.approx(reference.ranking_loss(scores, labels), abs=1e-5)
    assert smoothness.item() == pytest.approx(expected[2])
    assert total.item() == pytest.approx(fit.item() + 0.3 * smoothness.item(), abs=1e-5)


def test_overlap_counts_the_best_tenth_of_each_head() -> None:
    labels = torch.arange(20.0).expand(2, 1, 20)  # best: 18 and 19
    scores = labels.clone()
    scores[1, 0, 19] = -1.0  # best of the second layer: 17 and 18
    assert top_overlap(scores, labels).tolist() == [1.0, 0.5]
    assert top_overlap(scores[..., :3], labels[..., :3]).tolist() == [1.0, 1.0]  # at least one


@pytest.mark.parametrize("autocast", [False, True])
def test_a_ranking_of_huge_values_is_finite(autocast: bool) -> None:
    scores = torch.tensor([[[3e4, -3e4, 0.0, 1.0]]], requires_grad=True)
    labels = torch.tensor([[[-3e4, 3e4, 0.0, -1.0]]])
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        total, fit, _ = retention_loss(scores, labels, 0.0, objective="ranking")
    total.backward()
    assert fit.item() == pytest.approx(6e4)
    assert scores.grad is not None
    assert scores.grad.tolist() == [[[1.0, -1.0, 0.0, 0.0]]]


def test_a_loss_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match='objective="pairs" is unknown; choose one of regression, ranking'):
        retention_loss(*pair((1, 1, 2)), objective="pairs")
