"""Gates that others published, slowly: the scores of KVzap, Fast KVzip and DMS."""

# N query heads, K KV heads, G = N / K, T tokens, E hidden size, D head dim

from __future__ import annotations

import torch
from torch import Tensor


def kvzap(hidden_TE: Tensor, layers: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return (K, T): W h + b of every token, with the exact GELU between two layers if there are two."""
    columns = []
    for hidden_E in hidden_TE:
        states = hidden_E
        for nth, (weight, bias) in enumerate(layers):
            if nth:
                states = states * 0.5 * (1 + torch.erf(states / 2**0.5))
            states = weight @ states + bias
        columns.append(states)
    return torch.stack(columns, dim=1)


def _normed(vector: Tensor, weight: Tensor, epsilon: float = 1e-6) -> Tensor:
    return vector / (vector.square().mean() + epsilon).sqrt() * weight


def fast_kvzip(hidden_TE: Tensor, gate: dict[str, Tensor]) -> Tensor:
    """Return (K, T): the mean over query heads of a token's share beside the sink keys, by its authors' names."""
    kv_heads, _, sinks, width = gate["k_base"].shape
    group = gate["b"].shape[-1]
    scores = torch.zeros(kv_heads, len(hidden_TE))
    for t, hidden_E in enumerate(hidden_TE):
        query = (gate["q_proj.weight"] @ hidden_E + gate["q_proj.bias"]).view(kv_heads, group, width)
        key = (gate["k_proj.weight"] @ hidden_E).view(kv_heads, width)
        for k in range(kv_heads):
            own_R = _normed(key[k], gate["k_norm.weight"])
            for g in range(group):
                asked_R = _normed(query[k, g], gate["q_norm.weight"])
                own = torch.exp(asked_R @ own_R / width**0.5 + gate["b"][k, 0, g])
                others = sum(torch.exp(asked_R @ gate["k_base"][k, 0, m] / width**0.5) for m in range(sinks))
                scores[k, t] += own / (own + others) / group
    return scores


def dms(residual_TE: Tensor, norm_E: Tensor, weight_KE: Tensor, epsilon: float, scale: float, offset: float) -> Tensor:
    """Return (K, T) decision logits of the adapters of DMS; above 0 a unit is evicted."""
    normed_TE = torch.stack([_normed(states, norm_E, epsilon) for states in residual_TE])
    return (normed_TE @ weight_KE.T).T * scale - offset
