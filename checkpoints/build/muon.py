"""Muon (Jordan et al., 2024) in float32, all matrices of one shape at once.

PyTorch's own multiplies in bfloat16, one matrix after the other: on a CPU without bfloat16 instructions a step of the
embedded backbone then takes twelve seconds, of which less than one is learning.
"""
# N matrices of one shape, R rows, C columns, S the shorter side

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration; they raise small singular values fastest, and leave all between about 0.7 and 1.2."""
_ITERATIONS = 5
_EPSILON = 1.0e-7


def orthogonalised(matrices_NRC: Tensor) -> Tensor:
    """Return (N, R, C) float32: each matrix with its singular values moved close to 1, and its directions kept."""
    tall = matrices_NRC.shape[1] > matrices_NRC.shape[2]
    out_NSL = matrices_NRC.mT if tall else matrices_NRC
    out_NSL = out_NSL / out_NSL.norm(dim=(1, 2), keepdim=True).clamp(min=_EPSILON)
    first, second, third = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        gram_NSS = out_NSL @ out_NSL.mT
        update_NSS = torch.baddbmm(gram_NSS, gram_NSS, gram_NSS, beta=second, alpha=third)
        out_NSL = torch.baddbmm(out_NSL, update_NSS, out_NSL, beta=first)
    return out_NSL.mT if tall else out_NSL


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised, and scaled to the size of AdamW's (Liu et al., 2025)."""

    def __init__(
        self, matrices: Iterable[Tensor], lr: float = 1.0e-3, momentum: float = 0.95, weight_decay: float = 0.01
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient; `closure` is not supported."""
        if closure is not None:
            raise ValueError("closure is given, but Muon asks for the loss once only; call it before step()")
        for group in self.param_groups:
            alike: dict[torch.Size, list[Tensor]] = {}
            for matrix in group["params"]:
                if matrix.grad is not None:
                    alike.setdefault(matrix.shape, []).append(matrix)
            for shape, matrices in alike.items():
                updates_NRC = orthogonalised(torch.stack([self._momentum(m, group["momentum"]) for m in matrices]))
                size = group["lr"] * 0.2 * max(shape) ** 0.5
                for matrix, update_RC in zip(matrices, updates_NRC, strict=True):
                    matrix.mul_(1 - group["lr"] * group["weight_decay"]).add_(update_RC, alpha=-size)

    def _momentum(self, matrix: Tensor, momentum: float) -> Tensor:
        """Take in the gradient, and return Nesterov's look ahead of the mean gradient."""
        assert matrix.grad is not None
        state = self.state[matrix]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(matrix.grad)
        state["momentum_buffer"].lerp_(matrix.grad, 1 - momentum)
        return matrix.grad.lerp(state["momentum_buffer"], momentum)
