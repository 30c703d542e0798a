"""What the backbone gave to a cache, and what a scorer said, as it happened."""

# B batch, K KV heads, N tokens, L new tokens, S units, D head dim

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from locret import RetentionCache
from locret.backbone.chunk import Chunk
from locret.scorers import Rated, Scorer, TokenPass, TokenScorer


class WatchedCache(RetentionCache):
    """A cache that remembers the keys and values that the backbone's attention handed over."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.given: dict[int, list[tuple[Tensor, Tensor]]] = {}
        """Per layer, (K, L, D) keys, rotated by the backbone, and values, of the first row, on the CPU."""
        self.bases: dict[int, list[int]] = {}
        """Rotary position of the first of each."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """See `RetentionCache`."""
        self.given.setdefault(layer_idx, []).append((key_states[0].cpu(), value_states[0].cpu()))
        self.bases.setdefault(layer_idx, []).append(self.next_position)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def handed(self, layer_idx: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return (K, N, D) keys and values that came for one layer, and (N,) the rotary positions of those keys."""
        keys, values = (torch.cat(parts, dim=1) for parts in zip(*self.given[layer_idx], strict=True))
        if layer_idx in self.latents:  # where transformers has them the other way round
            keys, values = values, keys
        where = [
            base + torch.arange(part[0].shape[1])
            for base, part in zip(self.bases[layer_idx], self.given[layer_idx], strict=True)
        ]
        return keys, values, torch.cat(where)


class Said:
    """What a scorer said of every unit last, in one read of one row."""

    def __init__(self, kv_heads: Mapping[int, int], tokens: int) -> None:
        self.kv_heads, self.tokens = kv_heads, tokens
        self.scores: dict[int, Tensor] = {}
        """Per layer, (K, N) float32 on the CPU; NaN where nothing was said."""
        self.whole = True
        """Whether it always spoke of all heads together."""

    def note(self, layer_idx: int, positions: Tensor, scores: Tensor) -> None:
        """Note (1, K, L) scores of units at (1, 1 or K, L) positions."""
        heads = self.kv_heads[layer_idx]
        if scores.shape[1] != heads:
            self.whole = False
            return
        table = self.scores.setdefault(layer_idx, torch.full((heads, self.tokens), torch.nan))
        where = positions[0].expand(scores.shape[1:]).cpu().long()
        table.scatter_(1, where, scores[0].detach().float().cpu())


def watched(scorer: Scorer, said: Said) -> Scorer:
    """Return the same scorer, which also tells what it says."""
    kind: Any = type(scorer)

    def score(self: Any, chunk: Chunk) -> Tensor | Rated:
        rated: Tensor | Rated = kind.score(self, chunk)
        scores = rated.scores if isinstance(rated, Rated) else rated
        if not scorer.needs_hidden:
            said.note(chunk.layer_idx, chunk.unit_positions[..., -scores.shape[-1] :], scores)
        return rated

    def score_tokens(self: Any, model: Any, tokens: TokenPass) -> Tensor:
        scores: Tensor = kind.score_tokens(self, model, tokens)
        for layer, heads in said.kv_heads.items():
            said.note(layer, tokens.positions_BL[:, None], scores[:, None].expand(-1, heads, -1))
        return scores

    methods: dict[str, Any] = {"score": score}
    if isinstance(scorer, TokenScorer):
        methods["score_tokens"] = score_tokens
    twin = copy.copy(scorer)
    object.__setattr__(twin, "__class__", type(kind.__name__, (kind,), methods))  # its options are frozen
    return twin
