"""The loss equals the oracle's; that it equals the original implementation's is shown by the step."""

from __future__ import annotations

import oracle as reference
import pytest
import torch

from locret.train.loss import retention_loss, top_overlap


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
