"""Weighted merging, slowly: unit by unit."""

# C kept units, S all, D head dim

from __future__ import annotations

import torch
from torch import Tensor


def loco(
    keys_SD: Tensor,
    values_SD: Tensor,
    scores: list[float],
    positions: list[int],
    kept: list[int],
    gone: list[int],
    kernel: tuple[Tensor, Tensor, float],
    pinned: set[int],
) -> tuple[Tensor, Tensor, list[int], list[float]]:
    """Return keys, values, positions and scores of one head's units after LoCoCo's merging (arXiv 2406.05317).

    Args:
        keys_SD: before rotation.
        values_SD: the units' values.
        scores: of all units.
        positions: of all units, ascending.
        kept: ranks of the units that stay.
        gone: ranks of those that go.
        kernel: weights (M, 2 D, F) and bias (M,) of the convolution, and alpha.
        pinned: ranks of the units that stay as they are.
    """
    weight_MFF, bias_M, alpha = kernel
    slots, width = weight_MFF.shape[0], weight_MFF.shape[-1]
    replaced = sorted(sorted((j for j in kept if j not in pinned), key=lambda j: (scores[j], j))[:slots])
    source = sorted(replaced + gone)
    units = [torch.cat([keys_SD[i], values_SD[i]]) for i in source]
    made = []
    for m in range(slots):
        raised = []
        for u in range(len(source)):
            total = float(bias_M[m])
            for f in range(width):
                neighbour = u + f - width // 2
                if 0 <= neighbour < len(source):
                    total += float(weight_MFF[m, :, f] @ units[neighbour])
            raised.append(max(total, 0.0))
        weights = alpha * torch.softmax(torch.tensor(raised), dim=0)
        weights[source.index(replaced[m])] += 1 - alpha
        mean = sum(float(w) * positions[i] for w, i in zip(weights, source, strict=True))
        key = sum(w * keys_SD[i] for w, i in zip(weights, source, strict=True))
        value = sum(w * values_SD[i] for w, i in zip(weights, source, strict=True))
        made.append((mean, key, value))
    made.sort(key=lambda one: one[0])
    places: list[int] = []
    for m, (mean, _, _) in enumerate(made):
        nearest = min(range(len(source)), key=lambda u: (abs(positions[source[u]] - mean), u))
        # Ascending, one place each, and enough places left for those that follow.
        places.append(min(max(nearest, places[-1] + 1 if places else 0), len(source) - slots + m))
    units_held = [(positions[j], keys_SD[j], values_SD[j], scores[j]) for j in kept if j not in replaced]
    worst = float(torch.finfo(torch.float32).min)
    units_held += [(positions[source[u]], key, value, worst) for u, (_, key, value) in zip(places, made, strict=True)]
    units_held.sort(key=lambda unit: unit[0])
    return (
        torch.stack([unit[1] for unit in units_held]),
        torch.stack([unit[2] for unit in units_held]),
        [unit[0] for unit in units_held],
        [unit[3] for unit in units_held],
    )
