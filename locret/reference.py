"""The slow, obvious version of everything that is fast elsewhere: the oracle of the tests. Needs only torch.

Loops over heads, tokens and slots; every line can be checked against the paper by eye. Never imported by the library.
"""

# L layers, N query heads, K KV heads, T tokens, A answer queries, S slots, D head dim

from __future__ import annotations

import torch
from torch import Tensor


def head_scores(features_TF: Tensor, w1_RF: Tensor, w2_KR: Tensor) -> Tensor:
    """Return (K, T): W2 silu(W1 [q; k; v]) of every token (Locret, Eq. 1)."""
    columns = []
    for feature_F in features_TF:
        hidden_R = w1_RF @ feature_F
        columns.append(w2_KR @ (hidden_R * torch.sigmoid(hidden_R)))
    return torch.stack(columns, dim=1)


def select_kept(scores_S: list[float], budget: int, protected: set[int]) -> list[int]:
    """Return the kept slots of one head, ascending: protected ones first, then by score, newer first among equals."""
    slots = range(len(scores_S))
    ranked = sorted(slots, key=lambda s: (s in protected, float("inf") if s in protected else scores_S[s], s))
    return sorted(ranked[len(scores_S) - min(budget, len(scores_S)) :])


def kept_after_chunks(
    chunk_scores: list[list[float]], chunk_size: int, budget: int, stabilizers: int, local_len: int
) -> list[list[list[int]]]:
    """Replay the evictions of one layer (Locret, Algorithm 1) from the scores its tokens got.

    Args:
        chunk_scores: per KV head, the score of every prompt token.
        chunk_size: B.
        budget: b.
        stabilizers: n_s.
        local_len: n_loc.

    Returns:
        Per chunk, per KV head: the kept text positions, ascending.
    """
    length = len(chunk_scores[0]) - local_len
    pools: list[list[int]] = [[] for _ in chunk_scores]
    history = []
    for start in range(0, max(length, 0), chunk_size):
        end = min(start + chunk_size, length)
        final = end == length
        for head, scores in enumerate(chunk_scores):
            pool = pools[head] + list(range(start, end))
            newest = set() if final else set(range(len(pool) - min(stabilizers, len(pool)), len(pool)))
            pools[head] = [pool[slot] for slot in select_kept([scores[p] for p in pool], budget, newest)]
        history.append([list(pool) for pool in pools])
    return history


def rotate(vector_D: Tensor, position: float, inv_freq: Tensor, magnitude: float = 1.0) -> Tensor:
    """Rotate one vector's pairs (d, d + D/2) by position * inv_freq[d]; LongRoPE and YaRN scale by `magnitude`."""
    half = len(inv_freq)
    rotated = vector_D.clone()
    for d in range(half):
        angle = torch.as_tensor(position * float(inv_freq[d]))
        x, y = vector_D[d], vector_D[d + half]
        rotated[d] = magnitude * (x * torch.cos(angle) - y * torch.sin(angle))
        rotated[d + half] = magnitude * (y * torch.cos(angle) + x * torch.sin(angle))
    return rotated


def attend(query_NLD: Tensor, key_KSD: Tensor, value_KSD: Tensor, scaling: float) -> Tensor:
    """Return (N, L, D): new token i of L sees slots 0 .. S - L + i."""
    heads, new, _ = query_NLD.shape
    kv_heads, slots, _ = key_KSD.shape
    out = torch.zeros(heads, new, value_KSD.shape[-1])
    for n in range(heads):
        k = n // (heads // kv_heads)
        for i in range(new):
            seen = slots - new + i + 1
            weights = torch.softmax(key_KSD[k, :seen] @ query_NLD[n, i] * scaling, dim=0)
            out[n, i] = weights @ value_KSD[k, :seen]
    return out


def labels(query_NTD: Tensor, key_KTD: Tensor, prompt: int, first_query: int, scaling: float, kind: str) -> Tensor:
    """Return (K, prompt) causal importance labels of one layer (Locret, Eq. 2) from dense causal attention.

    Args:
        query_NTD: post-rotary queries of prompt and answer.
        key_KTD: post-rotary keys of prompt and answer.
        prompt: number of prompt tokens.
        first_query: first answer query: `prompt`, or `prompt - 1` to include the last prompt token.
        scaling: factor of the logits.
        kind: "logit", or "log_attention": the logit minus its row's log-sum-exp.
    """
    heads, tokens, _ = query_NTD.shape
    kv_heads = key_KTD.shape[0]
    result = torch.full((kv_heads, prompt), -torch.inf)
    for n in range(heads):
        k = n // (heads // kv_heads)
        for i in range(first_query, tokens):
            row = key_KTD[k, : i + 1] @ query_NTD[n, i] * scaling
            if kind == "log_attention":
                row = row - torch.logsumexp(row, dim=0)
            # The last prompt token cannot see beyond itself, and is itself a prompt token that it sees.
            seen = min(prompt, i + 1)
            result[k, :seen] = torch.maximum(result[k, :seen], row[:seen])
    return result


def loss(scores_LKT: Tensor, labels_LKT: Tensor, alpha: float) -> tuple[float, float, float]:
    """Return total, regression and smoothness (Locret, Eq. 3, with the reductions of the original code)."""
    layers, kv_heads, tokens = scores_LKT.shape
    regression = smoothness = 0.0
    for layer in range(layers):
        steps = 0.0
        for head in range(kv_heads):
            for t in range(tokens):
                error = abs(float(scores_LKT[layer, head, t] - labels_LKT[layer, head, t]))
                regression += (0.5 * error * error if error < 1 else error - 0.5) / (layers * kv_heads * tokens)
            for t in range(tokens - 1):
                steps += float(scores_LKT[layer, head, t] - scores_LKT[layer, head, t + 1]) ** 2
        smoothness += steps / (kv_heads * (tokens - 1))
    return regression + alpha * smoothness, regression, smoothness
