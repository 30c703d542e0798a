"""Sparse prefill attention, slowly: each pattern as a mask of queries by slots, and attention under a mask.

Written from the papers (MInference, arXiv 2407.02490; XAttention, arXiv 2503.16428) with loops over single entries. One
query head and its KV head; new token i of L sits in slot S - L + i.
"""

# L new tokens, S slots, D head dim

from __future__ import annotations

import math

import torch
from torch import Tensor


def masked_attention(
    query_LD: Tensor, key_SD: Tensor, value_SD: Tensor, mask_LS: Tensor, scaling: float, softcap: float | None = None
) -> Tensor:
    """Return (L, D): each query attends to the slots of its row of the mask that are not behind it."""
    new, slots = len(query_LD), len(key_SD)
    out = torch.zeros(new, value_SD.shape[1])
    for i in range(new):
        seen = [j for j in range(slots - new + i + 1) if mask_LS[i, j]]
        weights = torch.softmax(_logits(query_LD[i], key_SD[seen], scaling, softcap), dim=0)
        out[i] = weights @ value_SD[seen].float()
    return out


def a_shape(new: int, slots: int, sinks: int, window: int, rows: int = 64) -> Tensor:
    """Return the (L, S) mask of the first slots and the nearest diagonals."""
    return _crossed(new, slots, set(range(sinks)), set(range(window)), rows)


def vertical_slash(
    query_LD: Tensor,
    key_SD: Tensor,
    vertical: int,
    slash: int,
    scaling: float,
    softcap: float | None = None,
    rows: int = 64,
) -> Tensor:
    """Return the (L, S) mask of the columns and diagonals that the last 64 queries look at most."""
    new, slots = len(query_LD), len(key_SD)
    columns, diagonals = [0.0] * slots, [0.0] * slots
    for i in range(max(new - 64, 0), new):
        own = slots - new + i
        weights = torch.softmax(_logits(query_LD[i], key_SD[: own + 1], scaling, softcap), dim=0).tolist()
        for j, weight in enumerate(weights):
            columns[j] += weight
            diagonals[own - j] += weight
    for j in range(min(30, slots)):
        columns[j] = math.inf
    for o in range(min(100, slots)):
        diagonals[o] = math.inf
    best = sorted(range(slots), key=lambda j: -columns[j])[: max(vertical, 30)]
    nearest = sorted(range(slots), key=lambda o: -diagonals[o])[: max(slash, 50)]
    return _crossed(new, slots, set(best), set(nearest), rows)


def block_sparse(query_LD: Tensor, key_SD: Tensor, blocks: int, rows: int = 64) -> Tensor:
    """Return the (L, S) mask of the blocks of keys whose mean is nearest to the mean of a block of queries."""
    new, slots = len(query_LD), len(key_SD)
    lines = _lines(slots - new, slots, rows)
    mask = torch.zeros(new, slots, dtype=torch.bool)
    for start in range(0, new, rows):
        query = query_LD[start : start + rows].float().mean(0)
        seen = [line for line in lines if line[0] <= slots - new + start]
        products = [float(key_SD[first:last].float().mean(0) @ query) for first, last in seen]
        for c in sorted(range(len(seen)), key=lambda c: -products[c])[:blocks]:
            mask[start : start + rows, seen[c][0] : seen[c][1]] = True
    return mask


def xattention(
    query_LD: Tensor,
    key_SD: Tensor,
    threshold: float,
    stride: int,
    block: int,
    scaling: float,
    softcap: float | None = None,
) -> Tensor:
    """Return the (L, S) mask of the blocks that hold a share of the attention that antidiagonals estimate."""
    new, slots = len(query_LD), len(key_SD)
    held = slots - new
    gap = -held % block
    lines = _lines(held, slots, block)
    mask = torch.zeros(new, slots, dtype=torch.bool)
    for q, start in enumerate(range(0, new, block)):
        own = len(_lines(held, held, block)) + q
        weights = [0.0] * (own + 1)
        for a in range(start, min(start + block, new), stride):
            groups = []
            for b in range((gap // stride) * stride - gap, held + a + stride, stride):
                terms = [
                    float(query_LD[a + stride - 1 - t].float() @ key_SD[b + t].float())
                    for t in range(stride)
                    if a + stride - 1 - t < new and 0 <= b + t < slots
                ]
                logit = sum(terms) * scaling / stride
                groups.append((b, logit if softcap is None else softcap * math.tanh(logit / softcap)))
            shares = torch.softmax(torch.tensor([logit for b, logit in groups if b <= held + a]), dim=0).tolist()
            for (b, _), share in zip(groups, shares, strict=False):
                weights[(b + gap) // block] += share
        chosen, reached = {0, own}, sum(weights[c] for c in {0, own})
        for c in sorted(set(range(own + 1)) - chosen, key=lambda c: -weights[c]):
            if reached >= threshold * sum(weights):
                break
            chosen.add(c)
            reached += weights[c]
        for c in chosen:
            mask[start : start + block, lines[c][0] : lines[c][1]] = True
    return mask


def _logits(query_D: Tensor, key_SD: Tensor, scaling: float, softcap: float | None) -> Tensor:
    logits = key_SD.float() @ query_D.float() * scaling
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _crossed(new: int, slots: int, columns: set[int], diagonals: set[int], rows: int) -> Tensor:
    mask = torch.zeros(new, slots, dtype=torch.bool)
    for start in range(0, new, rows):
        seen = set(columns)
        for i in range(start, start + rows):  # a last block that is not whole sees what a whole one would
            seen |= {slots - new + i - o for o in diagonals}
        for j in seen & set(range(slots)):
            mask[start : start + rows, j] = True
    return mask


def _lines(held: int, slots: int, block: int) -> list[tuple[int, int]]:
    """Return first and past-the-end slots of the blocks of a grid that has a line where the chunk begins."""
    first = -(-held % block)
    return [(max(start, 0), min(start + block, slots)) for start in range(first, slots, block)]
