"""Weights of eight bits on a CPU: a token that is written reads half of bfloat16's bytes, and chunks multiply codes.

Each row of a matrix has one scale. torch's product of few rows with such weights, which inductor uses for models that
torchao quantised, keeps them packed. Many rows become codes as well, each row with a scale, where the CPU multiplies
codes two to four times as fast as floats; elsewhere the weights become floats again. Before they are rounded, features
are turned in groups by a Hadamard matrix, as are the weights' (QuaRot, arXiv 2404.00456): products stay the same, and
the few features that are many times as large as the rest no longer set the scale. bitsandbytes does the like on CUDA;
on a CPU its products, torchao's eager ones and optimum-quanto's were 2 to 20 times slower for one row. oneDNN's packed
product of codes wrote with Qwen 0.5B 9 % faster and read no faster: rounding and packing cost what it saves.
"""

# N output features, K input features

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

_FEW = 8
"""Rows up to which the packed product is faster than one with weights that become floats."""
_MANY = 1 << 22
"""Rows times weights from which a product of codes is faster than the packed one."""
_STEP = 16
"""Input features that it takes at once: it reads beyond the end of a row that is no multiple of them."""
_TURNED = 32
"""Input features that turn together, at most: twice as many were no better."""
_LEAST = torch.finfo(torch.float32).tiny
_LEFT = ("dt_proj", "kv_b_proj")
"""Layers of Mamba and of latent attention with whose weights others multiply."""


@cache
def multiplies_codes() -> bool:
    """Return whether the CPU multiplies codes faster than floats: VNNI does; untried where AMX multiplies bfloat16."""
    return torch.cpu._is_vnni_supported() and not torch.cpu._is_amx_tile_supported()


@cache
def _turn(features: int) -> Tensor:
    """Return the normalised Hadamard matrix of a power of two, which is its own inverse."""
    turn = torch.ones(1, 1)
    while len(turn) < features:
        turn = torch.cat([torch.cat([turn, turn], 1), torch.cat([turn, -turn], 1)])
    return turn / math.sqrt(features)


def _turned(rows: Tensor, turn: Tensor) -> Tensor:
    """Return float32 rows (R, K) in which features are turned, group by group."""
    return (rows.float().reshape(-1, len(turn)) @ turn).view(rows.shape)


class EightBitLinear(nn.Module):
    """A linear layer, rounded: codes (N, K) int8 with scales (N,) bfloat16, such that weights are codes * scales.

    Unless `turn` is None, these are the weights of inputs of which as many features as it has rows turn together.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        self.out_features, self.in_features = weight.shape
        self.turn = _turn(math.gcd(_TURNED, self.in_features)).to(weight.device) if multiplies_codes() else None
        weight = weight if self.turn is None else _turned(weight, self.turn)
        scale = (weight.abs().amax(1) / 127).bfloat16()
        divisor = scale.float().clamp_min(_LEAST)[:, None]
        codes = (weight / divisor).round_().clamp_(-127, 127).to(torch.int8)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = linear.bias

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> EightBitLinear:
        """Move it; a dtype is that of what is computed, not of the scale."""
        scale = self.scale.data
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.scale.dtype != scale.dtype:
            self.scale = nn.Parameter(scale.to(self.scale.device), requires_grad=False)
        self.turn = None if self.turn is None else self.turn.to(self.scale.device)
        return self

    def forward(self, states: Tensor) -> Tensor:
        """Return the products (..., N) of states (..., K), in their dtype; few rows are multiplied in bfloat16."""
        count = states.numel() // self.in_features
        few = count <= _FEW and (self.turn is None or count * self.codes.numel() < _MANY)
        rows, scale = self._rounded(states, few)
        if scale is None:
            products = torch._weight_int8pack_mm(rows, self.codes, self.scale)
        elif rows.dtype == torch.int8:
            sums = torch._int_mm(rows, self.codes.T)
            products = sums.view(torch.float32).copy_(sums).mul_(scale).mul_(self.scale)  # in the same memory
        else:
            products = (rows @ self.codes.to(rows.dtype).T) * scale.to(rows.dtype)
        products = products.to(states.dtype) if self.bias is None else products.to(states.dtype) + self.bias
        return products.view(*states.shape[:-1], self.out_features)

    def _rounded(self, states: Tensor, few: bool) -> tuple[Tensor, Tensor | None]:
        """Return rows (R, K) and their scales: bfloat16 and None, codes and (R, 1), or floats and the weights' (N,).

        Turned once for all layers that multiply the same states: queries, keys and values, or gate and up.
        """
        # Elsewhere than on a CPU the weights' scales are used here, and a compiled graph counts no versions.
        once = self.turn is not None and states.device.type == "cpu" and not torch.compiler.is_compiling()
        once = once and not (states.requires_grad or states.is_inference())
        key = (few, states._version, id(states)) if once else None  # a copy brings the attribute, not the version
        held: Any = getattr(states, "_locret_rounded", None)
        if once and held is not None and held[0] == key:
            return held[1]  # type: ignore[no-any-return]
        rows = states.reshape(-1, self.in_features)
        scale: Tensor | None = None
        if self.turn is not None:
            rows = _turned(rows, self.turn)
        if few:
            # A copy: it wants rows back to back, at an address that is a multiple of 32 bytes.
            rows = rows.to(torch.bfloat16, copy=True, memory_format=torch.contiguous_format)
        elif self.turn is None or rows.requires_grad or rows.device.type != "cpu":
            rows, scale = rows.to(torch.float32 if rows.dtype == torch.float16 else rows.dtype), self.scale  # for sums
        else:
            scale = rows.abs().amax(1, keepdim=True).div_(127).clamp_min_(_LEAST)
            rows = rows.div_(scale).round_().to(torch.int8)
        if once:
            states._locret_rounded = key, (rows, scale)  # type: ignore[attr-defined]
        return rows, scale


def pack(model: nn.Module) -> None:
    """Replace the linear layers of a backbone, its head included, one after another; also on the meta device."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and child.in_features % _STEP == 0 and name not in _LEFT:
                setattr(module, name, EightBitLinear(child))
    # The system gets the memory of the wider weights: glibc would keep it for this process, between the codes.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
