"""Key norm: units whose keys are short stay. Short keys tend to draw much attention.

Paper:     Devoto et al., arXiv 2406.11430, "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression".
Formula:   s = -||k||, the Euclidean norm; rotation does not change it.
Deviates:  the paper leaves the first two layers whole; here every layer obeys the budget.
Cost:      O(L) per chunk; a score does not change later. Query-agnostic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from locret.backbone.chunk import Chunk
from locret.scorers.base import Scorer


@dataclass(frozen=True, kw_only=True)
class KeyNormScorer(Scorer):
    """Keep short keys."""

    name: ClassVar[str] = "key_norm"
    over_ranks: ClassVar[bool] = True
    positions: ClassVar[str] = "original"

    def score(self, chunk: Chunk) -> Tensor:
        """Return scores (B, K, L)."""
        key_BKLD = chunk.key[:, :, -chunk.new_tokens :]
        # In half precision the norms of many keys would round to one value.
        dtype = torch.promote_types(key_BKLD.dtype, torch.float32)
        norms: Tensor = torch.linalg.vector_norm(key_BKLD, dim=-1, dtype=dtype)
        return -norms.float()
