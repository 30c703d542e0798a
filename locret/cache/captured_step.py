"""Generation by captured steps: on CUDA the pass of one token is a graph of kernels that is replayed for the others.

As written, a step starts dozens of small kernels per layer from Python, which takes the host longer than the device
needs to run them. A graph starts them all at once, but reads and writes the same memory every time: so a step attends
to all slots that were reserved, those that no token has reached masked. Nothing is evicted meanwhile. Features wait in
the workspace and are rated outside the graph.
"""

# B batch, K KV heads, N query heads, G query heads of a KV head, S slots, D head dim

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache as remembered
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from locret.backbone.adapters import find_decoder, lends_neuron, unwrap
from locret.backbone.attention import View, attention_weights, by_kv_head, capped
from locret.backbone.chunk import Attended
from locret.backbone.instrument import alone, instrumented
from locret.backbone.passes import gathering_root
from locret.base.warned import warn_user
from locret.cache.cache import RetentionCache
from locret.cache.ragged import RaggedStore
from locret.cache.reader import Reader
from locret.cache.store import DenseStore, Slots
from locret.scorers import FeatureScorer

DEVICES = ("cuda",)
"""Where steps are captured."""
LEAST = 8
"""Tokens that an answer may have at least: a capture takes as long as three to six tokens as written (H100)."""
PIECES = 8
"""Pieces of the slots whose values are summed up side by side: with 8 KV heads of 128 dimensions an H100 is full."""
_ELSEWHERE = "the decoder is not on one CUDA device"
_FAILED: WeakSet[nn.Module] = WeakSet()
"""Decoders whose step could not be captured."""


def obstacle(
    model: nn.Module, cache: RetentionCache, config: GenerationConfig, new_tokens: int, copies: int
) -> str | None:
    """Return why an answer of at most `new_tokens` is written by steps as written; None: they may be captured."""
    base, decoder, backbone, policy = unwrap(model), find_decoder(model), cache.backbone, cache.policy
    if next(decoder.parameters()).device.type not in DEVICES:
        return _ELSEWHERE
    places = {tensor.device for tensor in (*decoder.parameters(), *decoder.buffers())}
    stores = [type(layer.store) for layer in cache.governed]
    hidden = config.output_hidden_states or getattr(base.config, "output_hidden_states", False)
    own = backbone.uniform and not (backbone.recurrent or backbone.sources or lends_neuron(model))
    obstacles = (
        (len(places) != 1, _ELSEWHERE),
        (decoder in _FAILED, "it has failed before"),
        (cache.ranks is not None or gathering_root(model) is not None, "processes share the backbone"),
        (new_tokens < LEAST, f"an answer of {new_tokens} tokens is shorter than a capture, or its length is unknown"),
        (copies > 1, "beams or answers change places between steps"),
        (hidden, "hidden states of every step are asked for"),
        (
            cache.watch is not None or not isinstance(cache.scorer, FeatureScorer) or cache.scorer.columns,
            "every step's attention is looked at",
        ),
        (not own, "not all layers attend to units of their own, and to all of them"),
        (any(shape.latent for shape in backbone.full_shapes), "layers hold latents"),
        (policy.decode_budget is not None or policy.recall, "units go or come at every step"),
        (not cache.seen or not {*stores} <= {DenseStore, RaggedStore}, "there are no slots of its own for every unit"),
    )
    return next((why for met, why in obstacles if met), None)


@contextmanager
def capturing(model: nn.Module, cache: RetentionCache, new_tokens: int) -> Iterator[Reader]:
    """Do what `answering` does, for `new_tokens` steps at most, which are captured as soon as nobody else reads."""
    reader = CapturingReader(cache, new_tokens)
    with instrumented(model), cache.read_by(reader):
        try:
            yield reader
        finally:
            reader.release()


class CapturingReader(Reader):
    """A reader whose steps are replayed; those before the capture, and all where it fails, are as written."""

    def __init__(self, cache: RetentionCache, new_tokens: int) -> None:
        super().__init__(cache, answering=True)
        self._left = new_tokens
        self.static = False
        """Whether passes go over the slots that were opened."""
        self._slots: list[Slots] = []
        self._given: dict[str, Tensor] = {}
        self._replay: Callable[[], Any] | None = None

    def run(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        ids, decoder = kwargs.get("input_ids"), self.cache.decoder
        if args or ids is None or ids.shape[1] != 1:
            if self.static:
                raise ValueError("a captured step takes one token; call locret.generate again for what is longer")
            return plain(*args, **kwargs)
        if self._replay is None and self._left and decoder not in _FAILED:
            with alone(self.cache.model) as nobody_else:
                if nobody_else:
                    self._capture(plain, kwargs, decoder)
        if self._replay is None:
            return plain(**kwargs)
        assert self._positions is not None
        self._unit_positions.copy_(self._positions)
        for name, tensor in self._given.items():
            tensor.copy_(kwargs[name])
        return self._replay()

    def _capture(self, plain: Callable[..., Any], kwargs: dict[str, Any], decoder: nn.Module) -> None:
        self.rate_waiting()
        try:
            self._open()
            self._given = {name: value.clone() for name, value in kwargs.items() if isinstance(value, Tensor)}
            given, self.static = {**kwargs, **self._given}, True
            self._replay = capture(lambda: plain(**given), kwargs["input_ids"].device)
        except Exception as error:  # whatever it is, the answer goes on
            self.release()
            _FAILED.add(decoder)
            warn_user(
                f"the step of one token could not be captured ({' '.join(str(error).split())[:200]}); answers are "
                "right, and written at the speed of steps as written"
            )

    def _open(self) -> None:
        """Open a slot for every token to come."""
        assert self._positions is not None
        self._slots = [store.open_slots(self._left) for store in self._stores()]
        like = self._slots[0].keys
        self._rooms, self._count = self.waiting.rooms(like.dtype, least=1), 0
        self._waiting = torch.zeros(1, dtype=torch.int64, device=like.device)
        self._unit_positions = self._positions.expand(*self._slots[0].places.shape, 1).clone()
        self._moving = [self._waiting, *(index for slots in self._slots for index in (slots.places, slots.openings))]

    def _stores(self) -> list[DenseStore | RaggedStore]:
        return [layer.store for layer in self.layers if isinstance(layer.store, (DenseStore, RaggedStore))]

    def release(self) -> None:
        """Free the graph and its memory."""
        self.static, self._replay, self._given, self._slots, self._moving = False, None, {}, [], []

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> None:
        if not self.static:
            super().update(keys, values, layer_idx)
            return
        slots = self._slots[self._nth[layer_idx]]
        places = slots.places.flatten()
        given = (keys, values, self._unit_positions[..., None])
        for buffer, units in zip(slots.flat, given, strict=True):
            buffer.index_copy_(0, places, units.flatten(0, 2).view(len(places), *buffer.shape[1:]))
        slots.mask.view(-1).index_fill_(0, slots.openings, 0)

    def view(self, layer_idx: int, query: Tensor, scaling: float) -> View:
        if not self.static:
            return super().view(layer_idx, query, scaling)
        slots = self._slots[self._nth[layer_idx]]

        def attention(
            query: Tensor, view: View, scaling: float, softcap: float | None, sinks: Tensor | None = None
        ) -> Tensor:
            kv_heads = slots.places.shape[1]
            return attend_slots(query, view.keys, view.values, slots.mask, kv_heads, scaling, softcap, sinks)

        return View(slots.keys, slots.values, sparse=attention)

    def attended(self, layer: Attended) -> None:
        if not self.static:
            super().attended(layer)
            return
        features = layer.projections.features(self.cache.features)
        self._rooms[self._nth[layer.layer_idx]].index_copy_(1, self._waiting, features)

    def finished(self, hidden: Tensor) -> None:
        """See `Reader`; then move on to the next slot."""
        self._left -= 1
        if self.static:
            self._count += 1
            for store in self._stores():
                store.advance()
            self.waiting.hold(self._rooms, self._count)
        super().finished(hidden)
        if self.static and self._left:
            torch._foreach_add_(self._moving, 1)
            if self._count == self._rooms[0].shape[1]:
                self.rate_waiting()
                self._count = 0
                self._waiting.zero_()


def capture(step: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """Return what replays the kernels that a step starts, and returns the tensors into which it wrote."""
    stream, graph = _stream(device), torch.cuda.CUDAGraph()
    # The outer stream is restored even where the end of a capture fails.
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device)):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()  # sets up what is set up once; the same slots are written again
        torch.cuda.current_stream().wait_stream(stream)
        # Other threads may allocate memory meanwhile.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            out = step()

    def replay() -> Any:
        graph.replay()
        return out

    return replay


@remembered
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream of captures: a stream more is a workspace of cuBLAS more."""
    return torch.cuda.Stream(device)


def attend_slots(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    kv_heads: int,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend from one token, (B, N, 1, D), to the slots that a mask leaves, (B or 1, K or 1, 1, S) of 0 or -inf.

    Keys and values are (B, K, S, D); or (B, 1, S, D), the slots of all heads back to back.
    """
    batch, heads, _, dim = query.shape
    # No kernel of PyTorch for masked attention splits the slots of one token; products of matrices do.
    logits = query.reshape(batch, key.shape[1], -1, dim) @ key.transpose(-1, -2)
    logits = capped(logits.view(batch, kv_heads, heads // kv_heads, -1).float() * scaling, softcap)
    sinks = by_kv_head(sinks, kv_heads)
    weights = attention_weights(logits + mask, None if sinks is None else sinks[..., 0])
    out = weighed(weights.view(batch, key.shape[1], -1, weights.shape[-1]), value)
    return out.reshape(batch, heads, 1, value.shape[-1])


def weighed(weights: Tensor, value: Tensor) -> Tensor:
    """Return the product of weights (B, K, G, S), in float32, and values (B, K, S, D), in the values' dtype.

    A product with G rows walks the slots one after another, in as many places at once as there are KV heads. Here every
    eighth slot is a piece of its own: eight slots side by side are one row of a wider matrix, so that one product finds
    the sums of all pieces, (8 G, 8 D), of which those on the diagonal are wanted. Values are read once, in place.
    """
    batch, kv_heads, group, slots = weights.shape
    rows, dim = slots // PIECES, value.shape[-1]
    if not rows:
        return weights.to(value.dtype) @ value
    even = rows * PIECES
    pieces = weights[..., :even].unflatten(-1, (rows, PIECES)).permute(0, 1, 4, 2, 3)
    pieces = pieces.to(value.dtype, memory_format=torch.contiguous_format).flatten(2, 3)
    sums = pieces @ value[:, :, :even].reshape(batch, kv_heads, rows, PIECES * dim)
    out: Tensor = sums.view(batch, kv_heads, PIECES, group, PIECES, dim).diagonal(dim1=2, dim2=4).sum(-1)
    return out if even == slots else out + weights[..., even:].to(value.dtype) @ value[:, :, even:]
