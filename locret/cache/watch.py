"""What an answer looks for, as far as one can tell from what it finds: its attention, and what is gone beside that.

A query that attends to a unit of a segment would have attended to what is gone of the same segment too. How much, the
ledger says: as much more as the heads predicted for what is gone than for what is held. Formula, for query head g of
KV head k and segment j, with a[j] its attention to what is held of j:

    r[j] = gone[k, j] / held[k, j],    lost[g, j] = a[j] r[j] / (1 + sum over i of a[i] r[i])

`gone` and `held` come from `locret.cache.ledger`, each smoothed over the two neighbours: a name may have stayed whose
number has gone, and they may lie in two segments. Levels of a head that a ranking leaves open cancel out.
"""

# K KV heads, G = N / K query heads of a group, J segments, S units, D head dim

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from locret.backbone.attention import View
from locret.backbone.chunk import Attended
from locret.backbone.learned_sinks import attention_weights
from locret.cache.layer import RetentionLayer
from locret.cache.store import POSITIONS
from locret.policy.growth import check_share_count, check_shares

_MOST = 100.0
"""Largest factor r: beyond that a head has kept next to nothing of a segment, and guesses."""
_NEAR = (0.5, 1.0, 0.5)


LEAST_SHARE = 0.5
"""Part of the mean that every layer counts with, whatever its share."""


class Watch:
    """Follows the attention of an answer's queries, one token at a time, and sums what is lost to them.

    Args:
        layers: The layers of the cache that answers.
        shares: Shares of the layers in a budget that the scorer's training has measured; None: it has measured none.
    """

    def __init__(self, layers: Sequence[RetentionLayer], shares: Sequence[float] | None = None) -> None:
        self._weights = layer_weights(shares, len(layers))
        self._ledgers = [layer.ledger for layer in layers]
        self._factors = [_factors(layer) for layer in layers]
        self._evictions = [layer.evictions for layer in layers]
        self._found, self._lost = ([torch.zeros_like(one[0]) for one in self._factors] for _ in range(2))
        """Attention to each segment, and lost there, summed over the queries of each layer."""
        self._queries = [0 for _ in layers]

    @property
    def width(self) -> int:
        """Tokens of a segment."""
        ledger = self._ledgers[0]
        assert ledger is not None
        return ledger.width

    @property
    def share(self) -> float:
        """Estimated share of the answer's attention that would have gone to what is gone; 0 before the first token."""
        return float(self.lost(weighed=False).sum())

    def lost(self, *, weighed: bool = True) -> Tensor:
        """Return how much of the answer's attention would have gone to what is gone of each segment.

        Args:
            weighed: Whether layers count as much as they decide, so that it says where to look; else all alike, as they
                do where nothing is gone of those that decide.

        Returns:
            (J,) float64 on the CPU, shares of all attention of the layers as they count.
        """
        lost = self._mean(self._lost, weighed)
        return lost if not weighed or lost.any() else self._mean(self._lost, False)

    def found(self, *, weighed: bool = True) -> Tensor:
        """Return how much of the answer's attention went to what is held of each segment, as `lost` does."""
        return self._mean(self._found, weighed)

    def _mean(self, sums: Sequence[Tensor], weighed: bool) -> Tensor:
        weights = self._weights if weighed else layer_weights(None, len(sums))
        means = [one.double().cpu() / max(count, 1) for one, count in zip(sums, self._queries, strict=True)]
        return torch.stack([weight * one for weight, one in zip(weights, means, strict=True)]).sum(0)

    def see(self, nth: int, layer: Attended, view: View, held: RetentionLayer) -> None:
        """Look at what the one new query of each head attends to in the layer that is `nth` of those with units."""
        if held.evictions != self._evictions[nth]:  # `decode_budget` evicts between two tokens
            self._factors[nth], self._evictions[nth] = _factors(held), held.evictions
        factors_KJ = self._factors[nth]
        heads = len(factors_KJ)
        queries_KGD = layer.query[0, :, 0].unflatten(0, (heads, -1))
        for part in held.store.parts(view, 1, False):
            own = slice(None) if part.where is None else slice(part.where[1], part.where[1] + 1)
            logits_KGS = queries_KGD[own].float() @ part.keys[0].float().transpose(-1, -2) * layer.scaling
            if layer.softcap is not None:
                logits_KGS = layer.softcap * torch.tanh(logits_KGS / layer.softcap)
            sinks = None if layer.learned_sinks is None else layer.learned_sinks.view(heads, -1, 1)[own]
            self._note(attention_weights(logits_KGS, sinks), part.columns[POSITIONS][0], factors_KJ[own], nth)

    def _note(self, weights_KGS: Tensor, positions_KS: Tensor, factors_KJ: Tensor, nth: int) -> None:
        ledger = self._ledgers[nth]
        assert ledger is not None
        segments_KS, there_KS = ledger.segments_of(positions_KS.long())
        seen = weights_KGS.masked_fill(~there_KS[:, None], 0.0)
        attention_KGJ = torch.zeros(*seen.shape[:2], factors_KJ.shape[1], device=seen.device)
        attention_KGJ.scatter_add_(2, segments_KS[:, None].expand_as(seen), seen)
        more_KGJ = _near(attention_KGJ) / sum(_NEAR) * factors_KJ[:, None]
        lost_KGJ = more_KGJ / (1 + more_KGJ.sum(-1, keepdim=True))
        self._found[nth] += attention_KGJ.sum((0, 1))
        self._lost[nth] += lost_KGJ.sum((0, 1))
        self._queries[nth] += seen.shape[0] * seen.shape[1]


def layer_weights(shares: Sequence[float] | None, layers: int) -> list[float]:
    """Return how much each layer counts, 1 in all: what its share has above the least that every layer gets.

    That is in proportion to what right answers lose by the layer. All layers count alike where no shares were measured,
    or none has more than the least.

    Raises:
        ValueError: If they are no shares, or those of another number of layers.
    """
    alike = [1 / layers] * layers
    if shares is None:
        return alike
    check_shares(shares)
    check_share_count(shares, layers)
    mean = sum(shares) / layers
    above = [max(share / mean - LEAST_SHARE, 0.0) for share in shares]
    return [one / sum(above) for one in above] if sum(above) else alike


def _factors(layer: RetentionLayer) -> Tensor:
    """Return (K, J): how much more attention was predicted for what is gone of a segment than for what is held."""
    assert layer.ledger is not None
    second = layer.host.store if layer.host is not None and layer.host.fill else None
    held, gone = map(_near, layer.ledger.masses(layer.store, second))
    assert layer.ledger.sums is not None
    never = (held <= 1e-9) | (layer.ledger.sums == -torch.inf)
    return (gone / held.clamp_min(1e-9)).clamp_max(_MOST).masked_fill(never, 0.0)


def _near(values: Tensor) -> Tensor:
    """Return each segment with a half of both neighbours."""
    kernel = torch.tensor(_NEAR, device=values.device)[None, None]
    flat = values.reshape(-1, 1, values.shape[-1])
    return torch.nn.functional.conv1d(flat, kernel, padding=1).reshape(values.shape)
