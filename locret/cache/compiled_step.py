"""Generation by a compiled step: one token through the backbone as one program over buffers of fixed size.

As written, a step starts dozens of small kernels per layer from Python; `torch.compile` fuses them, and on CUDA replays
them as a graph. That needs buffers that stay where they are, so a step attends to all slots that were reserved, the
empty ones masked. Nothing is evicted meanwhile. Features wait in the workspace and are rated outside the program.
"""

# B batch, K KV heads, N query heads, S slots, D head dim

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache

from locret.backbone.adapters import Backbone, attention_modules, describe, find_decoder, lends_neuron, unwrap
from locret.backbone.chunk import PROJECTIONS, Projections
from locret.backbone.instrument import exclusively, fixed_factors, recorders, replaced
from locret.backbone.learned_sinks import attention_weights, by_kv_head
from locret.cache.cache import RetentionCache
from locret.cache.reader import Reader
from locret.cache.store import DenseStore
from locret.policy.policy import RetentionPolicy
from locret.scorers import Scorer

NAME = "locret-step"
PIECES = 8
"""Pieces of the slots whose values are summed up side by side: with 8 KV heads of 128 dimensions an H100 is full."""
_HOOK = -1
"""Key of our hooks: PyTorch counts from 0. A program is found again only if its hooks are where they were."""


class Step(Cache):
    """The cache as a compiled step sees it: whole buffers, and the slot that the coming token takes."""

    def __init__(self, reader: Reader, projections: list[Projections], new_tokens: int) -> None:
        super().__init__(layers=[])
        cache, fill = reader.cache, reader.layers[0].fill
        self.reader, self.projections = reader, projections
        self.stores = [layer.store for layer in reader.layers]
        # Slots behind the units are opened as zeros: masked slots count nothing, unless they hold NaN.
        opened = [store.open_slots(new_tokens) for store in self.stores if isinstance(store, DenseStore)]
        self.keys, self.values, self.unit_positions = ([slots[i] for slots in opened] for i in range(3))
        batch, kv_heads, slots = self.keys[0].shape[:3]
        device, dtype = self.keys[0].device, self.keys[0].dtype
        self.rooms = reader.waiting.rooms(dtype, least=1)
        self.slot = torch.tensor([fill], device=device)
        self.waiting = torch.zeros(1, dtype=torch.int64, device=device)
        self.unit_position = torch.full((batch, kv_heads, 1), cache.seen, dtype=torch.int32, device=device)
        self.mask = torch.full((1, 1, 1, slots), -torch.inf, dtype=dtype, device=device)
        self.mask[..., : fill + 1] = 0
        # A graph that writes into buffers is replayed only if they stay; what it only reads need not be copied then.
        buffers = (*self.keys, *self.values, *self.unit_positions, *self.rooms)
        for buffer in (*buffers, self.slot, self.waiting, self.unit_position, self.mask):
            torch._dynamo.mark_static_address(buffer)
        self._count, self._left = 0, slots - fill

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Put the token's unit into its slot, and its features where they wait; return all slots."""
        self.keys[layer_idx].index_copy_(2, self.slot, key_states)
        self.values[layer_idx].index_copy_(2, self.slot, value_states)
        self.unit_positions[layer_idx].index_copy_(2, self.slot, self.unit_position)
        self.rooms[layer_idx].index_copy_(1, self.waiting, self.projections[layer_idx].features())
        self.projections[layer_idx].clear()
        return self.keys[layer_idx], self.values[layer_idx]

    def advance(self, hidden: Tensor) -> None:
        """Tell the reader about the token, and move on to the next slot."""
        self._count, self._left = self._count + 1, self._left - 1
        for store in self.stores:
            assert isinstance(store, DenseStore)
            store.advance()
        self.reader.waiting.hold(self.rooms, self._count)
        self.reader.finished(hidden)
        if self._count == self.rooms[0].shape[1]:
            self.reader.rate_waiting()
            self._count = 0
        if self._left:
            self.slot += 1
            self.unit_position += 1
            self.waiting.fill_(self._count)
            self.mask.index_fill_(-1, self.slot, 0)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Not counted here: positions are given."""
        return 0


def attend_slots(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_options: Any,
) -> tuple[Tensor, None]:
    """Attend from one token to all slots, (B, K, S, D), that the mask (1, 1, 1, S) leaves; a transformers attention."""
    batch, heads, _, dim = query.shape
    scaling = dim**-0.5 if scaling is None else scaling
    grouped = query.reshape(batch, key.shape[1], heads // key.shape[1], dim)
    if softcap is None and s_aux is None and not query.is_cuda:
        out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    else:
        # No kernel of PyTorch for masked attention splits the slots of one token; products of matrices do.
        logits = (grouped @ key.transpose(-1, -2)).float() * scaling
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        sinks = by_kv_head(s_aux, key.shape[1])
        sinks = None if sinks is None else sinks[..., 0]
        out = weighed(attention_weights(logits + attention_mask, sinks), value)
    return out.reshape(batch, 1, heads, value.shape[-1]), None


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
    out = sums.view(batch, kv_heads, PIECES, group, PIECES, dim).diagonal(dim1=2, dim2=4).sum(-1)
    return out if even == slots else out + weights[..., even:].to(value.dtype) @ value[:, :, even:]


AttentionInterface.register(NAME, attend_slots)
AttentionMaskInterface.register(NAME, lambda *_, **__: None)


def obstacle(
    backbone: Backbone, scorer: Scorer | type[Scorer], policy: RetentionPolicy, held: Collection[int]
) -> str | None:
    """Return why no step over layers that hold so many units each can be compiled; None if one can."""
    if backbone.recurrent:
        return f"layers of {backbone.model_type} carry a recurrent state"
    if backbone.sources:
        return f"layers of {backbone.model_type} attend to the units of earlier ones"
    if not backbone.uniform:
        return f"layers of {backbone.model_type} slide over a window"
    if any(shape.latent for shape in backbone.full_shapes):
        return f"layers of {backbone.model_type} hold latents"
    if any(shape.num_kv_heads != backbone.num_kv_heads for shape in backbone.full_shapes):
        return f"layers of {backbone.model_type} have different numbers of KV heads"
    if not scorer.by_features:
        return f"scorer {scorer.name} looks at every step's attention; retaining heads do not"
    if scorer.columns:
        return f"scorer {scorer.name} keeps columns of its own"
    if policy.head_budgets != "uniform" or len(set(held)) > 1:
        return "layers or heads hold different numbers of units"
    if policy.recall:
        return f"recall={policy.recall} looks up units of the second tier at every step"
    if not policy.exact_bits:
        return f"units are held in codes (key_bits={policy.key_bits}, value_bits={policy.value_bits})"
    if policy.decode_budget is not None:
        return f"decode_budget={policy.decode_budget} evicts while an answer is written"
    return None


def check_can_compile(cache: RetentionCache, new_tokens: int, copies: int) -> None:
    """Refuse what a compiled step cannot do.

    Raises:
        ValueError: Saying why, and what to change.
    """
    reason = obstacle(cache.backbone, cache.scorer, cache.policy, [layer.fill for layer in cache.governed])
    if reason is None and cache.held_back and not cache.seen:
        reason = "nothing precedes the prompt's only token"
    elif reason is None and (source := cache.scorer.feature_source(cache.prepared)) != PROJECTIONS:
        reason = f"scorer {cache.scorer.name} reads {source} states, which a compiled step does not hand out"
    elif reason is None and lends_neuron(cache.model):
        reason = "queries lend a number to DMS"
    elif reason is None and not new_tokens:
        reason = "room must be made for the whole answer, but max_new_tokens is not given"
    elif reason is None and copies > 1:
        reason = f"{copies} beams or answers change places between steps"
    elif reason is None and cache.pad is not None:
        reason = "rows of the batch differ in length"
    if reason is not None:
        raise ValueError(f"generation cannot be compiled here: {reason}; leave out compile")


@contextmanager
def compiled_steps(model: nn.Module, cache: RetentionCache, new_tokens: int, backend: Any) -> Iterator[None]:
    """Let `generate` run `new_tokens` compiled steps at most until the block ends.

    Raises:
        ValueError: If the model is being read, or this machine cannot compile.
    """
    base, decoder = unwrap(model), find_decoder(model)
    implementation = base.config._attn_implementation
    records = _records(model, decoder)
    with ExitStack() as stack:
        stack.enter_context(exclusively(model))
        reader = stack.enter_context(cache.read_by(Reader(cache, answering=True)))
        for module, hook in records.hooks:
            module._forward_hooks[_HOOK] = hook
            stack.callback(module._forward_hooks.pop, _HOOK, None)
        base.set_attn_implementation(NAME)
        stack.callback(base.set_attn_implementation, implementation)
        stack.enter_context(fixed_factors(base, decoder))
        forward = _forward(decoder, Step(reader, records.projections, new_tokens), backend)
        stack.enter_context(replaced(decoder, "forward", forward))
        yield


def _forward(decoder: Any, step: Step, backend: Any) -> Callable[..., Any]:
    cache = step.reader.cache
    program = _program(type(decoder).forward, backend, cuda=step.mask.is_cuda)

    def forward(input_ids: Tensor, past_key_values: Any = None, **_: Any) -> Any:
        if past_key_values is not cache or input_ids.shape[1] != 1:
            raise ValueError("a compiled step takes one token and this RetentionCache; leave out compile")
        positions = step.reader.positions(input_ids)
        try:
            out = program(
                decoder, input_ids=input_ids, attention_mask=step.mask, position_ids=positions, past_key_values=step,
                use_cache=True,
            )  # fmt: skip
        except torch._dynamo.exc.BackendCompilerFailed as error:
            reason = str(error.inner_exception).strip().splitlines()[0]
            raise ValueError(f"this machine cannot compile a step ({reason}); leave out compile") from error
        out.past_key_values = cache
        step.advance(out.last_hidden_state)
        return out

    return forward


_PROGRAMS: dict[tuple[Any, Any, bool], Any] = {}


def _program(forward: Any, backend: Any, *, cuda: bool) -> Any:
    key = (forward, backend, cuda)
    if key not in _PROGRAMS:
        # "reduce-overhead" replays a CUDA graph; backends other than inductor know no modes.
        mode = "reduce-overhead" if cuda and backend == "inductor" else None
        _PROGRAMS[key] = torch.compile(forward, backend=backend, mode=mode)
    return _PROGRAMS[key]


class _Records:
    """Projections of all layers and the hooks that fill them, the same at every call: programs refer to them."""

    def __init__(self, model: nn.Module) -> None:
        backbone = describe(model)
        self.projections = [Projections(backbone.shape(index)) for index in range(backbone.num_layers)]
        modules = attention_modules(model)
        self.hooks = [
            found
            for module, projections in zip(modules, self.projections, strict=True)
            for found in recorders(module, projections.shape, _always(projections))
        ]


def _always(projections: Projections) -> Callable[[], Projections]:
    return lambda: projections


_RECORDS: WeakKeyDictionary[nn.Module, _Records] = WeakKeyDictionary()


def _records(model: nn.Module, decoder: nn.Module) -> _Records:
    if decoder not in _RECORDS:
        _RECORDS[decoder] = _Records(model)
    return _RECORDS[decoder]
