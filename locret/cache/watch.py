"""Where in the text an answer looks: the attention of its queries to what is held, summed by segments of the text."""

# K KV heads, G = N / K query heads of a group, J segments, S units, D head dim

from __future__ import annotations

import torch
from torch import Tensor

from locret.backbone.attention import View
from locret.backbone.chunk import Attended
from locret.backbone.learned_sinks import attention_weights
from locret.cache.layer import RetentionLayer
from locret.cache.store import POSITIONS

LEAST_WIDTH = 32
"""Tokens of a segment as long as the text is short."""
_MOST_SEGMENTS = 256
"""Of a text: longer ones have wider segments."""


class Watch:
    """Follows the attention of an answer's queries, one token at a time.

    Args:
        layers: How many layers the cache governs, which all count alike.
        tokens: Tokens of the text; what was said later is in no segment.
    """

    def __init__(self, layers: int, tokens: int) -> None:
        self.tokens, self.width = tokens, LEAST_WIDTH
        while -(-tokens // self.width) > _MOST_SEGMENTS:
            self.width *= 2
        self._sums = [torch.zeros(-(-tokens // self.width), dtype=torch.float32) for _ in range(layers)]
        self._queries = [0 for _ in range(layers)]

    def found(self) -> Tensor:
        """Return (J,) float32: which share of the answer's attention each segment got, 1 at most in all."""
        means = [one / max(count, 1) for one, count in zip(self._sums, self._queries, strict=True)]
        return torch.stack(means).mean(0)

    def see(self, nth: int, layer: Attended, view: View, held: RetentionLayer) -> None:
        """Look at what the one new query of each head attends to in the layer that is `nth` of those with units."""
        heads = layer.projections.shape.num_kv_heads
        queries_KGD = layer.query[0, :, 0].unflatten(0, (heads, -1))
        for part in held.store.parts(view, 1, False):
            own = slice(None) if part.where is None else slice(part.where[1], part.where[1] + 1)
            logits_KGS = queries_KGD[own].float() @ part.keys[0].float().transpose(-1, -2) * layer.scaling
            if layer.softcap is not None:
                logits_KGS = layer.softcap * torch.tanh(logits_KGS / layer.softcap)
            sinks = None if layer.learned_sinks is None else layer.learned_sinks.view(heads, -1, 1)[own]
            self._note(attention_weights(logits_KGS, sinks), part.columns[POSITIONS][0].long(), nth)

    def _note(self, weights_KGS: Tensor, positions_KS: Tensor, nth: int) -> None:
        there_KS = (positions_KS >= 0) & (positions_KS < self.tokens)
        seen_KS = weights_KGS.sum(1).masked_fill(~there_KS, 0.0)
        segments_KS = (positions_KS // self.width).clamp(0, len(self._sums[nth]) - 1)
        self._sums[nth].index_add_(0, segments_KS.flatten().cpu(), seen_KS.flatten().cpu())
        self._queries[nth] += weights_KGS.shape[0] * weights_KGS.shape[1]
