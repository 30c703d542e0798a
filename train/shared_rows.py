"""One layer's loss where processes share a row by its tokens: each adds its part, and the sum is the whole row's.

A head rates every token for itself, so the regression is a sum over tokens. What reaches beyond a slice is little: the
first token of the next one, for the smoothness across the border; for the ranking, one log-sum-exp per KV head; and for
the overlap, which compares all tokens of a KV head, the exchange that attention uses.
"""
# K KV heads, P processes, L own trained tokens, T trained tokens of the row, F features

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from locret.distributed.ulysses import RowShare
from locret.heads.head import RetainingHead
from locret.train.loss import top_overlap
from locret.train.training_options import Loss


def share_of_loss(
    head: RetainingHead,
    features_LF: Tensor,
    next_1F: Tensor,
    labels_KL: Tensor,
    loss: Loss,
    share: RowShare,
    trained: int,
) -> tuple[Tensor, Tensor, Callable[[], Tensor]]:
    """Return this process's parts of the layer's fit and smoothness, and what computes that of the overlap.

    Args:
        head: The layer's.
        features_LF: Of the own tokens.
        next_1F: Of the token behind them if that is trained on, else (0, F).
        labels_KL: Of the own tokens.
        loss: Labels and loss.
        share: This process's share of the row.
        trained: T.
    """
    scores_KL = head(features_LF).T
    beyond_K1 = head(next_1F).T
    if loss.objective == "ranking":
        fit = _share_of_listwise(scores_KL, labels_KL, loss.temperature, share)
    else:
        fit = F.smooth_l1_loss(scores_KL, labels_KL, beta=1.0, reduction="sum") / (len(labels_KL) * trained)
    steps = torch.cat([scores_KL, beyond_K1], dim=1).diff(dim=1).square().sum()
    smoothness = steps / (len(labels_KL) * max(1, trained - 1))

    def overlap() -> Tensor:
        pair_KL2 = torch.stack([scores_KL.detach(), labels_KL], dim=-1)
        scores, labels = share.heads(pair_KL2[None], trained)[0].unbind(-1)
        return top_overlap(scores, labels)[0] / share.ranks.size

    return fit, smoothness, overlap


def _share_of_listwise(scores_KL: Tensor, labels_KL: Tensor, temperature: float, share: RowShare) -> Tensor:
    """Return the own tokens' part of KL(softmax(labels / temperature) || softmax(scores)), averaged over KV heads."""
    targets_KL = labels_KL.float() / temperature
    targets_KL = targets_KL - share.log_sum_exp(targets_KL)
    predicted_KL = scores_KL.float() - share.log_sum_exp(scores_KL.float())
    fit = F.kl_div(predicted_KL, targets_KL, reduction="none", log_target=True).sum()
    # The log-sum-exp carries no gradient here; its own is that of the sum of all probabilities.
    likely = predicted_KL.exp().sum()
    return (fit + likely - likely.detach()) / len(scores_KL)
