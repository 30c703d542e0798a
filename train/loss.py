"""How far predicted scores are from the labels, and how well they agree on what to keep.

Paper:    Locret, arXiv 2410.01805, Eq. 3, with the reductions of the original code: the regression is averaged over
          layers and the smoothness summed over them, which makes alpha, in effect, larger by the number of layers.
Deviates: `objective="ranking"` puts a listwise loss in the regression's place: ListNet (Cao et al., ICML 2007), the
          top-one distributions of labels and scores compared. Eviction only sorts, so only the order has to be right,
          and errors among the units that are kept weigh more than errors among those that are not.
"""
# L layers, K KV heads, T prompt tokens

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from locret.train.training_options import PAPER, Loss


def retention_loss(
    scores: Tensor,
    labels: Tensor,
    alpha: float = PAPER.alpha,
    *,
    objective: Literal["regression", "ranking"] = "regression",
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (total, fit, smoothness), three scalars; total = fit + alpha * smoothness.

    Fit is, for the objective "regression", the smooth L1 loss (beta 1) of scores and labels, averaged over everything;
    for "ranking", KL(softmax(labels) || softmax(scores)) over the tokens, in nats, averaged over KV heads and layers.
    Smoothness is the squared difference of the scores of neighbouring tokens, averaged per layer and summed over
    layers; 0 for a single token.

    Args:
        scores: (L, K, T) predicted scores, float32; or (K, T) for one layer.
        labels: Of the same shape, see `answer_labels`.
        alpha: Weight of the smoothness term.
        objective: "regression" or "ranking".

    Raises:
        ValueError: If the shapes differ, or are not those above; or for an unknown objective.

    Examples:
        >>> total, fit, smoothness = retention_loss(torch.zeros(5, 4, 100), torch.ones(5, 4, 100))
        >>> fit, smoothness
        (tensor(0.5000), tensor(0.))
    """
    loss = Loss(alpha=alpha, objective=objective)
    fit, smoothness = fit_and_smoothness(scores, labels, loss)
    return fit + alpha * smoothness, fit, smoothness


def fit_and_smoothness(scores: Tensor, labels: Tensor, loss: Loss) -> tuple[Tensor, Tensor]:
    """Return the two terms of `retention_loss`, for scores and labels of its shapes."""
    scores_LKT, labels_LKT = _with_layers(scores, labels)
    if loss.objective == "ranking":
        # The mean over layers and KV heads of KL(softmax(labels) || softmax(scores)). Both as logarithms: a label far
        # below the best underflows to a weight of exactly 0, never to 0 * inf.
        target_LKT, predicted_LKT = (F.log_softmax(one.float(), dim=-1) for one in (labels_LKT, scores_LKT))
        fit = F.kl_div(predicted_LKT, target_LKT, reduction="none", log_target=True).sum(dim=-1).mean()
    else:
        fit = F.smooth_l1_loss(scores_LKT, labels_LKT, beta=1.0)
    smoothness = scores_LKT.new_zeros(())
    if scores_LKT.shape[-1] > 1:
        smoothness = scores_LKT.diff(dim=-1).square().mean(dim=(1, 2)).sum()
    return fit, smoothness


@torch.no_grad()
def top_overlap(scores: Tensor, labels: Tensor) -> Tensor:
    """Return (L,): the share of the best tokens by label that are also among the best by score, 0 to 1.

    The best are a tenth of the T tokens of each KV head, at least one (the original code's training monitor).

    Args:
        scores: (L, K, T), or (K, T) for one layer.
        labels: Of the same shape.

    Raises:
        ValueError: If the shapes differ, or are not those above.
    """
    best = max(1, scores.shape[-1] // 10)
    marked = [
        torch.zeros_like(values, dtype=torch.bool).scatter_(-1, values.topk(best, dim=-1).indices, True)
        for values in _with_layers(scores, labels)
    ]
    return (marked[0] & marked[1]).sum(dim=-1).float().mean(dim=-1) / best


def chance_overlap(tokens: int) -> float:
    """Return what scores drawn at random get from `top_overlap` on average, for a number of tokens."""
    return max(1, tokens // 10) / tokens


def _with_layers(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    if scores.shape != labels.shape or scores.ndim not in (2, 3) or not scores.numel():
        raise ValueError(
            f"scores have shape {tuple(scores.shape)} and labels {tuple(labels.shape)}; "
            "give both as (layers, KV heads, tokens)"
        )
    return (scores[None], labels[None]) if scores.ndim == 2 else (scores, labels)
