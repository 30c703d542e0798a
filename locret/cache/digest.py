"""A fingerprint of the token ids that a cache has read: 8 bytes a row, computed where the ids are, without waiting.

It is the polynomial sum (id_i + 1) P^(n - 1 - i), modulo 2^64, so that ids can be added, and the last one taken away.
"""

# B batch, L tokens

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

_BASE = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, so that it has an inverse
_INVERSE = (lambda inverse: inverse - (1 << 64) if inverse >> 63 else inverse)(pow(_BASE, -1, 1 << 64))
_MOST = 4096


@cache
def _powers(device: torch.device) -> Tensor:
    """Return P^_MOST .. P^0."""
    ones = torch.ones(1, dtype=torch.int64)
    return torch.cat([ones, torch.full((_MOST,), _BASE)]).cumprod(0).flip(0).to(device)


def extended(digest: Tensor | None, ids: Tensor) -> Tensor:
    """Return the (B,) digest after (B, L) further ids; None is the digest of nothing."""
    if digest is None:
        digest = torch.zeros(ids.shape[0], dtype=torch.int64, device=ids.device)
    if ids.shape[1] == 1:  # what every generated token needs
        return torch.add(ids[:, 0].long() + 1, digest, alpha=_BASE)
    powers = _powers(ids.device)
    for piece in ids.long().split(_MOST, dim=1):
        length = piece.shape[1]
        terms = (piece + 1) * powers[_MOST + 1 - length :]
        digest = digest * powers[_MOST - length] + terms.sum(dim=1)
    return digest


def shortened(digest: Tensor, last: Tensor) -> Tensor:
    """Return the (B,) digest before the (B, 1) last id."""
    return (digest - (last[:, 0] + 1)) * _INVERSE


def digest_of(ids: Tensor, mask: Tensor | None) -> Tensor:
    """Return the (B,) digests of (B, N) ids on the CPU, without those that a (B, N) mask says are padding."""
    if mask is None:
        return extended(None, ids)
    return torch.cat([extended(None, row[kept.bool()][None]) for row, kept in zip(ids, mask, strict=True)])
