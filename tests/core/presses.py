"""Presses of somebody else's, as kvpress's contract has them: `score` and options. Imported by name in tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class NormPress:
    """Short keys stay."""

    compression_ratio: float = 0.0

    def score(
        self, module: Any, hidden_states: Tensor, keys: Tensor, values: Tensor, attentions: Any, kwargs: Any
    ) -> Tensor:
        return -keys.norm(dim=-1)


@dataclass
class WindowPress:
    """What the last queries look at stays, and they do: SnapKV's rule, by the module's own projections."""

    compression_ratio: float = 0.0
    window_size: int = 8

    def score(
        self, module: Any, hidden_states: Tensor, keys: Tensor, values: Tensor, attentions: Any, kwargs: Any
    ) -> Tensor:
        window, (batch, kv_heads, units, dim) = self.window_size, keys.shape
        assert hidden_states.shape[1] > window, "the pass is shorter than the window"
        query = module.q_proj(hidden_states[:, -window:]).view(batch, window, -1, dim).transpose(1, 2)
        cos, sin = (one[:, None, -window:] for one in kwargs["position_embeddings"])
        half = dim // 2
        query = query * cos + torch.cat([-query[..., half:], query[..., :half]], dim=-1) * sin
        grouped = query.unflatten(1, (kv_heads, -1))
        logits = grouped @ keys[:, :, None].transpose(-1, -2) / dim**0.5
        later = torch.arange(units) > torch.arange(units - window, units)[:, None]
        weights = logits.masked_fill(later, -torch.inf).softmax(-1)
        seen = weights.sum(-2).mean(2)[..., : units - window]
        return torch.nn.functional.pad(seen, (0, window), value=float(seen.max()) + 1)


class NeedyPress(NormPress):
    """Asks for the weights of attention."""

    def score(
        self, module: Any, hidden_states: Tensor, keys: Tensor, values: Tensor, attentions: Any, kwargs: Any
    ) -> Tensor:
        assert attentions is not None, "set output_attentions"
        return attentions.sum(2)


class ChoosyPress(NormPress):
    """Selects by itself."""

    def compress(self, *args: Any) -> Any:
        return args
