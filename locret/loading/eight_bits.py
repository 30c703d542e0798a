"""Weights of eight bits on a CPU: a token that is written reads half of bfloat16's bytes, a chunk multiplies as before.

Each row of a matrix has one scale. torch's product of few rows with such weights, which inductor uses for models that
torchao quantised, keeps them packed; of more rows, converting the codes once is faster. bitsandbytes does the like on
CUDA; on a CPU its products, torchao's eager ones and optimum-quanto's were 2 to 20 times slower for one row.
"""

# N output features, K input features

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

_FEW = 8
"""Rows up to which the packed product is the faster one."""
_STEP = 16
"""Input features that it takes at once: it reads beyond the end of a row that is no multiple of them."""
_LEFT = ("dt_proj", "kv_b_proj")
"""Layers of Mamba and of latent attention with whose weights others multiply."""


class EightBitLinear(nn.Module):
    """A linear layer, rounded: codes (N, K) int8 with scales (N,) bfloat16, such that weights are codes * scales."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        scale = (weight.abs().amax(1) / 127).bfloat16()
        divisor = scale.float().clamp_min(torch.finfo(torch.float32).tiny)[:, None]
        codes = (weight / divisor).round_().clamp_(-127, 127).to(torch.int8)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = linear.bias
        self.out_features, self.in_features = codes.shape

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> EightBitLinear:
        """Move it; a dtype is that of what is computed, not of the scale."""
        scale = self.scale.data
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.scale.dtype != scale.dtype:
            self.scale = nn.Parameter(scale.to(self.scale.device), requires_grad=False)
        return self

    def forward(self, states: Tensor) -> Tensor:
        """Return the products (..., N) of states (..., K), in their dtype; few rows are multiplied in bfloat16."""
        rows = states.reshape(-1, self.in_features)
        if rows.shape[0] <= _FEW:
            # A copy: it wants rows back to back, at an address that is a multiple of 32 bytes.
            rows = rows.to(torch.bfloat16, copy=True, memory_format=torch.contiguous_format)
            products = torch._weight_int8pack_mm(rows, self.codes, self.scale).to(states.dtype)
        else:
            dtype = torch.float32 if rows.dtype == torch.float16 else rows.dtype  # which does not hold sums of codes
            products = ((rows.to(dtype) @ self.codes.to(dtype).T) * self.scale.to(dtype)).to(states.dtype)
        products = products if self.bias is None else products + self.bias
        return products.view(*states.shape[:-1], self.out_features)


def pack(model: nn.Module) -> None:
    """Replace the linear layers of a backbone, its head included, one after another; also on the meta device."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and child.in_features % _STEP == 0 and name not in _LEFT:
                setattr(module, name, EightBitLinear(child))
    _hand_back()


def _hand_back() -> None:
    """Let the system have the memory of the wider weights: glibc would keep it for this process, between the codes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
