"""How far predicted scores are from the labels, and how well they agree on what to keep.

Paper:    Locret, arXiv 2410.01805, Eq. 3, with the reductions of the original code.
Deviates: never. The paper weighs regression and smoothness alike; the code averages the regression over layers and sums
          the smoothness over them, which makes alpha, in effect, larger by the number of layers.
"""
# L layers, K KV heads, T prompt tokens

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ALPHA = 2.5e-3
"""Weight of the smoothness term (Locret, section 4.1)."""


def retention_loss(scores: Tensor, labels: Tensor, alpha: float = ALPHA) -> tuple[Tensor, Tensor, Tensor]:
    """Return (total, regression, smoothness), three scalars; total = regression + alpha * smoothness.

    Regression is the smooth L1 loss (beta 1) of scores and labels, averaged over everything. Smoothness is the squared
    difference of the scores of neighbouring tokens, averaged per layer and summed over layers; 0 for a single token.

    Args:
        scores: (L, K, T) predicted scores, float32; or (K, T) for one layer.
        labels: Of the same shape, see `answer_labels`.
        alpha: Weight of the smoothness term.

    Raises:
        ValueError: If the shapes differ, or are not those above.
    """
    _check_shapes(scores, labels)
    scores_LKT, labels_LKT = _with_layers(scores), _with_layers(labels)
    regression = F.smooth_l1_loss(scores_LKT, labels_LKT, beta=1.0)
    smoothness = scores_LKT.new_zeros(())
    if scores_LKT.shape[-1] > 1:
        smoothness = scores_LKT.diff(dim=-1).square().mean(dim=(1, 2)).sum()
    return regression + alpha * smoothness, regression, smoothness


@torch.no_grad()
def top_overlap(scores: Tensor, labels: Tensor, fraction: float = 0.1) -> Tensor:
    """Return (L,): the share of the best tokens by label that are also among the best by score, 0 to 1.

    The best are floor(fraction * T) tokens of each KV head, at least one (the original code's training monitor).

    Args:
        scores: (L, K, T), or (K, T) for one layer.
        labels: Of the same shape.
        fraction: Share of the tokens that counts as best.

    Raises:
        ValueError: If the shapes differ, or are not those above.
    """
    _check_shapes(scores, labels)
    best = max(1, int(fraction * scores.shape[-1]))
    marked = [
        torch.zeros_like(values, dtype=torch.bool).scatter_(-1, values.topk(best, dim=-1).indices, True)
        for values in (_with_layers(scores), _with_layers(labels))
    ]
    return (marked[0] & marked[1]).sum(dim=-1).float().mean(dim=-1) / best


def _check_shapes(scores: Tensor, labels: Tensor) -> None:
    if scores.shape != labels.shape or scores.ndim not in (2, 3) or not scores.numel():
        raise ValueError(
            f"scores have shape {tuple(scores.shape)} and labels {tuple(labels.shape)}; "
            "give both as (layers, KV heads, tokens)"
        )


def _with_layers(values: Tensor) -> Tensor:
    return values[None] if values.ndim == 2 else values
