"""The ways of reading a prompt that are measured, and what each plans: its forward passes and its bytes."""

from __future__ import annotations

import atexit
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin

from locret import RetainingHeads, RetentionCache, generate, prefill, scorers
from locret.backbone.attention import MaskMemo, View, attend
from locret.backbone.instrument import attending_by
from locret.backbone.shape import Backbone
from locret.base import method_spec
from locret.cache.limits import Limits, planned_bytes
from locret.conversation.head_shares import sharing
from locret.infer.methods import Method, find, names
from locret.policy.policy import RetentionPolicy
from locret.scorers import Scorer

if TYPE_CHECKING:
    from locret.infer.speed.measure import Bench

FLOOR, LLAMACPP = "floor", "llamacpp"


class Pass(NamedTuple):
    """One forward pass of a prompt."""

    tokens: int
    held: tuple[int, ...]
    """Units per KV head that each full-attention layer holds before it."""


class Held(NamedTuple):
    """Bytes of a cache: at its largest so far, of its second tier, and fetched from there."""

    cache: int
    host: int = 0
    moved: int = 0


@dataclass(frozen=True)
class Way(Method):
    """A method with a cache of ours, read and answered as any user would; greedy, with ids on the host at the end."""

    chosen: frozenset[str] = frozenset()
    """Names of the numbers of the policy that the user set."""

    def policy(self, policy: RetentionPolicy, chosen: Collection[str] = ()) -> RetentionPolicy:
        """Return the policy with what the method changes."""
        return super().policy(policy, self.chosen)

    def rating(self, heads: RetainingHeads | None = None) -> Scorer:
        """Return a scorer for one cache; as far as a plan goes, heads are like random scores."""
        if self.scorer is not None:
            return self.scorer
        return scorers.get("random") if heads is None else scorers.get("retaining_heads", heads=heads)

    def passes(self, backbone: Backbone, policy: RetentionPolicy, length: int) -> list[Pass]:
        """Return the forward passes of a prompt, and one without tokens for what is held when writing begins."""
        schedule = Limits.of(backbone, self.rating(), self.policy(policy)).plan(length)
        steps = (*schedule.steps, schedule.last)
        held = (schedule.held, *(step.kept for step in steps))
        return [*(Pass(step.tokens, tuple(units)) for step, units in zip(steps, held, strict=False)), Pass(0, held[-1])]

    def planned(self, backbone: Backbone, policy: RetentionPolicy, size: int, length: int, new_tokens: int) -> Held:
        """Return the bytes of the cache at its largest, for numbers of `size` bytes."""
        parts = backbone, self.rating(), self.policy(policy), size, length, new_tokens
        return Held(planned_bytes(*parts), planned_bytes(*parts, host=True))

    def read(self, bench: Bench, ids: Tensor) -> tuple[Any, Tensor]:
        """Read (1, N) ids of a prompt; return the cache and (1, vocabulary) logits of the last token."""
        scorer, policy = self.rating(bench.heads), self.policy(bench.plan.policy)
        if bench.tokenizer is not None:
            policy = sharing(policy, scorer, bench.model, bench.tokenizer, None)
        cache = RetentionCache(bench.model, scorer, policy)
        return cache, prefill(bench.model, ids, cache, new_tokens=bench.plan.options.new_tokens)

    def write(self, bench: Bench, cache: Any, ids: Tensor, first: Tensor) -> Tensor:
        """Return (1, new) ids after (1, 1) `first`, a forward pass each; a cache of ours begins with `first` again."""
        return generate(bench.model, cache=cache, max_new_tokens=bench.plan.options.new_tokens, do_sample=False)

    def held(self, cache: Any) -> Held:
        """Return the bytes of a cache, counted from its tensors."""
        memory = cache.memory()
        return Held(memory.peak, memory.host, memory.moved)


class Full(Way):
    """transformers' own cache and attention, fed chunk by chunk: every unit stays."""

    def policy(self, policy: RetentionPolicy, chosen: Collection[str] = ()) -> RetentionPolicy:
        return policy

    def passes(self, backbone: Backbone, policy: RetentionPolicy, length: int) -> list[Pass]:
        size, layers = policy.chunk_size, len(backbone.layers)
        before = [(start, min(size, length - start)) for start in range(0, length, size)]
        return [Pass(tokens, (start,) * layers) for start, tokens in [*before, (length, 0)]]

    def planned(self, backbone: Backbone, policy: RetentionPolicy, size: int, length: int, new_tokens: int) -> Held:
        short, numbers = min(length + new_tokens, (backbone.window or 1) - 1), 0
        for index, kind in enumerate(backbone.kinds):
            if kind not in ("recurrent", "none"):
                shape, units = backbone.shape(index), length + new_tokens if index in backbone.layers else short
                numbers += units * shape.num_kv_heads * shape.unit_dim
        return Held(size * numbers + backbone.state_bytes(size) // 2)

    @torch.no_grad()
    def read(self, bench: Bench, ids: Tensor) -> tuple[Any, Tensor]:
        cache = DynamicCache(config=bench.model.config)
        *before, last = ids.split(bench.plan.policy.chunk_size, dim=1)
        for tokens in before:
            bench.model.get_decoder()(input_ids=tokens, past_key_values=cache, use_cache=True)
        output = bench.model(input_ids=last, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return cache, output.logits[:, -1]

    def write(self, bench: Bench, cache: Any, ids: Tensor, first: Tensor) -> Tensor:
        ids, new = torch.cat([ids, first], dim=1), bench.plan.options.new_tokens
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "past_key_values": cache}
        return bench.model.generate(**given, max_new_tokens=new, do_sample=False)[:, ids.shape[1] :]

    def held(self, cache: Any) -> Held:
        tensors = [value for layer in cache.layers for value in vars(layer).values() if torch.is_tensor(value)]
        return Held(sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()))


_FLOOR_ATTENTION, _MEMO = "locret-floor", MaskMemo()


def _attention(
    _module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Any, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    return attend(query, View(key, value), scaling=scaling, memo=_MEMO).transpose(1, 2).contiguous(), None


AttentionInterface.register(_FLOOR_ATTENTION, _attention)
AttentionMaskInterface.register(_FLOOR_ATTENTION, lambda *_, **__: None)


class _StaticLayer(CacheLayerMixin):
    is_sliding = False

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity, self.fill = capacity, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        batch, heads, _, dim = key_states.shape
        self.keys = key_states.new_empty(batch, heads, self.capacity, dim)
        self.values = value_states.new_empty(batch, heads, self.capacity, dim)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, self.fill = self.fill, self.fill + key_states.shape[-2]
        self.keys[:, :, start : self.fill] = key_states
        self.values[:, :, start : self.fill] = value_states
        return self.keys[:, :, : self.fill], self.values[:, :, : self.fill]

    def get_seq_length(self) -> int:
        return self.fill

    def get_max_length(self) -> int:
        return self.capacity

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.fill + query_length, 0


def _slots(policy: RetentionPolicy, new_tokens: int) -> int:
    return policy.budget + max(policy.chunk_size, policy.local_len + new_tokens)


class Floor(Full):
    """The least that bounded reading costs: the same chunks against a static cache, no scores and no eviction.

    The engine's own attention kernel, keys rotated once, no hooks, no re-rotation: what remains between the two is the
    price of retention. The floor's answers mean nothing; its time does.
    """

    def passes(self, backbone: Backbone, policy: RetentionPolicy, length: int) -> list[Pass]:
        if not backbone.uniform or backbone.recurrent:
            raise ValueError(
                "--methods floor: some layers of this backbone slide over a window or carry a recurrent state, for "
                "which there is no floor; leave it out of --methods"
            )
        return Way.passes(self, backbone, policy, length)

    def planned(self, backbone: Backbone, policy: RetentionPolicy, size: int, length: int, new_tokens: int) -> Held:
        numbers = sum(shape.num_kv_heads * shape.unit_dim for shape in backbone.full_shapes)
        return Held(_slots(policy, new_tokens) * size * numbers)

    @torch.no_grad()
    def read(self, bench: Bench, ids: Tensor) -> tuple[Any, Tensor]:
        model, policy, end = bench.model, bench.plan.policy, max(0, ids.shape[1] - bench.plan.policy.local_len)
        slots = _slots(policy, bench.plan.options.new_tokens)
        layers = [_StaticLayer(slots) for _ in range(model.config.num_hidden_layers)]
        cache = Cache(layers=layers)
        with attending_by(model, _FLOOR_ATTENTION):
            for tokens in ids[:, :end].split(policy.chunk_size, dim=1) if end else ():
                model.get_decoder()(**_inputs(cache, tokens))
                for layer in layers:  # cut back, for free
                    layer.fill = min(layer.fill, policy.budget)
            return cache, model(**_inputs(cache, ids[:, end:]), logits_to_keep=1).logits[:, -1]

    def write(self, bench: Bench, cache: Any, ids: Tensor, first: Tensor) -> Tensor:
        # What the slots hold counts as read, whatever it is: positions go on from there.
        held = first.new_zeros(1, cache.get_seq_length())
        with attending_by(bench.model, _FLOOR_ATTENTION):
            return super().write(bench, cache, held, first)


def _inputs(cache: Cache, tokens: Tensor) -> dict[str, Any]:
    held = cache.get_seq_length()
    positions = torch.arange(held, held + tokens.shape[1], device=tokens.device)[None]
    return {"input_ids": tokens, "position_ids": positions, "past_key_values": cache, "use_cache": True}


@dataclass(frozen=True)
class LlamaCpp(Full):
    """llama.cpp, of the GGUF file that the backbone is loaded from: every unit stays, in float16."""

    file: str = ""

    def planned(self, backbone: Backbone, policy: RetentionPolicy, size: int, length: int, new_tokens: int) -> Held:
        return super().planned(backbone, policy, 2, length, new_tokens)

    def read(self, bench: Bench, ids: Tensor) -> tuple[Any, Tensor]:
        engine = _llamacpp(self.file, ids.shape[1] + bench.plan.options.new_tokens, bench.plan.policy.chunk_size)
        engine.reset()
        engine.eval(ids[0].tolist())
        return engine, self._logits(engine)

    def write(self, bench: Bench, cache: Any, ids: Tensor, first: Tensor) -> Tensor:
        new = [int(first)]
        for _ in range(bench.plan.options.new_tokens):
            cache.eval(new[-1:])
            new.append(int(self._logits(cache).argmax()))
        return torch.tensor([new[1:]])

    def held(self, cache: Any) -> Held:
        from llama_cpp import llama_state_seq_get_size  # an extra

        return Held(llama_state_seq_get_size(cache.ctx, 0))

    @staticmethod
    def _logits(engine: Any) -> Tensor:
        pointer = engine._ctx.get_logits()
        return torch.tensor([pointer[: engine.n_vocab()]])


@cache
def _llamacpp(file: str, tokens: int, batch: int) -> Any:
    """Return llama.cpp with room for so many tokens, made once for all rounds."""
    import llama_cpp  # an extra

    threads = torch.get_num_threads()
    same = {"n_threads": threads, "n_threads_batch": threads, "n_batch": batch, "n_ubatch": batch, "verbose": False}
    engine = llama_cpp.Llama(file, n_ctx=tokens, **same)
    atexit.register(engine.close)  # before the modules that it needs for that are gone
    return engine


def get(method: str, chosen: Collection[str] = (), gguf: str | None = None) -> Way:
    """Return the way that a text names, such as `snapkv:kernel=7+pyramid`; `gguf` is the backbone's file, if any."""
    spec = method_spec.parse(method, "--methods")
    if spec.name in (FLOOR, LLAMACPP):
        if unfit := [*spec.options, *(f"+{modifier.name}" for modifier in spec.modifiers)]:
            raise ValueError(f'--methods "{spec}": {spec.name} neither scores nor evicts; drop {unfit[0]}')
        if spec.name == FLOOR:
            return Floor(FLOOR, "the same chunks, without scores and eviction", plain=True)
        if gguf is None:
            raise ValueError(f"--methods {LLAMACPP} reads a GGUF file on this machine, which --model is to name")
        if find_spec("llama_cpp") is None:
            raise ValueError(f"--methods {LLAMACPP} needs llama-cpp-python; run pip install llama-cpp-python")
        return LlamaCpp(LLAMACPP, "llama.cpp", plain=True, file=gguf)
    found = find(spec, "--methods", [FLOOR, LLAMACPP, *names()])
    return (Full if found.plain else Way)(**vars(found), chosen=frozenset(chosen))
