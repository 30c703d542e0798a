"""Scorers of tokens, keys and values, slowly: one text, one loop per head, token and slot."""

# N query heads, K KV heads, L new tokens, S slots, D head dim, V vocabulary

from __future__ import annotations

import math

import torch
from torch import Tensor

from oracle.retaining import rotate


def surprisal(logits_LV: Tensor, ids_L: Tensor, before_V: Tensor | None) -> Tensor:
    """Return (L,): -ln p of every token under the logits of the token before it (SirLLM, the paper).

    Args:
        logits_LV: Of the tokens.
        ids_L: The tokens.
        before_V: Logits of the token before the first; None at the start of a text, where any token is as likely.
    """
    scores = torch.zeros(len(ids_L))
    for t, token in enumerate(ids_L.tolist()):
        logits_V = before_V if t == 0 else logits_LV[t - 1]
        if logits_V is None:
            scores[t] = math.log(logits_LV.shape[1])
        else:
            probabilities = torch.exp(logits_V.double()) / torch.exp(logits_V.double()).sum()
            scores[t] = -math.log(probabilities[token])
    return scores


def key_norm(key_KLD: Tensor) -> Tensor:
    """Return (K, L): minus the Euclidean norm of every key."""
    return torch.tensor([[-math.sqrt(sum(x * x for x in key.tolist())) for key in head] for head in key_KLD])


def key_difference(key_KSD: Tensor) -> Tensor:
    """Return (K, S): minus the cosine of every key with the mean of the normalised keys (KeyDiff)."""
    rows = []
    for head_SD in key_KSD.double():
        anchor_D = torch.zeros(head_SD.shape[1], dtype=torch.double)
        for key_D in head_SD:
            anchor_D += key_D / key_D.norm() / len(head_SD)
        rows.append([float(-(key_D @ anchor_D) / (key_D.norm() * anchor_D.norm())) for key_D in head_SD])
    return torch.tensor(rows)


def mean_rotation(positions: range, dim: int, inv_freq: Tensor, magnitude: float = 1.0) -> Tensor:
    """Return (D, D): the mean of the rotations at these positions, as a matrix."""
    total = torch.zeros(dim, dim)
    for position in positions:
        for d in range(dim):
            total[:, d] += rotate(torch.eye(dim)[d], position, inv_freq, magnitude)
    return total / len(positions)


def expected_attention(
    query_NLD: Tensor, key_KSD: Tensor, value_KSD: Tensor, sinks: list[list[bool]], rotation_DD: Tensor, scaling: float
) -> Tensor:
    """Return (K, S): expected softmax weight under queries of this mean and covariance, times the value's length.

    Args:
        query_NLD: Queries that count, before rotation.
        key_KSD: Keys as attended.
        value_KSD: Values.
        sinks: Per KV head and slot, whether it is a sink: infinite, and no part of the softmax.
        rotation_DD: Mean rotation of the coming positions.
        scaling: Factor of the logits.
    """
    (heads, count, dim), (kv_heads, slots, _) = query_NLD.shape, key_KSD.shape
    scores = torch.zeros(kv_heads, slots)
    for n in range(heads):
        k = n // (heads // kv_heads)
        mean_D = sum((query_NLD[n, i] for i in range(count)), torch.zeros(dim)) / count
        scatter_DD = torch.zeros(dim, dim)
        for i in range(count):
            scatter_DD += torch.outer(query_NLD[n, i] - mean_D, query_NLD[n, i] - mean_D) / count
        coming_D, spread_DD = rotation_DD @ mean_D, rotation_DD @ scatter_DD @ rotation_DD.T
        weights = []
        for s in range(slots):
            logit = coming_D @ key_KSD[k, s] * scaling
            logit += key_KSD[k, s] @ spread_DD @ key_KSD[k, s] * scaling**2 / 2
            weights.append(0.0 if sinks[k][s] else math.exp(logit))
        for s in range(slots):
            scores[k, s] += weights[s] / sum(weights) / (heads // kv_heads)
    for k in range(kv_heads):
        for s in range(slots):
            scores[k, s] = math.inf if sinks[k][s] else scores[k, s] * value_KSD[k, s].norm()
    return scores
