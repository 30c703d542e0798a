"""Weighted merging, slowly: unit by unit."""

# C kept units, S all, D head dim

from __future__ import annotations

import math

import torch
from torch import Tensor


def d2o(
    keys_SD: Tensor, values_SD: Tensor, kept: list[int], gone: list[int], threshold: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return keys and values, (C, D), of one head's kept units after those that go were folded in (arXiv 2406.13035).

    Args:
        keys_SD: before rotation.
        values_SD: the units' values.
        kept: ranks of the units that stay.
        gone: ranks of those that go.
        threshold: least cosine; None for the mean over `gone` of each one's largest cosine.
    """
    nearest: dict[int, tuple[int, float]] = {}
    for i in gone:
        best = (kept[0], -2.0)
        for j in kept:
            norms = float(keys_SD[i].norm()) * float(keys_SD[j].norm())
            cosine = float(keys_SD[i] @ keys_SD[j]) / norms
            if cosine > best[1]:
                best = (j, cosine)
        nearest[i] = best
    least = sum(cosine for _, cosine in nearest.values()) / len(gone) if threshold is None else threshold
    keys, values = [], []
    for j in kept:
        key, value, total = math.e * keys_SD[j], math.e * values_SD[j], math.e
        for i, (target, cosine) in nearest.items():
            if target == j and cosine >= least:
                key, value = key + math.exp(cosine) * keys_SD[i], value + math.exp(cosine) * values_SD[i]
                total += math.exp(cosine)
        keys.append(key / total)
        values.append(value / total)
    return torch.stack(keys), torch.stack(values)


def kvmerger(
    keys_SD: Tensor, values_SD: Tensor, kept: list[int], gone: list[int], threshold: float
) -> tuple[Tensor, Tensor]:
    """Return keys and values, (C, D), of one head's kept units, each the pivot of its set (arXiv 2407.08454).

    Args:
        keys_SD: before rotation.
        values_SD: the units' values.
        kept: ranks of the units that stay, ascending.
        gone: ranks of those that go.
        threshold: least cosine with the pivot.
    """
    sets: dict[int, list[int]] = {j: [] for j in kept}
    for i in gone:
        before, after = [j for j in kept if j < i][-1:], [j for j in kept if j > i][:1]
        cosines = []
        for j in before + after:
            norms = float(keys_SD[i].norm()) * float(keys_SD[j].norm())
            cosines.append((float(keys_SD[i] @ keys_SD[j]) / norms, j))
        best = max(cosines, key=lambda pair: pair[0])
        if best[0] >= threshold:
            sets[best[1]].append(i)
    keys, values = [], []
    for j in kept:
        distances = [float((keys_SD[j] - keys_SD[i]).norm()) for i in sets[j]]
        spread = sum(distances) / (len(distances) + 1) / math.sqrt(2)
        weights = [math.exp(-(d**2) / (2 * spread**2)) if spread else 1.0 for d in distances]
        key, value = keys_SD[j].clone(), values_SD[j].clone()
        for i, weight in zip(sets[j], weights, strict=True):
            key, value = key + weight * keys_SD[i], value + weight * values_SD[i]
        keys.append(key / (1 + sum(weights)))
        values.append(value / (1 + sum(weights)))
    return torch.stack(keys), torch.stack(values)
