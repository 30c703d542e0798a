"""Heads of other architectures than Locret's: gates that others published, as modules that run alike.

A gate takes the place of the retaining head of a layer: it rates a token once, by itself, with one score per KV head.
Weights are float32 always, and so is the arithmetic. Files in the forms of their authors: `locret.heads.gate_files`.
"""
# K KV heads, G query heads of a group, E hidden size, R hidden width of a gate, M sink keys

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import skip_init

from locret.backbone.chunk import HIDDEN, RESIDUAL
from locret.base.nearest import nearest

if TYPE_CHECKING:
    from locret.backbone.adapters import LayerShape

LOCRET = "locret"
"""The architecture of the paper, which is `locret.heads.head`."""
WIDEST = 2**20
"""What no width or count of a gate exceeds."""
_LARGEST = 1e30
"""What no other number does: the arithmetic is float32."""


@dataclass(frozen=True, kw_only=True)
class GateSize:
    """What a gate is made of, besides the shape of its layer's attention; `HeadsConfig.gate` holds the same."""

    hidden_size: int
    """E of the backbone."""
    width: int
    """R, where the gate has a width of its own."""
    numbers: Mapping[str, Any]
    """Further numbers, as `Gate.numbers` names them."""


class Gate(nn.Module):
    """A gate of one layer: (..., E) hidden states to (..., K) float32 scores; larger means keep.

    Args:
        shape: Of the layer's attention.
        size: Its own.
        initializer_range: Standard deviation of fresh matrices, the backbone's own.
        generator: Source of the fresh weights; torch's global one if None.
    """

    name: ClassVar[str]
    """What config.json calls it."""
    about: ClassVar[str]
    """The same for the model card."""
    paper: ClassVar[str]
    source: ClassVar[str] = HIDDEN
    """Which hidden states it reads, of `locret.backbone.chunk.SOURCES`."""
    width: ClassVar[int | None] = None
    """R unless it is given; None: the gate has no hidden width."""
    numbers: ClassVar[Mapping[str, Any]] = {}
    """Further numbers with what they are unless they are given; their types are these values'."""

    def __init__(
        self, shape: LayerShape, size: GateSize, initializer_range: float, generator: torch.Generator | None
    ) -> None:
        super().__init__()
        self._range = initializer_range
        self.build(shape, size)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=self._range, generator=generator)
            else:
                nn.init.constant_(parameter, 1.0 if "norm" in name else 0.0)

    def build(self, shape: LayerShape, size: GateSize) -> None:
        """Make the parameters; those of one dimension begin as zeros, or ones where they scale a norm."""
        raise NotImplementedError

    def scores(self, states: Tensor) -> Tensor:
        """Return (..., K) scores of (..., E) hidden states."""
        raise NotImplementedError

    def forward(self, features: Tensor) -> Tensor:
        """Return (..., K) float32 scores; the arithmetic is float32, or what autocast makes of it."""
        return self.scores(features.float()).float()

    def _apply(self, fn: Any, recurse: bool = True) -> Gate:
        """Follow `.to(device)`, but keep float32 whatever dtype is asked for."""

        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(keep_dtype, recurse)  # type: ignore[no-any-return, no-untyped-call]


def _linear(inputs: int, outputs: int, *, bias: bool) -> nn.Linear:
    device = "meta" if torch.get_default_device().type == "meta" else "cpu"
    made: nn.Linear = skip_init(nn.Linear, inputs, outputs, bias=bias, dtype=torch.float32, device=device)
    return made


def _empty(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=torch.float32))


def _normed(states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return F.rms_norm(states, weight.shape, weight, epsilon)


class KVzapLinear(Gate):
    """s = W h + b, the log of the KVzip+ score."""

    name = "kvzap-linear"
    about = "a linear map of the hidden states (KVzap)"
    paper = "KVzap, arXiv 2601.07891"

    def build(self, shape: LayerShape, size: GateSize) -> None:
        """Make (K, E) and (K,)."""
        self.out = _linear(size.hidden_size, shape.num_kv_heads, bias=True)

    def scores(self, states: Tensor) -> Tensor:
        """See `Gate`."""
        return self.out(states)  # type: ignore[no-any-return]


class KVzapMLP(Gate):
    """s = W2 gelu(W1 h + b1) + b2, the log of the KVzip+ score."""

    name = "kvzap-mlp"
    about = "an MLP of two layers on the hidden states (KVzap)"
    paper = "KVzap, arXiv 2601.07891"
    width = 512

    def build(self, shape: LayerShape, size: GateSize) -> None:
        """Make (R, E), (R,), (K, R) and (K,)."""
        self.inner = _linear(size.hidden_size, size.width, bias=True)
        self.out = _linear(size.width, shape.num_kv_heads, bias=True)

    def scores(self, states: Tensor) -> Tensor:
        """See `Gate`."""
        return self.out(F.gelu(self.inner(states)))  # type: ignore[no-any-return]


class FastKVzip(Gate):
    """Low-rank attention of a token to itself beside learned sink keys: the log of its mean over the query heads.

    q (G R) and k (R) of a KV head are normed projections of h, a = exp(q k / sqrt(R) + b), and the share of the token
    is a / (a + sum over sinks of exp(q k_sink / sqrt(R))), which is what its authors call the score.
    """

    name = "fast-kvzip"
    about = "low-rank attention to the token itself and to sink keys (Fast KVzip)"
    paper = "Fast KVzip, arXiv 2601.17668"
    width = 16
    numbers: ClassVar[Mapping[str, Any]] = {"sinks": 16, "epsilon": 1e-6}

    def build(self, shape: LayerShape, size: GateSize) -> None:
        """Make projections, norms, sink keys (K, 1, M, R) and biases (K, 1, G)."""
        kv_heads, group = shape.num_kv_heads, shape.num_heads // shape.num_kv_heads
        self.epsilon = size.numbers["epsilon"]
        self.q_proj = _linear(size.hidden_size, kv_heads * group * size.width, bias=True)
        self.k_proj = _linear(size.hidden_size, kv_heads * size.width, bias=False)
        self.q_norm, self.k_norm = _empty(size.width), _empty(size.width)
        self.k_base = _empty(kv_heads, 1, size.numbers["sinks"], size.width)
        self.b = _empty(kv_heads, 1, group)

    def scores(self, states: Tensor) -> Tensor:
        """See `Gate`."""
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
    about = "a normed linear map of the residual stream (DMS, dms_separate_alpha)"
    paper = "DMS, arXiv 2506.05345"
    source = RESIDUAL
    numbers: ClassVar[Mapping[str, Any]] = {
        "scale": 100.0, "offset": 5.0, "window": 512, "epsilon": 1e-6, "bias": False, "per_layer": False,
    }  # fmt: skip

    def build(self, shape: LayerShape, size: GateSize) -> None:
        """Make (E,), (K, E) and, with a bias, (K,)."""
        numbers = size.numbers
        self.scale, self.offset, self.epsilon = (float(numbers[name]) for name in ("scale", "offset", "epsilon"))
        self.per_layer, self._range = bool(numbers["per_layer"]), self._range / abs(self.scale)
        self.norm = _empty(size.hidden_size)
        self.out = _linear(size.hidden_size, shape.num_kv_heads, bias=bool(numbers["bias"]))

    def scores(self, states: Tensor) -> Tensor:
        """See `Gate`."""
        scores: Tensor = self.offset - self.scale * self.out(_normed(states, self.norm, self.epsilon))
        return scores[..., :1].expand_as(scores) if self.per_layer else scores


GATES: dict[str, type[Gate]] = {gate.name: gate for gate in (KVzapLinear, KVzapMLP, FastKVzip, DMSAlpha)}


def is_number(value: Any, usual: float, name: str) -> bool:
    """Return whether a number from a file, of any size, can stand where `usual` would."""
    if type(usual) is bool:
        return type(value) is bool
    if type(usual) is int:
        return type(value) is int and 1 <= value <= WIDEST
    least = {"epsilon": 0.0, "scale": 1 / _LARGEST}.get(name, -_LARGEST)
    return type(value) in (int, float) and least <= (abs(value) if name == "scale" else value) <= _LARGEST


def get(name: str) -> type[Gate]:
    """Return the gate with this name.

    Raises:
        ValueError: If there is none; the message lists the nearest names.
    """
    if name not in GATES:
        near = nearest(name, [LOCRET, *GATES]) or [LOCRET, *GATES]
        raise ValueError(f'gate "{name}" is unknown; did you mean {" or ".join(near)}?')
    return GATES[name]
