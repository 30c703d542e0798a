"""Refitted values, slowly: query by query, and the normal equations in float64."""

# G query heads of the group, L queries, S units, C kept ones, D head dim

from __future__ import annotations

import torch
from torch import Tensor


def refitted_values(
    query_GLD: Tensor,
    keys_SD: Tensor,
    values_SD: Tensor,
    kept: list[int],
    scaling: float,
    ridge: float,
    softcap: float | None = None,
    queries: list[int] | None = None,
) -> tuple[Tensor, float, float]:
    """Return (C, D) values of one KV head's kept units (Attention Matching, arXiv 2602.16284, without biases).

    Args:
        query_GLD: post-rotary queries of the chunk whose units are the newest L.
        keys_SD: all keys, post-rotary.
        values_SD: all values.
        kept: ranks of the units that stay.
        scaling: factor of the logits.
        ridge: multiple of the mean squared length of a row of weights.
        softcap: bound of the logits.
        queries: which of the L queries are fitted; None for all.

    Returns:
        The values, and the squared errors of the fitted outputs before and after.
    """
    group, new, _ = query_GLD.shape
    slots = len(keys_SD)
    keys, values = keys_SD.double(), values_SD.double()
    rows, wanted = [], []
    for g in range(group):
        for i in range(new) if queries is None else queries:
            seen = slots - new + i + 1
            logits = torch.stack([keys[s] @ query_GLD[g, i].double() * scaling for s in range(seen)])
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            visible = [c for c, s in enumerate(kept) if s < seen]
            row = torch.zeros(len(kept), dtype=torch.float64)
            output = torch.zeros(values.shape[-1], dtype=torch.float64)
            if visible:
                row[visible] = torch.softmax(logits[[kept[c] for c in visible]], dim=0)
                output = torch.softmax(logits, dim=0) @ values[:seen]
            rows.append(row)
            wanted.append(output)
    weights, kept_values = torch.stack(rows), values[kept]
    missing = torch.stack(wanted) - weights @ kept_values
    size = ridge * float((weights * weights).sum(1).mean())
    normal = weights.T @ weights + size * torch.eye(len(kept), dtype=torch.float64)
    change = torch.linalg.solve(normal, weights.T @ missing)
    left = missing - weights @ change
    return (kept_values + change).float(), float((missing**2).sum()), float((left**2).sum())
