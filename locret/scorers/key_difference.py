"""KeyDiff: units whose keys point away from the average key stay, so that keys stay diverse.

Paper:     KeyDiff, arXiv 2504.15364, section 3; kvpress: KeyDiffPress.
Formula:   s[j] = -cos(k_j, m), m = mean over all units of k / ||k||; keys as attended, after rotation.
Deviates:  never: the paper reads in blocks and evicts after each one, too. Its variant with a window of newest units is
           the policy's stabilizers. With compact positions keys turn as slots close up, and with them their directions.
Cost:      two products of all keys with one vector per forward pass. Every pass rates all units anew. Query-agnostic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from locret.backbone.chunk import Chunk
from locret.scorers.base import RevisingScorer

_LEAST_NORM = 1e-8
"""A key of zeros has no direction: it counts as orthogonal to all others."""


@dataclass(frozen=True, kw_only=True)
class KeyDifferenceScorer(RevisingScorer):
    """Keep keys that are unlike the others."""

    name: ClassVar[str] = "key_difference"
    by_head: ClassVar[bool] = True

    def score(self, chunk: Chunk) -> Tensor:
        """Return scores (B, K, S), between -1 and 1."""
        key = chunk.key.float()
        lengths_BKS = key.norm(dim=-1).clamp_min(_LEAST_NORM)
        weights_BKS = 1 / lengths_BKS
        if chunk.padded:
            empty_BS = torch.arange(key.shape[2], device=key.device) < chunk.row_start[:, None]
            weights_BKS = weights_BKS.masked_fill(empty_BS[:, None], 0.0)
        # A cosine does not depend on the anchor's length, so the sum serves as the mean.
        anchor_BKD1 = (weights_BKS[:, :, None] @ key).transpose(-1, -2)
        anchor_length = anchor_BKD1.norm(dim=2).clamp_min(_LEAST_NORM)
        cosines: Tensor = (key @ anchor_BKD1)[..., 0] / (lengths_BKS * anchor_length)
        return -cosines
