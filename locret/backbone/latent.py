"""Latent attention (MLA, DeepSeek) as what it is to a cache: all query heads attend to one key and one value per token.

Paper:   DeepSeek-V2, arXiv 2405.04434, section 2.1: keys and values of all heads are projections of a latent c, and a
         rotated key k of R dims is shared by the heads.
Formula: with W_K and W_V of a head, q . (W_K c) = (W_K^T q) . c, and sum a W_V c = W_V (sum a c). So a head's query
         [q_rope; W_K^T q_nope] attends to the key [k; c] and the value c, and W_V brings the result back.

A unit is held as transformers holds it since 5.17, the rotated key apart from the latent: keys are k, which positions
turn, and values are c.
"""

# B batch, N query heads, L new tokens, S slots, R rotated dims, P other dims of a query, C dims of a latent, V dims of
# a head's value, E hidden size

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from locret.backbone.attention import View

DOWN, UP = "kv_a_proj_with_mqa", "kv_b_proj"


def is_latent(module: nn.Module) -> bool:
    """Return whether an attention module makes keys and values from a latent."""
    return hasattr(module, DOWN) and hasattr(module, UP)


@dataclass(frozen=True)
class Latent:
    """The numbers and weights of one layer's latent attention."""

    module: Any
    heads: int
    rank: int
    """C."""
    rotated: int
    """R."""
    value: int
    """V."""
    swapped: bool
    """Whether projections have the two numbers of a rotated pair side by side, and rotated ones in two halves."""
    paired: bool
    """Whether rotated ones have them side by side too."""

    @classmethod
    def of(cls, module: Any) -> Latent:
        """Describe an attention module."""
        config = module.config
        names = ("num_attention_heads", "kv_lora_rank", "qk_rope_head_dim", "v_head_dim")
        if missing := [name for name in names if not isinstance(getattr(config, name, None), int)]:
            raise ValueError(f"the latent attention {type(module).__name__} has no {', '.join(missing)} in its config")
        query_projection(module)
        # No config says how a family pairs dimensions where all its models do it alike; what is called does.
        calls = type(module).forward.__code__.co_names
        swapped = getattr(config, "rope_interleave", "apply_rotary_pos_emb_interleave" in calls)
        paired = "apply_rotary_emb" in calls and "apply_rotary_pos_emb" not in calls
        heads, rank, rotated, value = (int(getattr(config, name)) for name in names)
        return cls(module, heads, rank, rotated, value, swapped=bool(swapped) or paired, paired=paired)

    def halves(self, states: Tensor) -> Tensor:
        """Bring rotated dims, side by side as the backbone has rotated them, into two halves."""
        return _halves(states) if self.paired else states

    def raw_key(self, down: Tensor) -> Tensor:
        """Return the un-rotated (B, L, R) keys of what `kv_a_proj_with_mqa` returned, in two halves."""
        key = down[..., self.rank :]
        return _halves(key) if self.swapped else key

    def raw_query(self, query: Tensor) -> Tensor:
        """Return (B, N, L, R + C) queries for un-rotated ones (B, N, L, P + R)."""
        return self._absorbed(query, halved=self.swapped)

    def query(self, query: Tensor) -> Tensor:
        """Return (B, N, L, R + C) queries of what the backbone attends with, (B, N, L, P + R), post-rotary."""
        return self._absorbed(query, halved=self.paired)

    def _absorbed(self, query: Tensor, *, halved: bool) -> Tensor:
        plain, rotated = query[..., : -self.rotated], query[..., -self.rotated :]
        up = self._up(query)[:, : plain.shape[-1]]
        return torch.cat([_halves(rotated) if halved else rotated, plain @ up], dim=-1)

    def output(self, latents: Tensor) -> Tensor:
        """Return the (B, N, L, V) output of heads that have read (B, N, L, C) latents."""
        return latents @ self._up(latents)[:, -self.value :].mT

    def _up(self, like: Tensor) -> Tensor:
        """Return (N, P + V, C): the projection of latents to every head's keys and values."""
        up = getattr(self.module, UP)
        # Adapters, codes and weights that are elsewhere: what the projection does says what it is.
        plain = type(up) is nn.Linear and up.weight.is_floating_point() and up.weight.device == like.device
        if plain and not hasattr(up, "_hf_hook"):
            weight: Tensor = up.weight
        else:
            weight = up(torch.eye(self.rank, dtype=like.dtype, device=like.device)).mT
        return weight.to(like.dtype).view(self.heads, -1, self.rank)


def own_view(latent: Latent, key: Tensor, latents: Tensor) -> View:
    """Return what a pass without a cache attends to.

    Args:
        latent: The layer.
        key: (B, N, L, P + R) the keys of all heads, post-rotary; they share the rotated dims.
        latents: (B, L, C).
    """
    keys, values = latent.halves(key[:, :1, :, -latent.rotated :]), latents[:, None]
    return View(torch.cat([keys, values], dim=-1), values)


def query_projection(module: Any) -> nn.Module:
    """Return what projects the queries of latent attention."""
    found: nn.Module | None = getattr(module, "q_b_proj", None) or getattr(module, "q_proj", None)
    if found is None:
        raise ValueError(f"the latent attention {type(module).__name__} has no q_proj or q_b_proj")
    return found


def _halves(states: Tensor) -> Tensor:
    """Bring the numbers of pairs, which are side by side in the last dimension, into its two halves."""
    return torch.cat([states[..., 0::2], states[..., 1::2]], dim=-1)
