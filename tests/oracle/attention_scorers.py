"""Attention-based scorers, slowly: one text, one loop per head, query and slot."""

# N query heads, K KV heads, L new tokens, S slots, D head dim

from __future__ import annotations

import math

import torch
from torch import Tensor


def attention(
    query_NLD: Tensor, key_KSD: Tensor, scaling: float, softcap: float | None = None, sinks_N: Tensor | None = None
) -> Tensor:
    """Return (N, L, S) post-softmax attention: new token i of L sees slots 0 .. S - L + i, and its learned sink."""
    heads, new, _ = query_NLD.shape
    kv_heads, slots, _ = key_KSD.shape
    weights = torch.zeros(heads, new, slots)
    for n in range(heads):
        for i in range(new):
            end = slots - new + i + 1
            logits = key_KSD[n // (heads // kv_heads), :end] @ query_NLD[n, i] * scaling
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            if sinks_N is not None:
                logits = torch.cat([logits, sinks_N[n : n + 1]])
            weights[n, i, :end] = torch.softmax(logits, dim=0)[:end]
    return weights


def reduce_group(scores_NS: Tensor, kv_heads: int, how: str) -> Tensor:
    """Return (K, S): the mean, max or sum over the query heads that share a KV head."""
    heads = scores_NS.shape[0]
    group = heads // kv_heads
    rows = []
    for k in range(kv_heads):
        members = [scores_NS[n] for n in range(heads) if n // group == k]
        total = members[0].clone()
        for member in members[1:]:
            total = torch.maximum(total, member) if how == "max" else total + member
        rows.append(total / group if how == "mean" else total)
    return torch.stack(rows)


def h2o(weights_NLS: Tensor, stored_KC: Tensor, how: str) -> Tensor:
    """Return (K, S): what had been gathered, and what the chunk's queries add."""
    total = reduce_group(_column_sums(weights_NLS, range(weights_NLS.shape[1])), len(stored_KC), how)
    for k in range(len(stored_KC)):
        for j in range(stored_KC.shape[1]):
            total[k, j] += stored_KC[k, j]
    return total


def tova(weights_NLS: Tensor, kv_heads: int) -> Tensor:
    """Return (K, S): the last query's attention, mean over all heads."""
    total_S = torch.zeros(weights_NLS.shape[2])
    for n in range(weights_NLS.shape[0]):
        total_S += weights_NLS[n, -1]
    return torch.stack([total_S / weights_NLS.shape[0]] * kv_heads)


def snapkv(weights_NLS: Tensor, kv_heads: int, window: int, kernel: int, pooling: str, how: str) -> Tensor:
    """Return (K, S): pooled sums over the window's queries; the window's own columns are not pooled."""
    _, new, slots = weights_NLS.shape
    window = min(window, new)
    sums_NS = _column_sums(weights_NLS, range(new - window, new))
    before = slots - window
    pooled = torch.cat([pool(sums_NS[:, :before], kernel, pooling), sums_NS[:, before:]], dim=1)
    return reduce_group(pooled, kv_heads, how)


def snapkv_of_imdc(weights_NLS: Tensor, kv_heads: int, kernel: int, how: str) -> Tensor:
    """Return (K, S): average-pooled sums over the chunk's queries, over the queries that see each unit."""
    _, new, slots = weights_NLS.shape
    pooled = pool(_column_sums(weights_NLS, range(new)), kernel, "avg")
    for j in range(slots):
        pooled[:, j] /= sum(1 for i in range(new) if slots - new + i >= j)
    return reduce_group(pooled, kv_heads, how)


def pool(sums_NS: Tensor, kernel: int, pooling: str) -> Tensor:
    """Return (N, S): "avg" counts missing neighbours as zeros, "max" leaves them out."""
    heads, slots = sums_NS.shape
    pooled = torch.zeros(heads, slots)
    for n in range(heads):
        for j in range(slots):
            near = [sums_NS[n, i] for i in range(j - kernel // 2, j + kernel // 2 + 1) if 0 <= i < slots]
            pooled[n, j] = sum(near) / kernel if pooling == "avg" else max(near)
    return pooled


def low_events(weights_NLS: Tensor, kv_heads: int, history: int) -> Tensor:
    """Return (K, S): how often the last queries gave a unit they see less than an equal share (Scissorhands)."""
    heads, new, slots = weights_NLS.shape
    counts = torch.zeros(heads, slots)
    for n in range(heads):
        for i in range(max(0, new - history), new):
            end = slots - new + i + 1
            for j in range(end):
                counts[n, j] += float(weights_NLS[n, i, j] < 1 / torch.tensor(end))
    return reduce_group(counts, kv_heads, "sum")


def nacl_kept(
    scores_S: list[float], draws_S: list[float], positions_S: list[int], numbers: tuple[int, int, int, int]
) -> set[int]:
    """Return the slots of one head that stay.

    Args:
        scores_S: The proxies' attention.
        draws_S: U(0, 1), one per slot.
        positions_S: Original positions.
        numbers: budget, newest units that stay, sinks, units drawn by lot.
    """
    budget, newest, sinks, by_lot = numbers
    slots = range(len(scores_S))
    kept = {s for s in slots if s >= len(scores_S) - newest or positions_S[s] < sinks}
    by_lot = min(by_lot, budget - len(kept))
    while len(kept) < budget - by_lot:
        kept.add(max((s for s in slots if s not in kept), key=lambda s: (scores_S[s], s)))
    while len(kept) < budget:
        # The first to arrive of independent exponential waiting times with these rates is drawn with these odds.
        waits = {s: -math.log(draws_S[s]) / math.exp(scores_S[s]) for s in slots if s not in kept}
        kept.add(min(waits, key=lambda s: waits[s]))
    return kept


def sage_kept(
    query_ND: Tensor,
    key_KSD: Tensor,
    scaling: float,
    positions_KS: Tensor,
    budget: int,
    newest: int,
    sink_share: float = 0.25,
    size: int | None = None,
) -> list[set[int]]:
    """Return per KV head the slots that stay: sinks, newest, every query head's list, and the next best of the group.

    Args:
        query_ND: The last token's queries.
        key_KSD: All keys.
        scaling: Factor of the logits.
        positions_KS: Original positions.
        budget: Slots that stay.
        newest: Newest slots that stay, out of `budget`.
        sink_share: Share of the budget for first tokens.
        size: Of each query head's list; None: an equal part of what sinks and newest slots leave.
    """
    heads, (kv_heads, slots, _) = len(query_ND), key_KSD.shape
    group, result = heads // kv_heads, []
    sinks = min(int(budget * sink_share), budget - newest)
    each = (budget - newest - sinks) // group if size is None else size
    for k in range(kv_heads):
        kept = {s for s in range(slots) if s >= slots - newest or positions_KS[k, s] < sinks}
        between = [s for s in range(slots) if s not in kept]
        shares = []
        for n in range(k * group, (k + 1) * group):
            logits = key_KSD[k] @ query_ND[n] * scaling
            shares.append(logits - torch.logsumexp(logits, dim=0))
            kept |= set(sorted(between, key=lambda s: float(logits[s]), reverse=True)[:each])
        rest = sorted((s for s in between if s not in kept), key=lambda s: max(float(x[s]) for x in shares))
        while len(kept) < budget and rest:
            kept.add(rest.pop())
        result.append(kept)
    return result


def _column_sums(weights_NLS: Tensor, queries: range) -> Tensor:
    sums = torch.zeros(weights_NLS.shape[0], weights_NLS.shape[2])
    for n in range(weights_NLS.shape[0]):
        for i in queries:
            sums[n] += weights_NLS[n, i]
    return sums
