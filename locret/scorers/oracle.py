"""The oracle: the labels that the true answer gives, as scores. No method can know them; trained heads chase them.

Paper:     Locret, arXiv 2410.01805, Eq. 2 (labels); the evaluation compares with them as an upper bound.
Formula:   s[position] = label[position], see `locret.labels.labels.answer_labels`.
Cost:      one pass of full attention over prompt and answer beforehand, so its memory grows with the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from locret.backbone.adapters import describe
from locret.backbone.chunk import Chunk
from locret.scorers.base import Scorer


@dataclass(frozen=True, kw_only=True, eq=False)
class OracleScorer(Scorer):
    """Keep the units that the true answer looks at most."""

    name: ClassVar[str] = "oracle"
    over_ranks: ClassVar[bool] = True
    needs: ClassVar[str] = (
        "the labels of the true answer, which only locret-eval knows; compare it there with --methods oracle, or give "
        "labels=answer_labels(...) in Python"
    )

    labels: Tensor
    """(layers, kv_heads, n): labels of the prompt's n tokens; layers are the full-attention ones, in order, KV heads
    those of this process."""

    def prepare(self, model: nn.Module) -> dict[int, int]:
        """Return which row of the labels belongs to which layer."""
        backbone = describe(model)
        wanted = (len(backbone.layers), max(shape.num_kv_heads for shape in backbone.full_shapes))
        if self.labels.ndim != 3 or tuple(self.labels.shape[:2]) != wanted:
            raise ValueError(
                f"labels of shape {tuple(self.labels.shape)} do not fit this backbone; give (layers, kv_heads, n) = "
                f"({wanted[0]}, {wanted[1]}, n)"
            )
        return {layer: row for row, layer in enumerate(backbone.layers)}

    def score(self, chunk: Chunk) -> Tensor:
        """Return scores (B, K, L); tokens after the labelled ones, generated ones, score below all."""
        positions_L = chunk.positions.reshape(-1, chunk.positions.shape[-1])[0]
        labels_KN = self.labels[chunk.prepared[chunk.layer_idx]].to(chunk.key.device)[: chunk.key.shape[1]]
        known_L = positions_L < labels_KN.shape[1]
        scores_KL = labels_KN[:, positions_L.clamp(max=labels_KN.shape[1] - 1)]
        scores_KL = torch.where(known_L, scores_KL, torch.full_like(scores_KL, torch.finfo(torch.float32).min))
        return scores_KL.float().expand(chunk.key.shape[0], -1, -1)
