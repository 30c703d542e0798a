"""The one place where it is decided which cache units stay."""

# B batch, K KV heads, S slots, C kept slots

from __future__ import annotations

import torch
from torch import Tensor

_INT32_MAX = 2**31 - 1


def select_kept(scores_BKS: Tensor, budget: int, protected_S: Tensor | None = None) -> Tensor:
    """Choose the `budget` best slots of every KV head on its own (Locret, Algorithm 1).

    Scores are compared in float32. Among equal scores the newer slot, the one further right, wins, so a selection
    never depends on the backend's top-k. NaN counts as the worst score.

    Args:
        scores_BKS: (batch, kv_heads, slots), any float dtype; larger means keep.
        budget: Slots to keep per KV head.
        protected_S: (slots,) bool; these slots stay whatever their score, the newest first if there are too many.

    Returns:
        (batch, kv_heads, min(budget, slots)) int64 slot indices, strictly ascending.
    """
    slots = scores_BKS.shape[-1]
    if budget >= slots:
        return torch.arange(slots, device=scores_BKS.device).expand(*scores_BKS.shape[:-1], slots)
    # A float's bits, read as an integer, order like the float once negative numbers are mirrored; adding zero turns
    # -0.0 into 0.0. Score and slot index together form one integer key, so that no two keys tie.
    bits = (torch.nan_to_num(scores_BKS.float(), nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf) + 0.0).view(
        torch.int32
    )
    order = torch.where(bits >= 0, bits, bits ^ _INT32_MAX)
    if protected_S is not None:
        order = order.masked_fill(protected_S, _INT32_MAX)
    keys = (order.to(torch.int64) << 32) + torch.arange(slots, device=order.device)
    return keys.topk(budget, dim=-1, sorted=False).indices.sort(dim=-1).values
