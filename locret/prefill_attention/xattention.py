"""XAttention: blocks of keys by the sums of antidiagonals, as many as hold a share of the estimated attention.

Paper:     XAttention, arXiv 2503.16428, section 2; numbers as in the published code.
Formula:   For groups a of `stride` queries and b of `stride` keys: z_ab = sum_t q[a, stride - 1 - t] . k[b, t], scaled
           by 1 / stride besides the backbone's scaling; A = causal softmax over b; a block's weight is the sum of A in
           it. Per block of queries: the first block and its own, then the heaviest, until they hold `threshold` of all.
Deviates:  The published code aligns blocks to the start of the text; here a line of the grid is where the chunk begins,
           and the first block in front may be short, so that any number of kept units will do. One threshold for all
           heads; the per-head thresholds that the authors search for some backbones are not read.
Cost:      Estimate O(L S / stride) per chunk, 1 / (2 stride) of what attention would cost. Query-aware, untrained.
"""

# G query heads, L new tokens, S slots, D head dim, Q blocks of queries, C blocks of keys, A and E groups of `stride`

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from locret.backbone.attention import capped
from locret.base.fields import SHARE, Range
from locret.prefill_attention.base import PrefillAttention, front_gap, on_slots


@dataclass(frozen=True, kw_only=True)
class XAttention(PrefillAttention):
    """The blocks that hold a share of the attention, as antidiagonals estimate it."""

    name: ClassVar[str] = "xattention"
    ranges = {"threshold": SHARE, "stride": Range(1), "block": Range(1)}

    threshold: float = 0.9
    """Share of the estimated attention that the chosen blocks hold (paper: 0.9); 1 chooses all of them."""
    stride: int = 8
    """Tokens between the antidiagonals (paper: 8 or 16); a larger one is cheaper and less exact."""
    block: int = 128
    """Tokens of a block (paper: 128)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.threshold:
            self.refuse("threshold=0 is not a share that chooses anything; give one above 0 up to 1")
        if self.block % self.stride:
            self.refuse(f"stride={self.stride} does not divide block={self.block}; give one that does, such as 8")

    @property
    def rows(self) -> int:
        return self.block

    def covers(self, slots: int) -> bool:
        return self.threshold == 1 or slots <= self.block + 1  # the first block and the own one are always chosen

    def choose(self, query_GLD: Tensor, key_SD: Tensor, scaling: float, softcap: float | None) -> Tensor:
        # One head after another, so that no estimate of all heads exists at once.
        chosen = [self._heaviest(self._weights(query_LD, key_SD, scaling, softcap)) for query_LD in query_GLD]
        held = len(key_SD) - query_GLD.shape[1]
        return on_slots(torch.stack(chosen), self.block, held, len(key_SD))

    def _weights(self, query_LD: Tensor, key_SD: Tensor, scaling: float, softcap: float | None) -> Tensor:
        """Return the (Q, C) estimated attention of blocks."""
        block, stride, new = self.block, self.stride, len(query_LD)
        gap, back = front_gap(len(key_SD) - new, block), -new % block
        queries_AD = F.pad(query_LD, (0, 0, 0, back)).float().unflatten(0, (-1, stride)).flip(1).flatten(1)
        keys_ED = F.pad(key_SD, (0, 0, gap, back)).float().unflatten(0, (-1, stride)).flatten(1)
        logits_AE = capped(queries_AD @ keys_ED.T * (scaling / stride), softcap)
        behind = torch.ones_like(logits_AE, dtype=torch.bool).triu_(len(keys_ED) - len(queries_AD) + 1)
        behind[:, : gap // stride] = True
        weights_AE = logits_AE.masked_fill_(behind, -torch.inf).softmax(-1)
        weights_AE[-(-new // stride) :] = 0  # groups without a query
        per = block // stride
        blocks: Tensor = weights_AE.unflatten(0, (-1, per)).unflatten(2, (-1, per))
        return blocks.sum((1, 3))

    def _heaviest(self, weights_QC: Tensor) -> Tensor:
        """Return (Q, C) bool: the first block, the own one, and as many others as it takes, the heaviest first."""
        weights_QC = weights_QC.double()
        queries, blocks = weights_QC.shape
        always = torch.eye(blocks, dtype=torch.bool, device=weights_QC.device)[blocks - queries :]
        always[:, 0] = True
        needed = self.threshold * weights_QC.sum(-1, keepdim=True)
        others, order = weights_QC.masked_fill(always, -1).sort(dim=-1, descending=True, stable=True)
        others = others.clamp_min(0)
        before = (weights_QC * always).sum(-1, keepdim=True) + others.cumsum(-1) - others
        return always.clone().scatter_(-1, order, before < needed) | always
