"""What a cache kept, as bars of text."""

# K KV heads, C kept units, W columns

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from locret.cache.cache import RetentionCache

BARS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Retention:
    """What one cache held of a text when it had been read."""

    kept: dict[int, list[Tensor]]
    """For every full-attention layer, and in it for every KV head, the (C,) int64 original positions held."""
    prompt_tokens: int


def retention_of(cache: RetentionCache) -> Retention:
    """Take down which positions a cache holds now (its first row, in a batch)."""
    kept = {
        layer: [head[head >= 0] for head in cache.kept_everywhere(layer)[0].cpu()] for layer in cache.backbone.layers
    }
    return Retention(kept, cache.seen)


def as_lines(retention: Retention, width: int = 60) -> list[str]:
    """Return a line of bars per layer: how much of each stretch of the text its KV heads kept."""
    shares = kept_shares(retention, min(width, retention.prompt_tokens))
    by_layer = [part.mean(0) for part in shares.split([len(heads) for heads in retention.kept.values()])]
    top = max(float(share.max()) for share in by_layer) or 1.0
    # A single kept position would not show without a square root.
    levels = [(share / top).sqrt().mul(len(BARS) - 1).ceil().long().tolist() for share in by_layer]
    bars = ["".join(BARS[level] for level in one) for one in levels]
    return [f"{layer:>5} |{bar}|" for layer, bar in zip(retention.kept, bars, strict=True)]


def kept_shares(retention: Retention, columns: int) -> Tensor:
    """Return (rows, columns) float32: the share of positions kept in each stretch of the text, a row per KV head."""
    edges = torch.linspace(0, retention.prompt_tokens, columns + 1, dtype=torch.float64).round()
    heads = (positions_C for layer in retention.kept.values() for positions_C in layer)
    counts = [torch.histogram(positions_C.to(torch.float64), edges).hist for positions_C in heads]
    return (torch.stack(counts) / edges.diff()).float()
