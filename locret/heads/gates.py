"""Heads of other architectures than Locret's: gates that others published, as modules that run alike.

A gate takes the place of the retaining head of a layer: it rates a token once, by itself, with one score per KV head.
Weights are float32 always, and so is the arithmetic. They are read (`locret.heads.published`), not trained.
"""
# K KV heads, G query heads of a group, E hidden size, R hidden width of a gate, M sink keys

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from locret.backbone.chunk import HIDDEN, RESIDUAL
from locret.backbone.shape import LayerShape
from locret.heads.head import Float32

_LARGEST = 1e30
"""What no number exceeds: the arithmetic is float32."""


class Gate(Float32, ABC):
    """A gate of one layer: (..., E) hidden states to (..., K) float32 scores; larger means keep.

    Args:
        shape: Of the layer's attention.
        hidden_size: E of the backbone.
        width: R, where the gate has a width of its own.
        numbers: Further numbers, as `Gate.numbers` names them.
    """

    name: ClassVar[str]
    """What config.json calls it."""
    source: ClassVar[str] = HIDDEN
    """Which hidden states it reads, of `locret.backbone.chunk.SOURCES`."""
    width: ClassVar[int | None] = None
    """R unless it is given; None: the gate has no hidden width."""
    numbers: ClassVar[Mapping[str, Any]] = {}
    """Further numbers with what they are unless they are given; their types are these values'."""

    @abstractmethod
    def __init__(self, shape: LayerShape, hidden_size: int, width: int, **numbers: Any) -> None:
        super().__init__()

    @abstractmethod
    def _scores(self, states: Tensor) -> Tensor:
        """Return (..., K) scores of (..., E) hidden states."""

    def forward(self, features: Tensor) -> Tensor:
        """Return (..., K) float32 scores; the arithmetic is float32, or what autocast makes of it."""
        return self._scores(features.float()).float()


def _normed(states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return F.rms_norm(states, weight.shape, weight, epsilon)


class KVzapLinear(Gate):
    """s = W h + b, the log of the KVzip+ score (KVzap, arXiv 2601.07891)."""

    name = "kvzap-linear"

    def __init__(self, shape: LayerShape, hidden_size: int, width: int, **numbers: Any) -> None:
        """Make (K, E) and (K,)."""
        super().__init__(shape, hidden_size, width)
        self.out = nn.Linear(hidden_size, shape.num_kv_heads)

    def _scores(self, states: Tensor) -> Tensor:
        return self.out(states)  # type: ignore[no-any-return]


class KVzapMLP(Gate):
    """s = W2 gelu(W1 h + b1) + b2, the log of the KVzip+ score."""

    name = "kvzap-mlp"
    width = 512

    def __init__(self, shape: LayerShape, hidden_size: int, width: int, **numbers: Any) -> None:
        """Make (R, E), (R,), (K, R) and (K,)."""
        super().__init__(shape, hidden_size, width)
        self.inner, self.out = nn.Linear(hidden_size, width), nn.Linear(width, shape.num_kv_heads)

    def _scores(self, states: Tensor) -> Tensor:
        return self.out(F.gelu(self.inner(states)))  # type: ignore[no-any-return]


class FastKVzip(Gate):
    """Low-rank attention of a token to itself beside learned sink keys: the log of its mean over the query heads.

    q (G R) and k (R) of a KV head are normed projections of h, a = exp(q k / sqrt(R) + b), and the share of the token
    is a / (a + sum over sinks of exp(q k_sink / sqrt(R))), which is what its authors call the score.
    """

    name = "fast-kvzip"
    width = 16
    numbers: ClassVar[Mapping[str, Any]] = {"sinks": 16, "epsilon": 1e-6}

    def __init__(self, shape: LayerShape, hidden_size: int, width: int, **numbers: Any) -> None:
        """Make projections, norms, sink keys (K, 1, M, R) and biases (K, 1, G)."""
        super().__init__(shape, hidden_size, width)
        kv_heads, group = shape.num_kv_heads, shape.num_heads // shape.num_kv_heads
        self.epsilon = numbers["epsilon"]
        self.q_proj = nn.Linear(hidden_size, kv_heads * group * width)
        self.k_proj = nn.Linear(hidden_size, kv_heads * width, bias=False)
        self.q_norm, self.k_norm = (nn.Parameter(torch.ones(width)) for _ in range(2))
        self.k_base = nn.Parameter(torch.zeros(kv_heads, 1, numbers["sinks"], width))
        self.b = nn.Parameter(torch.zeros(kv_heads, 1, group))

    def _scores(self, states: Tensor) -> Tensor:
        kv_heads, _, group = self.b.shape
        width = self.q_norm.shape[0]
        query = self.q_proj(states).unflatten(-1, (kv_heads, group, width))
        query = _normed(query.float(), self.q_norm, self.epsilon) / math.sqrt(width)
        key = _normed(self.k_proj(states).unflatten(-1, (kv_heads, 1, width)).float(), self.k_norm, self.epsilon)
        own = (query * key).sum(-1) + self.b[:, 0]
        sinks = torch.einsum("...kgr,kmr->...kgm", query, self.k_base[:, 0])
        # In logarithms: shares near 0 and near 1 stay apart.
        shares = -F.softplus((sinks - own[..., None]).logsumexp(-1))
        return shares.logsumexp(-1) - math.log(group)


class DMSAlpha(Gate):
    """s = offset - scale (W norm(x) + b): less than 0 is what DMS evicts, once it has left the window.

    x is what the decoder layer is given, before its norm: the gate has one of its own.
    """

    name = "dms"
    source = RESIDUAL
    numbers: ClassVar[Mapping[str, Any]] = {
        "scale": 100.0, "offset": 5.0, "window": 512, "epsilon": 1e-6, "bias": False, "per_layer": False,
    }  # fmt: skip

    def __init__(self, shape: LayerShape, hidden_size: int, width: int, **numbers: Any) -> None:
        """Make (E,), (K, E) and, with a bias, (K,)."""
        super().__init__(shape, hidden_size, width)
        self.scale, self.offset, self.epsilon = (float(numbers[name]) for name in ("scale", "offset", "epsilon"))
        self.per_layer = bool(numbers["per_layer"])
        self.norm = nn.Parameter(torch.ones(hidden_size))
        self.out = nn.Linear(hidden_size, shape.num_kv_heads, bias=bool(numbers["bias"]))

    def _scores(self, states: Tensor) -> Tensor:
        scores: Tensor = self.offset - self.scale * self.out(_normed(states, self.norm, self.epsilon))
        return scores[..., :1].expand_as(scores) if self.per_layer else scores


GATES: dict[str, type[Gate]] = {gate.name: gate for gate in (KVzapLinear, KVzapMLP, FastKVzip, DMSAlpha)}


def is_number(value: Any, usual: float) -> bool:
    """Return whether a number of a file can stand where `usual` would."""
    if type(usual) is float:
        return type(value) in (int, float) and abs(value) <= _LARGEST
    return type(value) is type(usual) and (type(usual) is bool or value >= 1)


def get(name: str) -> type[Gate]:
    """Return the gate with this name."""
    if name not in GATES:
        raise ValueError(f'gate "{name}" is unknown; those there are: {", ".join(GATES)}')
    return GATES[name]
