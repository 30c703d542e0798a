"""Watch and steer a backbone's attention from outside, for the duration of a `with` block, without touching its code.

Inside the block the model runs the "locret" attention of this module. Forward methods of ours around its own record the
projections that it computes anyway (hooks take longer, which a generated token would notice), and an observer is
asked for the positions of new tokens, asked what their queries attend to, and told when a layer has attended. The
observer comes with the call: it is the reader of the cache that the backbone is given, which also runs the decoder's
pass and may replay one. So several caches of one model may be read and answered in turns, or from several threads. When
the last block of a model ends, it is what it was before.
"""

# B batch, N query heads, K KV heads, L new tokens, S slots, D head dim, E hidden size

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from threading import RLock
from types import MethodType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, GenerationMixin

from locret.backbone.adapters import (
    FUSED,
    attention_modules,
    describe,
    find_decoder,
    latents,
    lends_neuron,
    state_modules,
    unwrap,
)
from locret.backbone.attention import MaskMemo, View, attend, flash_attend, flash_covers
from locret.backbone.chunk import Attended, Projections
from locret.backbone.latent import DOWN, UP, Latent, own_view, query_projection
from locret.backbone.recurrence import stepping
from locret.backbone.rotary import long_factors, uses_long_factors
from locret.backbone.shape import BOTH, FULL, SLIDING, Backbone, LayerShape
from locret.base.openmp import hand_back_cores

NAME = "locret"
_NOTHING = object()
_QUERIES = ("q_norm", "q_layernorm", "q_proj")


class Observer(ABC):
    """What a forward pass talks to: the reader of a cache, or one who looks on."""

    projections: Mapping[int, Projections]
    """Per full-attention layer, the record that its hooks fill before its keys go to the cache."""
    masks: MaskMemo
    """Attention masks, which forward passes share."""

    def run(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what the decoder's forward pass, `plain`, returns for these arguments."""
        return plain(*args, **kwargs)

    @abstractmethod
    def positions(self, tokens: Tensor) -> Tensor:
        """Return (1 or B, L) rotary positions for the pass over (B, L) ids, or (B, L, E) embeddings."""

    def view(self, layer_idx: int, query: Tensor, scaling: float) -> View | None:
        """Return what (B, N, L, D) queries of a layer attend to; None: the keys and values of this pass alone."""
        return None

    def attended(self, layer: Attended) -> None:  # noqa: B027, not all that look on care
        """Receive a full-attention layer's tensors right after its attention."""

    def finished(self, hidden: Tensor) -> None:  # noqa: B027
        """Take note that a forward pass is over; `hidden` is its (B, L, E) last hidden state."""


class LayerObserver(Observer):
    """An observer of a pass behind `seen` tokens: every layer's tensors go to `on_layer` as they appear."""

    def __init__(self, backbone: Backbone, on_layer: Callable[[Attended], None], seen: int = 0) -> None:
        self.projections = {index: Projections(backbone.shape(index)) for index in backbone.layers}
        self.masks = MaskMemo()
        self._on_layer, self._seen = on_layer, seen

    def positions(self, tokens: Tensor) -> Tensor:
        """Number the tokens from where those before them end."""
        return torch.arange(self._seen, self._seen + tokens.shape[1], device=tokens.device)[None]

    def attended(self, layer: Attended) -> None:
        """Hand it on."""
        self._on_layer(layer)


@dataclass
class _Instrument:
    """What is known of a model while somebody reads it."""

    layers: dict[nn.Module, int]
    """Index of every attention module."""
    full: frozenset[int]
    """Layers of full attention."""
    latents: dict[int, Latent]
    """Layers with latent attention."""
    lent: bool
    """Whether queries lend a number to decisions of DMS, which attention takes for 0."""
    flash: bool = False
    """Whether the backbone was loaded with flash-attn, which it goes on using where that has a form for the units."""
    bare: bool = False
    """Whether nobody else has put anything on the decoder that runs in Python, hooks or a forward of its own."""
    readers: int = 0
    exclusive: bool = False
    undo: ExitStack = field(default_factory=ExitStack)


class _Pass(NamedTuple):
    """A forward pass that is under way."""

    observer: Observer
    instrument: _Instrument


_INSTRUMENTS: WeakKeyDictionary[nn.Module, _Instrument] = WeakKeyDictionary()
_LOCK = RLock()
# The pass that runs in this thread, and the observer of passes without a cache.
_PASS: ContextVar[_Pass | None] = ContextVar("locret_pass", default=None)
_WATCHER: ContextVar[Observer | None] = ContextVar("locret_watcher", default=None)


@contextmanager
def instrumented(model: nn.Module, watcher: Observer | None = None) -> Iterator[None]:
    """Let the model's forward passes be observed until the block ends; blocks may be nested, and overlap in threads.

    `watcher` observes this thread's passes without a cache; a pass with a cache is observed by its `reader`.
    """
    decoder = find_decoder(model)
    with _LOCK:
        if (instrument := _INSTRUMENTS.get(decoder)) is None:
            instrument = _INSTRUMENTS[decoder] = _set_up(model, decoder)
        elif instrument.exclusive:
            raise ValueError(_BUSY)
        instrument.readers += 1
    outer = _WATCHER.get()
    _WATCHER.set(watcher or outer)
    try:
        yield
    finally:
        _WATCHER.set(outer)
        with _LOCK:
            instrument.readers -= 1
            if not instrument.readers:
                del _INSTRUMENTS[decoder]
                instrument.undo.close()
        hand_back_cores()


_BUSY = "this model is being read by another cache; finish that prefill or generate call first"


@contextmanager
def exclusively(model: nn.Module) -> Iterator[None]:
    """Keep every other reader away from a model until the block ends."""
    decoder = find_decoder(model)
    with _LOCK:
        if decoder in _INSTRUMENTS:
            raise ValueError(_BUSY)
        _INSTRUMENTS[decoder] = _Instrument({}, frozenset(), {}, lent=False, exclusive=True)
    try:
        yield
    finally:
        with _LOCK:
            del _INSTRUMENTS[decoder]


@contextmanager
def alone(model: nn.Module) -> Iterator[bool]:
    """Keep every other reader waiting until the block ends; yields whether there is none but the one who asks.

    A pass of nobody else would be recorded with one that is captured, but it must not draw random numbers meanwhile.
    Where something was put on the decoder that must run at every pass, nobody is alone.
    """
    with _LOCK:
        instrument = _INSTRUMENTS[find_decoder(model)]
        yield instrument.bare and instrument.readers == 1


@contextmanager
def attending_by(model: Any, name: str) -> Iterator[None]:
    """Let a model attend in another registered way until the block ends."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _set_up(model: nn.Module, decoder: Any) -> _Instrument:
    backbone, base, modules = describe(model), unwrap(model), attention_modules(model)
    full = frozenset(backbone.layers)
    attends = (FULL, SLIDING, BOTH)
    layers = {
        module: index
        for index, module in enumerate(modules)
        if backbone.kinds[index] in attends or backbone.borrows(index)
    }
    lent = lends_neuron(base)
    bare = not any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in decoder.modules())
    flash = base.config._attn_implementation == "flash_attention_2"
    instrument = _Instrument(layers, full, latents(model, modules), lent=lent, flash=flash, bare=bare)
    with ExitStack() as stack:
        for module, index in layers.items():
            if index in full:
                latent = instrument.latents.get(index)
                for source, hook in recorders(module, backbone.shape(index), _finder(index), latent):
                    _record(stack, source, hook)
                if lent:
                    stack.callback(query_source(module).register_forward_hook(_blanking(backbone.shape(index))).remove)
                for source, note in ((decoder.layers[index], "residual"), (module, "hidden")):
                    stack.enter_context(replaced(source, "forward", _noting(source.forward, note, _finder(index))))
        stack.enter_context(attending_by(base, NAME))
        stack.enter_context(replaced(decoder, "forward", _observed(decoder.forward, instrument)))
        stack.callback(decoder.register_forward_hook(_finish, with_kwargs=True).remove)
        stack.enter_context(_fixed_factors(base, decoder))
        for index, module in state_modules(model).items() if backbone.recurrent else ():
            stack.enter_context(replaced(module, "forward", stepping(module, module.forward, index)))
        instrument.undo = stack.pop_all()
    return instrument


def _observed(plain: Callable[..., Any], instrument: _Instrument) -> Callable[..., Any]:
    """Return a decoder's forward that the observer of the pass runs in its way."""

    @wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        tokens = kwargs.get("input_ids", args[0] if args else None)
        tokens = kwargs["inputs_embeds"] if tokens is None else tokens
        if (observer := _observer_of(kwargs)) is None:
            raise ValueError(
                "the backbone was called without this RetentionCache, as decoding with guidance_scale or an assistant "
                "model does; use sampling or beams"
            )
        # The observer's cache knows what is padding, so the mask that `generate` carries along is not needed.
        kwargs |= {"attention_mask": None, "position_ids": observer.positions(tokens)}
        if kwargs.get("logits_to_keep") is not None:  # layers without keys of their own would leave tokens out
            kwargs["logits_to_keep"] = 0
        outer = _PASS.get()
        try:
            _PASS.set(_Pass(observer, instrument))
            return observer.run(plain, *args, **kwargs)
        finally:
            _PASS.set(outer)

    return forward


def _observer_of(kwargs: Mapping[str, Any]) -> Observer | None:
    """Return who observes a pass of the decoder with these arguments."""
    cache = kwargs.get("past_key_values")
    return getattr(cache, "reader", None) if cache is not None else _WATCHER.get()


def _finish(_module: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Tell the observer of a pass that it is over: a hook of the decoder, after those of others that change it."""
    observer = _observer_of(kwargs)
    assert observer is not None
    observer.finished(output[0])


@contextmanager
def _fixed_factors(base: Any, decoder: Any) -> Iterator[None]:
    """Make a LongRoPE backbone use its long factors at every length, and keep its cache when it would change them."""
    with long_factors(decoder):
        if not uses_long_factors(decoder) or not hasattr(base, "prepare_inputs_for_generation"):
            yield
            return
        # Phi-3 drops its cache at the original context length.
        plain = MethodType(GenerationMixin.prepare_inputs_for_generation, base)
        with replaced(base, "prepare_inputs_for_generation", plain):
            yield


@contextmanager
def replaced(thing: Any, name: str, value: Any) -> Iterator[None]:
    """Give an object an attribute of its own until the block ends, and then what it had, its own or its class's."""
    own = vars(thing)
    before = own.get(name, _NOTHING)
    setattr(thing, name, value)
    try:
        yield
    finally:
        if before is _NOTHING:
            delattr(thing, name)
        else:
            setattr(thing, name, before)


def _finder(index: int) -> Callable[[], Projections | None]:
    def find() -> Projections | None:
        running = _PASS.get()
        return None if running is None else running.observer.projections.get(index)

    return find


def _record(stack: ExitStack, source: nn.Module, hook: Any) -> None:
    """Let a hook see what a module returns until the stack is closed."""
    if source._forward_hooks:  # those of others come first
        stack.callback(source.register_forward_hook(hook).remove)
        return
    plain = source.forward

    @wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        output = plain(*args, **kwargs)
        hook(source, args, output)
        return output

    stack.enter_context(replaced(source, "forward", forward))


def recorders(
    module: nn.Module, shape: LayerShape, find: Callable[[], Projections | None], latent: Latent | None = None
) -> list[tuple[nn.Module, Any]]:
    """Return which modules of an attention module to hook, and with what, to record its projections (or the norms).

    `find` says where to record what is computed now; None: nowhere.
    """
    if latent is not None:
        return _latent_recorders(module, latent, find)

    def record(name: str, heads: int, factor: float | None = None) -> Any:
        def hook(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if (projections := find()) is not None:
                output = output if factor is None else output * factor
                if output.ndim == 4:  # a norm runs before or after heads are moved in front of tokens
                    output = (output.transpose(1, 2) if _head_major(output, inputs[0], heads) else output).flatten(2)
                projections.parts[name] = output

        return hook

    if hasattr(module, FUSED):
        return [(getattr(module, FUSED), record(FUSED, 0))]
    found = []
    for name, heads in (("q", shape.num_heads), ("k", shape.num_kv_heads), ("v", shape.num_kv_heads)):
        names = (f"{name}_norm", f"{name}_layernorm", f"{name}_proj")
        source = next(n for n in names if getattr(module, n, None) is not None)
        # Falcon-H1 multiplies its keys before it rotates them.
        factor = getattr(module, "key_multiplier", None) if name == "k" else None
        found.append((getattr(module, source), record(name, heads, factor)))
    return found


def query_source(module: nn.Module) -> nn.Module:
    """Return what gives the queries that are rotated: the projection, or its norm."""
    if hasattr(module, FUSED):
        raise ValueError(f"the queries of {type(module).__name__} lend a number to DMS, but come with keys and values")
    found: nn.Module = next(one for name in _QUERIES if (one := getattr(module, name, None)) is not None)
    return found


def _blanking(shape: LayerShape) -> Any:
    """Return a hook that gives 0 for what queries lend, after others have seen it."""

    def hook(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        blank = output.clone()
        if blank.ndim == 3:
            query = blank.unflatten(-1, (shape.num_heads, -1))
        else:
            query = blank.transpose(1, 2) if _head_major(output, inputs[0], shape.num_heads) else blank
        query[:, :, :: shape.num_heads // shape.num_kv_heads, -1] = 0
        return blank

    return hook


def _noting(plain: Callable[..., Any], name: str, find: Callable[[], Projections | None]) -> Callable[..., Any]:
    """Return a forward that notes, under that name, the hidden states that a layer or its attention module is given."""

    @wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if (projections := find()) is not None:
            setattr(projections, name, args[0] if args else kwargs.get("hidden_states"))
        return plain(*args, **kwargs)

    return forward


def _latent_recorders(
    module: nn.Module, latent: Latent, find: Callable[[], Projections | None]
) -> list[tuple[nn.Module, Any]]:
    """Record queries of all heads, the un-rotated key that they share, and the latent as it is projected up."""

    def record(name: str, part: Callable[[Tensor, Tensor], Tensor]) -> Any:
        def hook(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            projections = find()
            # Longer is what a cache of transformers holds, which the module gets back from it.
            if projections is not None and name not in projections.parts:
                projections.parts[name] = part(inputs[0], output)

        return hook

    return [
        (query_projection(module), record("q", lambda _input, output: output)),
        (getattr(module, DOWN), record("k", lambda _input, output: latent.raw_key(output))),
        (getattr(module, UP), record("v", lambda given, _output: given.flatten(1, -2))),
    ]


def _head_major(output: Tensor, source: Tensor, heads: int) -> bool:
    if output.shape[1] == output.shape[2]:
        # As many tokens as heads: the strides of the norm's input tell which dimension is which.
        return source.stride(1) < source.stride(2)
    return output.shape[1] == heads


def locret_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Ask the observer what to attend to, attend, and tell it. The signature is that of a transformers attention."""
    if (running := _PASS.get()) is None or module not in running.instrument.layers:
        raise ValueError('attention "locret" works inside locret.prefill and locret.generate; choose "sdpa" elsewhere')
    if dropout:
        raise ValueError("attention with dropout is not supported; call model.eval() or use another model")
    observer, instrument = running.observer, running.instrument
    index = instrument.layers[module]
    full = index in instrument.full
    if attention_mask is not None or (full and not observer.projections[index].parts):
        raise ValueError(
            f"{type(module).__name__} masks what it attends to itself, or attends more than once, which is not "
            "supported; use another model"
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if (latent := instrument.latents.get(index)) is not None:
        query = latent.query(query)
    if full and instrument.lent:
        query = query.clone()
        query[:, :: query.shape[1] // key.shape[1], :, -1] = 0
    if (view := observer.view(index, query, scaling)) is None:
        view = View(key, value) if latent is None else own_view(latent, key, observer.projections[index].parts["v"])
    by_flash = instrument.flash and latent is None and flash_covers(view)
    out = (flash_attend if by_flash else attend)(
        query,
        view,
        scaling=scaling,
        memo=observer.masks,
        softcap=softcap,
        window=None if full else sliding_window,
        sinks=s_aux,
    )
    if full:
        projections = observer.projections[index]
        observer.attended(
            Attended(
                layer_idx=index,
                query=query,
                key=view.keys,
                value=view.values,
                scaling=scaling,
                softcap=softcap,
                learned_sinks=s_aux,
                projections=projections,
            )
        )
        projections.clear()
    if latent is not None:
        out = latent.output(out)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, locret_attention)
AttentionMaskInterface.register(NAME, lambda *_, **__: None)  # `attend` needs no (tokens x slots) mask
