"""Values of kept units refitted, so that the queries of the last chunk read what they read before the eviction.

Paper:     Attention Matching, arXiv 2602.16284, the closed form for compact values.
Formula:   A = softmax(Q K_c^T) over the kept units, O = softmax(Q K^T) V over all, both causal;
           V_c' = V_c + argmin_X |A X - (O - A V_c)|^2 + r |X|^2, per KV head, the queries of its group together.
Deviates:  values only: keys stay, and nothing is added to the logits, so that a context stays an ordinary prefix. The
           queries are those of the text's last chunk, not of generated questions. The ridge pulls to the values as they
           were, so that X = 0 is never beaten by something worse: the error on the fitted queries cannot rise.
Cost:      once per read: per KV head two softmaxes of at most 1,024 queries, and one system of as many equations.
"""

# B batch, N query heads, K KV heads, L new tokens, S slots, C kept ones, n fitted queries, D head dim

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from locret.backbone.attention import View
from locret.backbone.learned_sinks import attention_weights, by_kv_head
from locret.cache.merging import kept_parts
from locret.cache.store import Store
from locret.policy.selectors import Kept

QUERIES = 1024
"""Most queries of a KV head that are fitted: evenly spread over the chunk, all heads of the group."""
RIDGE = 1.0
"""r, as a multiple of the mean squared length of the rows of A. A hundredth of it fits the chunk closer and answers
worse: questions ask something else than the chunk did."""


@dataclass(frozen=True)
class Refit:
    """What a chunk has looked at, for the eviction that follows it."""

    query: Tensor
    """(B, N, L, D), post-rotary."""
    view: View
    """What it attended to, the chunk's own units last."""
    scaling: float
    softcap: float | None
    kv_heads: int
    learned_sinks: Tensor | None = None
    """(N,) logits of learned sinks."""

    def apply(self, store: Store, kept: Kept) -> None:
        """Write new values over those of the units that stay; `Store.keep` comes next."""
        sinks = by_kv_head(self.learned_sinks, self.kv_heads)
        for part, chosen in kept_parts(store, self.view, kept):
            row, head = part.where or (0, 0)
            for b in range(part.keys.shape[0]):
                for k in range(part.keys.shape[1]):
                    query, own = self._queries(row + b, head + k), chosen.units[b, k]
                    part.values[b, k, own] = refitted_values(
                        query,
                        part.keys[b, k],
                        part.values[b, k],
                        own,
                        self.scaling,
                        self.softcap,
                        None if sinks is None else sinks[head + k],
                    ).to(part.values.dtype)

    def _queries(self, row: int, head: int) -> Tensor:
        """Return the (group, L, D) queries of one KV head."""
        group = self.query.shape[1] // self.kv_heads
        return self.query[row, head * group : (head + 1) * group]


def refitted_values(
    query_GLD: Tensor,
    keys_SD: Tensor,
    values_SD: Tensor,
    kept_C: Tensor,
    scaling: float,
    softcap: float | None = None,
    sinks_G11: Tensor | None = None,
) -> Tensor:
    """Return (C, D) float32 values of one KV head's kept units.

    Args:
        query_GLD: The group's queries of the chunk whose units are the newest L, post-rotary.
        keys_SD: All keys, post-rotary.
        values_SD: All values.
        kept_C: Ranks of the units that stay.
        scaling: Factor of the logits.
        softcap: Bound of the logits; None where there is none.
        sinks_G11: Logits of learned sinks; None where there are none.
    """
    group, new, dim = query_GLD.shape
    slots = len(keys_SD)
    rows = torch.linspace(0, new - 1, min(new, max(1, QUERIES // group)), device=query_GLD.device).round().long()
    logits = query_GLD[:, rows].float() @ keys_SD.float().T * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    unseen = torch.arange(slots, device=rows.device) > (slots - new + rows)[:, None]
    logits = logits.masked_fill(unseen, -torch.inf).flatten(0, 1)
    sinks = None if sinks_G11 is None else sinks_G11[:, 0].repeat_interleave(len(rows), 0)
    values, kept_values = values_SD.float(), values_SD[kept_C].float()
    # A query that comes before all kept units has nothing to be fitted with.
    weights = attention_weights(logits[:, kept_C], sinks).nan_to_num(0.0)
    sees = weights.sum(-1, keepdim=True) > 0
    missing = (attention_weights(logits, sinks) @ values - weights @ kept_values) * sees
    # Of the two forms of the solution that with as many unknowns as queries, whose number is bounded.
    weights64 = weights.double()
    gram = weights64 @ weights64.T
    ridge = RIDGE * gram.diagonal().mean().clamp_min(torch.finfo(gram.dtype).tiny)
    gram.diagonal().add_(ridge)
    solved = torch.cholesky_solve(missing.double(), torch.linalg.cholesky(gram))
    return kept_values + (weights64.T @ solved).float()
