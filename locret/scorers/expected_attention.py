"""Expected attention: units that the coming queries are expected to attend to, weighed by the length of their values.

Paper:     Expected Attention, arXiv 2510.00636, section 3; kvpress: ExpectedAttentionPress.
Formula:   coming queries ~ N(R m, R C R'), m and C the mean and covariance of the queries at hand before rotation,
           R the mean rotation of the next `future` positions; c = 1 / sqrt(D);
           a[j] = softmax over j of (c R m . k_j + c^2 k_j' R C R' k_j / 2), mean of the group;
           s[j] = a[j] ||v_j||; sinks stay, and the softmax leaves them out.
Deviates:  the paper rates once, after a whole prompt, by all its queries; by chunks, the queries at hand are those of
           the chunk, and with when="prompt_end" those of the last forward pass, `queries` at least. A bound on logits
           (Gemma-2) is left out of the expectation.
Cost:      a product of D x D with every unit and query head per chunk. Generated tokens are not rated, and score 0.
"""

# B batch, N query heads, K KV heads, G = N / K, L new tokens, S units, D head dim

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from locret.backbone.adapters import describe, find_decoder
from locret.backbone.chunk import Chunk
from locret.backbone.passes import unrotated_layers
from locret.backbone.rotary import Rotary
from locret.base.fields import Range
from locret.scorers.base import RevisingScorer


@dataclass(frozen=True, kw_only=True)
class ExpectedAttentionScorer(RevisingScorer):
    """Keep what the coming queries are expected to look at."""

    name: ClassVar[str] = "expected_attention"
    rates_answers: ClassVar[bool] = False
    by_head: ClassVar[bool] = True
    ranges = {"future": Range(1, 2**20), "queries": Range(1), "sinks": Range(0)}

    future: int = 512
    """Coming positions over which rotations are averaged (kvpress: 512)."""
    queries: int = 256
    """With when="prompt_end", least number of last queries that stand for the coming ones (kvpress: all queries)."""
    sinks: int = 4
    """First tokens that always stay and whose queries, outliers, do not count (kvpress: 4)."""

    @property
    def lookback(self) -> int:
        return self.queries

    def prepare(self, model: nn.Module) -> Rotary:
        return Rotary(find_decoder(model), unrotated_layers(model, describe(model)))

    def score(self, chunk: Chunk) -> Tensor:
        """Return scores (B, K, S); (B, K, L) zeros where nothing is selected by them."""
        batch, kv_heads = chunk.key.shape[:2]
        if not (chunk.selects or chunk.last):
            return torch.zeros(batch, kv_heads, chunk.new_tokens, device=chunk.key.device)
        # While a prompt is read no slot is empty.
        sinks_BKS, least = chunk.unit_positions < self.sinks, torch.finfo(torch.float32).min  # of a text of sinks alone
        mean_BND, covariance_BNDD = self._coming_queries(chunk)
        group = mean_BND.shape[1] // kv_heads
        mean_BKGD, covariance_BKGDD = (x.unflatten(1, (kv_heads, group)) for x in (mean_BND, covariance_BNDD))
        key = chunk.key.float()
        scores = key.new_zeros(key.shape[:3])
        for g in range(group):  # one query head of each group at a time, for a workspace as large as the keys
            logits_BKS = (key @ mean_BKGD[:, :, g, :, None])[..., 0] * chunk.scaling
            spread_BKS = ((key @ covariance_BKGDD[:, :, g]) * key).sum(-1)
            logits_BKS += spread_BKS * (chunk.scaling**2 / 2)
            scores += logits_BKS.masked_fill(sinks_BKS, least).softmax(-1) / group
        norms_BKS: Tensor = chunk.value.float().norm(dim=-1)
        return scores * norms_BKS

    def _coming_queries(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Return mean (B, N, D) and covariance (B, N, D, D) of the coming queries, rotated, float32."""
        counted_L = chunk.positions[0, 0] >= self.sinks
        queries = chunk.projections.query().float()
        queries = queries[:, :, counted_L] if counted_L.any() else queries
        mean = queries.mean(2, keepdim=True)
        scatter = queries - mean
        covariance = scatter.transpose(-1, -2) @ scatter / queries.shape[2]
        # A rotation is linear in its cosines and sines, so the mean rotation has their means.
        rotary = chunk.prepared.of(chunk.layer_idx)
        cos, sin = (x.mean(0, keepdim=True) for x in rotary.table(chunk.next_position, self.future, queries))
        by_rows = rotary.turn(covariance, cos, sin).transpose(-1, -2)
        return rotary.turn(mean, cos, sin)[:, :, 0], rotary.turn(by_rows, cos, sin)
