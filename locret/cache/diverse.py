"""Units that stay by two things: their scores, and how far their keys point away from the average key.

Trained heads know what a text of the kind they learned from will be asked. What they never saw, such as a thousand
entries that differ in one number, they rate alike, and there the keys tell which tokens repeat what others hold.

Source:    KeyDiff, arXiv 2504.15364, section 3, for the keys; that both count is ours.
Formula:   (1 - diversity) z(s[j]) + diversity z(-cos(k_j, m)), m = mean of k / ||k||; z standardises over the units of
           a KV head. With ranks in place of z, entries that look alike are lost again.
Deviates:  keys before rotation, so that it does not matter where a unit is; KeyDiff takes them as attended.
"""

# B batch, K KV heads, S slots, U units of all heads of a row, D head dim

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from locret.cache.ragged import RaggedStore
from locret.cache.store import NO_UNIT, POSITIONS, SCORES, DenseStore


@dataclass(frozen=True)
class Diverse:
    """The units of a store as a selector asks for them, in place of their scores what both come to."""

    store: DenseStore | RaggedStore
    """Holds keys before rotation."""
    diversity: float

    def held(self, name: str) -> Tensor:
        """Return a column, (B, K, S)."""
        held = self.store.held(name)
        if name != SCORES:
            return held
        there, keys = self.store.held(POSITIONS) != NO_UNIT, self.store.keys[:, :, : held.shape[-1]]
        # One head at a time, because the keys of one in float32 are little memory.
        heads = zip(held.flatten(0, 1), keys.flatten(0, 1), there.flatten(0, 1), strict=True)
        return torch.stack([self._mixed(*head) for head in heads]).view_as(held)

    def rows(self) -> Iterator[tuple[Tensor, Tensor, list[int]]]:
        """Yield what `RaggedStore.rows` does."""
        store = self.store
        assert isinstance(store, RaggedStore)
        for row, (scores_U, positions_U, counts) in enumerate(store.rows()):
            heads = zip(scores_U.split(counts), store.segments[row], strict=True)
            mixed = [self._mixed(scores_S, store.keys[row, span]) for scores_S, span in heads]
            yield torch.cat(mixed), positions_U, counts

    def _mixed(self, scores_S: Tensor, keys_SD: Tensor, there_S: Tensor | None = None) -> Tensor:
        """Return (S,) for one KV head; empty slots, which hold no key, count for nothing and come last."""
        keys = normalize(keys_SD.float(), dim=-1)
        if there_S is not None:
            keys = keys.masked_fill(~there_S[:, None], 0.0)
        unlike = -(keys @ normalize(keys.sum(0), dim=0))
        some = scores_S.isfinite() if there_S is None else scores_S.isfinite() & there_S
        mixed = (1 - self.diversity) * _standard(scores_S, some) + self.diversity * _standard(unlike, some)
        return torch.where(some, mixed, scores_S)


def _standard(values_S: Tensor, some_S: Tensor) -> Tensor:
    """Return (S,) how many standard deviations values are above the mean of some."""
    own = values_S.where(some_S, 0.0)
    count = some_S.sum().clamp_min(1)
    apart = (own - own.sum() / count).where(some_S, 0.0)
    return apart / (apart.square().sum() / count).sqrt().clamp_min(1e-6)  # values that differ by less are alike
