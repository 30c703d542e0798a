"""Which parts of a text stayed in a cache: how much of each tenth, and the passages that most heads hold."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from locret import RetentionCache
from locret.conversation.text import decode
from locret.pictures import BARS, Retention

_WIDTH = 12
"""Tokens of a passage."""


def share_of_heads(cache: RetentionCache) -> Tensor:
    """Return (N,) which share of all KV heads holds the unit of each token that a cache of one row has read."""
    counts = torch.zeros(cache.seen)
    for layer in cache.backbone.layers:
        positions = cache.kept_positions(layer)[0].flatten().cpu()
        counts += torch.bincount(positions[positions >= 0], minlength=cache.seen)[: cache.seen]
    return counts / sum(shape.num_kv_heads for shape in cache.backbone.full_shapes)


def share_of_positions(retention: Retention) -> Tensor:
    """Return (N,) which share of all KV heads holds the unit of each token, of what was taken down of a cache."""
    heads = [positions for layer in retention.kept.values() for positions in layer]
    counts = sum(torch.bincount(one, minlength=retention.prompt_tokens)[: retention.prompt_tokens] for one in heads)
    return torch.as_tensor(counts).float() / len(heads)


def by_tenths(share: Tensor) -> str:
    """Return a bar per tenth of the text: how much of the tenth that kept most each of them kept."""
    kept = torch.stack([part.sum() for part in share.tensor_split(10)])
    return "".join(BARS[round(float(one / kept.max()) * (len(BARS) - 1))] for one in kept)


def passages(share: Tensor, tokenizer: Any, blocks: Iterable[list[int]], count: int = 10) -> list[str]:
    """Return the passages that most heads hold, in their order, with the share of heads.

    Args:
        share: What `share_of_heads` returned.
        tokenizer: The backbone's.
        blocks: Token ids of the text, as they were read.
        count: Passages wanted.
    """
    means = share[: len(share) // _WIDTH * _WIDTH].reshape(-1, _WIDTH).mean(dim=1)
    best = means.topk(min(count, len(means))).indices.sort().values.tolist()
    wanted, lines, held, start = [nth for nth in best if means[nth] > 0], [], list[int](), 0
    for block in blocks:
        held.extend(block)
        while wanted and (first := wanted[0] * _WIDTH) + _WIDTH <= start + len(held):
            text = decode(tokenizer, held[first - start : first - start + _WIDTH])
            mean = float(means[wanted.pop(0)])
            lines.append(f"{first:>9,} ({first / len(share):4.0%})  {mean:4.0%} of heads  {' '.join(text.split())}")
        keep = wanted[0] * _WIDTH - start if wanted else len(held)
        start, held = start + min(keep, len(held)), held[keep:]
    return lines
