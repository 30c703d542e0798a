"""Watch and steer a backbone's attention from outside, for the duration of a `with` block, without touching its code.

Inside the block the model runs the "locret" attention of this module; hooks record the projections it computes anyway,
and an observer is asked for the positions of new tokens and told when a layer has attended. Afterwards the model is
what it was before.
"""

# B batch, N query heads, K KV heads, L new tokens, S slots, D head dim, F = (N + 2 K) D features

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache

from locret.backbone.adapters import FUSED, Backbone, attention_modules, describe, find_decoder, unwrap
from locret.backbone.attention import MaskMemo, attend, attend_segments
from locret.backbone.rotary import long_factors


@dataclass
class Chunk:
    """What one full-attention layer has just computed for L new tokens; the one input of every scorer."""

    layer_idx: int
    query: Tensor
    """(B, N, L, D), post-rotary."""
    key: Tensor
    """(B, K, S, D), post-rotary, the new tokens last."""
    value: Tensor
    """(B, K, S, D)."""
    scaling: float
    softcap: float | None
    projections: Projections
    positions: Tensor | None = None
    """(1 or B, 1, L) original positions of the new tokens, where a cache keeps count of them."""
    unit_positions: Tensor | None = None
    """(B, K, S) original positions of all units, new ones included; -1 in empty slots."""
    stored_scores: Tensor | None = None
    """(B, K, S - L) float32 scores of the units that were there before, as the scorer gave them last."""
    next_position: int | None = None
    """Rotary position of the token to come, on the scale by which queries and keys were rotated."""
    row_start: Tensor | None = None
    """(B,) first slot of each row that holds a unit, where rows differ; None if all slots do."""
    budget: int | None = None
    """Units of this layer that stay per KV head, on average, by these scores, now or before the next generated token;
    else None."""
    protected: int = 0
    """Newest units that stay whatever their score, out of `budget`: the policy's or the scorer's, if those are more."""
    last: bool = False
    """Whether these are the last tokens of the prompt."""
    generating: bool = False
    """Whether the tokens are of an answer, or the prompt's last one that `generate` feeds itself."""

    @property
    def new_tokens(self) -> int:
        """L."""
        return self.query.shape[-2]

    def features(self) -> Tensor:
        """Return (B, L, F): all query heads, all key heads, all value heads of each new token, before rotation."""
        return self.projections.features()


@dataclass
class Projections:
    """Outputs of one layer's projections, before the rotary embedding and after q/k norms where there are any."""

    backbone: Backbone
    parts: dict[str, Tensor] = field(default_factory=dict)

    def features(self) -> Tensor:
        """Return (B, L, F)."""
        parts = self.feature_parts()
        return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]

    def feature_parts(self) -> list[Tensor]:
        """Return what the features are made of, to be put side by side."""
        return [self.parts[FUSED]] if FUSED in self.parts else [self.parts[name] for name in ("q", "k", "v")]

    def query(self) -> Tensor:
        """Return the un-rotated queries, (B, N, L, D)."""
        heads, dim = self.backbone.num_heads, self.backbone.head_dim
        flat = self.parts["q"] if "q" in self.parts else self.parts[FUSED][..., : heads * dim]
        return flat.reshape(*flat.shape[:-1], heads, dim).transpose(1, 2)

    def key(self) -> Tensor:
        """Return the un-rotated keys, (B, K, L, D)."""
        heads, kv_heads, dim = self.backbone.num_heads, self.backbone.num_kv_heads, self.backbone.head_dim
        flat = self.parts["k"] if "k" in self.parts else self.parts[FUSED][..., heads * dim : (heads + kv_heads) * dim]
        return flat.reshape(*flat.shape[:-1], kv_heads, dim).transpose(1, 2)

    def of_head(self, row: int, head: int) -> Projections:
        """Return what belongs to one KV head of one row and its query heads."""
        heads, kv_heads, dim = self.backbone.num_heads, self.backbone.num_kv_heads, self.backbone.head_dim
        group = heads // kv_heads
        starts = {"q": 0, "k": heads * dim, "v": (heads + kv_heads) * dim} if FUSED in self.parts else {}
        parts = {}
        for name, width in (("q", group * dim), ("k", dim), ("v", dim)):
            first = starts.get(name, 0) + head * width
            parts[name] = self.parts[FUSED if starts else name][row : row + 1, :, first : first + width]
        return Projections(replace(self.backbone, num_heads=group, num_kv_heads=1), parts)

    def clear(self) -> None:
        """Free the tensors once the layer is done."""
        self.parts.clear()


class Observer(Protocol):
    """What `instrumented` talks to: a cache, or the label pass of training."""

    def connect(self, projections: dict[int, Projections]) -> None:
        """Receive, per full-attention layer, the record that its hooks fill before its keys go to the cache."""

    def positions(self, tokens: Tensor) -> Tensor | None:
        """Return (B, L) rotary positions for the coming pass over `tokens`, or None for 0, 1, 2, ...

        `tokens` are (B, L) ids, or (B, L, E) embeddings where the backbone was given those.
        """

    def row_start(self, layer_idx: int) -> Tensor | None:
        """Return (B,) first filled slot of each row of a layer, or None if all rows are full."""

    def segments(self, layer_idx: int) -> list[list[slice]] | None:
        """Return, per row and KV head, which slots of a layer's keys are its own; None where all heads hold as many.

        With segments, keys and values are (B, 1, slots, D): the units of all heads back to back.
        """

    def attended(self, chunk: Chunk) -> None:
        """Receive a full-attention layer's tensors right after its attention."""

    def finished(self, hidden: Tensor) -> None:
        """Take note that a forward pass is over; `hidden` is its (B, L, E) last hidden state."""


@dataclass
class _Layer:
    index: int
    governed: bool
    observer: Observer
    projections: Projections
    memo: MaskMemo
    flash: bool


_ACTIVE: WeakKeyDictionary[nn.Module, _Layer] = WeakKeyDictionary()
NAME = "locret"


@contextmanager
def instrumented(model: nn.Module, observer: Observer) -> Iterator[None]:
    """Run the model's forward passes under the eyes of `observer` until the block ends.

    Raises:
        ValueError: If the model's attention cannot be found, or is instrumented already.
    """
    backbone, base, decoder = describe(model), unwrap(model), find_decoder(model)
    modules, memo = attention_modules(model), MaskMemo()
    if any(module in _ACTIVE for module in modules):
        raise ValueError("this model is being read by another cache; finish that prefill or generate call first")
    implementation = base.config._attn_implementation
    # A backbone loaded with flash_attention_2 goes on using that package; with anything else PyTorch's kernels serve.
    flash = implementation == "flash_attention_2"
    with ExitStack() as stack:
        for index, module in enumerate(modules):
            layer = _Layer(index, index in backbone.layers, observer, Projections(backbone), memo, flash)
            _ACTIVE[module] = layer
            stack.callback(_ACTIVE.pop, module, None)
            if layer.governed:
                for source, hook in recorders(module, layer.projections):
                    stack.callback(source.register_forward_hook(hook).remove)
        observer.connect({i: _ACTIVE[m].projections for i, m in enumerate(modules) if i in backbone.layers})
        before = decoder.register_forward_pre_hook(_steer(observer), with_kwargs=True)
        after = decoder.register_forward_hook(_finish(observer), with_kwargs=True)
        stack.callback(before.remove)
        stack.callback(after.remove)
        base.set_attn_implementation(NAME)
        stack.callback(base.set_attn_implementation, implementation)
        stack.enter_context(long_factors(decoder))
        yield


def recorders(module: nn.Module, projections: Projections) -> list[tuple[nn.Module, Any]]:
    """Return which modules of an attention module to hook, and with what, to record its projections (or the norms)."""
    backbone = projections.backbone

    def record(name: str, heads: int) -> Any:
        def hook(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            projections.parts[name] = _token_major(output, inputs[0], heads) if output.ndim == 4 else output

        return hook

    if hasattr(module, FUSED):
        return [(getattr(module, FUSED), record(FUSED, 0))]
    found = []
    for name, heads in (("q", backbone.num_heads), ("k", backbone.num_kv_heads), ("v", backbone.num_kv_heads)):
        source = next(n for n in (f"{name}_norm", f"{name}_proj") if getattr(module, n, None) is not None)
        found.append((getattr(module, source), record(name, heads)))
    return found


def _token_major(output: Tensor, source: Tensor, heads: int) -> Tensor:
    """Bring a norm's output to (B, L, heads * D): it may run before or after heads are moved in front of tokens."""
    head_major = output.shape[1] == heads
    if output.shape[1] == output.shape[2]:
        # As many tokens as heads: the strides of the norm's input tell which dimension is which.
        head_major = source.stride(1) < source.stride(2)
    return (output.transpose(1, 2) if head_major else output).flatten(2)


def _steer(observer: Observer) -> Any:
    def hook(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        tokens = kwargs.get("input_ids", args[0] if args else None)
        tokens = kwargs["inputs_embeds"] if tokens is None else tokens
        if isinstance(observer, Cache) and kwargs.get("past_key_values") is not observer:
            raise ValueError(
                "the backbone was called without this RetentionCache, as decoding with guidance_scale or an assistant "
                "model does; use sampling or beams"
            )
        positions = observer.positions(tokens)
        # The observer's cache knows what is padding, so the mask that `generate` carries along is not needed.
        kwargs["attention_mask"] = None
        if positions is not None:
            kwargs["position_ids"] = positions
        return args, kwargs

    return hook


def _finish(observer: Observer) -> Any:
    def hook(_module: nn.Module, _args: tuple[Any, ...], _kwargs: dict[str, Any], output: Any) -> None:
        observer.finished(output[0])

    return hook


def locret_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend, then tell the observer. The signature is that of a transformers attention function.

    Raises:
        ValueError: Outside `instrumented`, or where the backbone asks for learned sinks or attention dropout.
    """
    layer = _ACTIVE.get(module)
    if layer is None:
        raise ValueError('attention "locret" works inside locret.prefill and locret.generate; choose "sdpa" elsewhere')
    if s_aux is not None or dropout:
        raise ValueError(
            "attention with learned sinks or dropout is not supported; call model.eval() or use another model"
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    segments = layer.observer.segments(layer.index) if layer.governed else None
    if segments is not None:
        out = attend_segments(
            query, key, value, segments, scaling=scaling, memo=layer.memo, softcap=softcap, flash=layer.flash
        )
    else:
        out = attend(
            query,
            key,
            value,
            scaling=scaling,
            memo=layer.memo,
            softcap=softcap,
            window=None if layer.governed else sliding_window,
            row_start=layer.observer.row_start(layer.index),
            flash=layer.flash,
        )
    if layer.governed:
        layer.observer.attended(Chunk(layer.index, query, key, value, scaling, softcap, layer.projections))
        layer.projections.clear()
    return out.transpose(1, 2).contiguous(), None


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    """Build no (tokens x slots) mask: `attend` needs none."""


AttentionInterface.register(NAME, locret_attention)
AttentionMaskInterface.register(NAME, _no_mask)
