"""transformers' continuous batching, as far as contexts in pages need it: all its private names are in this file.

transformers schedules, pages and steps; this tells it which pages a request starts with, how the requests of a step
attend and which token each writes. All of it runs in the one thread that steps, but for `planned_bytes`.
"""

# H query heads, K KV heads, L new tokens of all requests, S slots of one request, D head dim, V vocabulary

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
)

from locret.backbone.adapters import Backbone, input_device
from locret.backbone.attention import MaskMemo, View, attend
from locret.backbone.learned_sinks import attention_weights

NAME = "locret_pages"
RANGE = "5.17 to 5.23"
_READS = 8
"""Slots that the requests of one step may read, as a multiple of those there are: many share the same pages."""
_GATHERED = 1 << 13
"""Slots of their own that requests may have which attend together."""
_LOGITS = 1 << 16
"""Logits of each head that they may have."""
_INPUTS = 7
"""Rows of whole numbers that transformers keeps for each token of a step."""
_CHECK = "locret-start"

Deliver = Callable[[str, Sequence[int], str | None, bool], None]
"""Called with a request's id, all tokens of its answer so far, what failed, and whether it is over."""
Choose = Callable[[Sequence[str], Tensor], Tensor]
"""Called with the ids of requests and their logits (requests, V); returns a token for each."""


@dataclass(frozen=True)
class Sizes:
    """What is allocated once."""

    pages: int
    """Pages for contexts and answers; each holds `page_size` units of all layers."""
    page_size: int
    max_batch_tokens: int
    """Tokens that one step feeds."""
    max_requests: int
    """Requests that one step serves."""

    @property
    def reads(self) -> int:
        """Slots that the requests of one step may read."""
        return _READS * self.pages * self.page_size

    @property
    def spare(self) -> int:
        """Pages that a request may take beyond what its tokens need."""
        return 1 if _old() else 0


@dataclass(frozen=True)
class Shared:
    """Pages of a context, and how many units they hold."""

    pages: list[int]
    units: int


def page_bytes(backbone: Backbone, dtype: torch.dtype, page_size: int) -> int:
    """Return the bytes of one page: keys and values of all layers for `page_size` tokens.

    Raises:
        ValueError: If the layers differ in shape, so that no page holds all of them.
    """
    shape = backbone.check_alike("paged memory")
    return backbone.num_layers * shape.num_kv_heads * shape.unit_dim * dtype.itemsize * page_size


def planned_bytes(backbone: Backbone, dtype: torch.dtype, sizes: Sizes) -> int:
    """Return the bytes of all that is allocated once: pages, two that transformers keeps for padding, and indices."""
    page = page_bytes(backbone, dtype, sizes.page_size)
    if _old():
        total = (sizes.pages + 2) * page
    else:
        sector = math.lcm(page, 128)
        total = (math.ceil(sizes.pages * page / sector) + 2) * sector
    tokens = sizes.max_batch_tokens
    columns = math.ceil((tokens + 1) / 32) * 32
    return total + 8 * (sizes.reads + tokens) + 8 * tokens + 4 * _INPUTS * columns + 4 * (tokens + 1)


def _old() -> bool:
    """Whether pages are those of 5.17, which 5.18 rebuilt."""
    return "page_size" not in ContinuousBatchingConfig.__dataclass_fields__


@contextmanager
def _named() -> Iterator[None]:
    """Say in one sentence that transformers has moved something."""
    try:
        yield
    except (AttributeError, ImportError, KeyError, TypeError) as error:
        raise RuntimeError(
            f"transformers {transformers.__version__} is not the continuous batching that contexts in pages are "
            f"written for ({error}); install transformers {RANGE}"
        ) from error


class ContinuousBatching:
    """Continuous batching over one model, with contexts as pages that requests share.

    Args:
        model: Answers with an attention of its own, so that no other thread may use it.
        sizes: What to allocate.
        deliver: Told of every new token.
        choose: Asked for every new token.

    Raises:
        ValueError: If there is not as much memory.
        RuntimeError: If this version of transformers has moved what is needed.
    """

    def __init__(self, model: PreTrainedModel, sizes: Sizes, deliver: Deliver, choose: Choose) -> None:
        self._model, self._sizes, self._deliver, self._choose = model, sizes, deliver, choose
        self._memo = MaskMemo()
        self._shared: dict[str, Shared] = {}
        self._unfinished_pages: set[str] = set()
        with _named():
            self._set_up()
            self._check()

    def _set_up(self) -> None:
        sizes, model = self._sizes, self._model
        options = ContinuousBatchingConfig(
            **{"block_size" if _old() else "page_size": sizes.page_size},
            num_blocks=sizes.pages,
            max_batch_tokens=sizes.max_batch_tokens,
            max_requests_per_batch=sizes.max_requests,
            max_blocks_per_request=0,
            max_memory_percent=1.0,
            # Pages are found by who asks, not by hashes of ids: nothing that a prompt says can reach a context's pages.
            allow_block_sharing=False,
            use_async_batching=False,
            use_cuda_graph=False,
            safety_margin=0.0,
        )
        greedy = GenerationConfig(do_sample=False, eos_token_id=-1)
        model.set_attn_implementation("paged|eager")  # what the manager accepts without looking for flash kernels
        self._manager = manager = model.init_continuous_batching(greedy, options)
        model.set_attn_implementation(NAME)
        manager.output_router = _Router(manager.output_router, self._delivered)
        try:
            self._processor = manager._create_batch_processor()
        except MemoryError as error:
            raise ValueError(f"{sizes.pages} pages are more than the memory there is; give less ({error})") from error
        self._inputs, self._cache = self._processor.inputs_and_outputs, self._processor.cache
        layers = range(model.config.get_text_config().num_hidden_layers)
        if _old():
            [self._tables] = self._cache.group_cache_managers
            places = [self._cache.layer_index_to_group_indices[layer][1] for layer in layers]
            self._rows = [(self._cache.key_cache[place], self._cache.value_cache[place]) for place in places]
            self._stride, self._cache.num_pages = sizes.page_size, sizes.reads
        else:
            [self._tables] = self._cache.cache_allocators.values()
            self._rows = [self._tables._kv_token_views[layer] for layer in layers]
            self._stride, self._cache.max_tokens_read = self._tables.block_physical_stride, sizes.reads
        width = sizes.reads + sizes.max_batch_tokens
        self._inputs.read_index_storage = torch.zeros(1, width, dtype=torch.int64, device=input_device(model))
        self._cache.use_prefix_sharing, self._cache.search_prefix_match = True, self._start
        self._free, self._cache.free_blocks = self._cache.free_blocks, self._give_back
        self._processor.model_runner._sample = self._sample

    def _check(self) -> None:
        """Answer a question of one token on a context of one unit, so that all names have been used once."""
        written: list[int] = []
        deliver, choose = self._deliver, self._choose
        self._deliver = lambda _id, tokens, error, _over: written.extend(tokens if error is None else ())
        self._choose = lambda _ids, logits: logits.argmax(-1)
        pages = self.take(1)
        self.add(_CHECK, [0, 0], 2, frozenset(), Shared(pages, 1))
        fed = []
        while self.step():
            fed += [one.query_length for one in self._inputs.requests_in_batch]
        self.give(pages)
        self._deliver, self._choose = deliver, choose
        if fed != [1, 1] or len(written) != 3 or self.free_pages != self._sizes.pages:  # told of the first one twice
            raise TypeError(f"2 tokens came as {written} by feeding {fed}, and {self.free_pages} pages are free")

    @property
    def counted_bytes(self) -> int:
        """Bytes of all that was allocated once, counted."""
        inputs, cache = self._inputs, self._cache
        pages = [*cache.key_cache, *cache.value_cache] if _old() else [cache.cache_tensor]
        indices = [inputs.read_index_storage, inputs.write_index_storage, inputs._bulk_input_tensor, inputs.output_ids]
        return sum(tensor.nbytes for tensor in (*pages, *indices, inputs.block_table))

    @property
    def free_pages(self) -> int:
        """Pages that nobody has."""
        if _old():
            return int(self._cache.get_num_free_blocks())
        pool = self._cache.pool
        return int(pool.count_free_blocks(self._tables.index) + pool.num_free_sectors * self._tables.blocks_per_sector)

    def take(self, count: int) -> list[int]:
        """Take pages out of what requests use."""
        if _old():
            taken = self._cache._block_manager.get_free_blocks(count, None, False, 0)
            assert taken is not None
            return list(taken)
        pool, index = self._cache.pool, self._tables.index
        while pool.count_free_blocks(index) < count:
            pool.allocate_sector(index)
        return list(pool.get_free_blocks(index, count))

    def give(self, pages: list[int]) -> None:
        """Let requests use pages again."""
        if _old():
            self._cache._block_manager.free_blocks(pages, shareable=False)
        else:
            self._cache.pool.free_blocks(self._tables.index, pages)

    def write(self, pages: Sequence[int], keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Write the units of a context, for each layer (U, K, D), into its pages."""
        size = self._sizes.page_size
        slots = [page * self._stride + offset for page in pages for offset in range(size)][: len(keys[0])]
        index = torch.tensor(slots, device=input_device(self._model))
        for (key_rows, value_rows), key, value in zip(self._rows, keys, values, strict=True):
            key_rows.index_copy_(0, index, key.to(key_rows))
            value_rows.index_copy_(0, index, value.to(value_rows))

    def add(self, request: str, ids: Sequence[int], new: int, end_ids: frozenset[int], shared: Shared | None) -> None:
        """Let the next steps answer; the ids of a context's units come first and are never fed."""
        if shared is not None:
            self._shared[request] = shared
        ends = sorted(end_ids) or [-1]
        self._manager.add_request(list(ids), request, max_new_tokens=new, streaming=True, eos_token_id=ends)

    def cancel(self, request: str) -> None:
        """Let the next step give back what a request has."""
        self._manager.cancel_request(request)

    def step(self) -> bool:
        """Feed the next tokens of as many requests as fit, and return whether there were any.

        What fails here leaves pages and requests in any state: call `close`.
        """
        if not self._processor.prepare_next_batch():
            return False
        self._fill_up()
        token = _STEP.set(self._planned())
        try:
            self._processor._generation_step(self._model)
        finally:
            _STEP.reset(token)
        self._processor.update_batch()
        return True

    def forget(self, request: str) -> None:
        """Forget the context of a request that has given back its pages."""
        self._shared.pop(request, None)
        self._unfinished_pages.discard(request)

    def close(self) -> None:
        """Give back all memory; requests that run are forgotten."""
        self.__dict__.clear()  # transformers' objects know this one, which must not know them any more

    def _delivered(self, output: Any) -> None:
        if over := output.is_finished():  # its pages were freed before
            self.forget(output.request_id)
        self._deliver(output.request_id, output.generated_tokens, output.error, over)

    def _start(self, request: str, _ids: list[int]) -> int:
        """Return how many of a request's first tokens are in pages; stands in for the search by hashes."""
        shared = self._shared.get(request)
        if shared is None:
            return 0
        whole, rest = divmod(shared.units, self._sizes.page_size)
        self._tables.block_table[request] = shared.pages[:whole]
        if rest:
            self._unfinished_pages.add(request)
        return shared.units

    def _give_back(self, request: str, *args: Any, **kwargs: Any) -> None:
        """Free the pages of a request, but not those of its context."""
        table = self._tables.block_table.get(request)
        if table is None:
            return
        if (shared := self._shared.get(request)) is not None:
            del table[: shared.units // self._sizes.page_size]
        self._free(request, *args, **kwargs)

    def _fill_up(self) -> None:
        """Copy the last units of contexts into the pages that new requests go on in."""
        source, target = [], []
        for one in self._inputs.requests_in_batch:
            if (request := one.state.request_id) in self._unfinished_pages:
                self._unfinished_pages.remove(request)
                shared = self._shared[request]
                whole = shared.units // self._sizes.page_size
                source.append(shared.pages[whole])
                target.append(self._tables.block_table[request][whole])
        if source and _old():
            self._cache.copy_cache(source, target)
        elif source:
            self._tables.copy_blocks(source, target)

    def _planned(self) -> _Step:
        """Say who attends to what in the step that has been prepared."""
        alone, together = [], defaultdict(list)
        first = read = 0
        for one in self._inputs.requests_in_batch:
            new, slots, shared = one.query_length, one.state.position_offset, self._shared.get(one.state.request_id)
            span = _Span(first, new, read, slots)
            if new == 1 and self._inputs.max_kv_read:
                lead = 0 if shared is None else shared.units - shared.units % self._sizes.page_size
                together[lead, id(shared) if lead else None].append(span)
            else:
                alone.append(span)
            first, read = first + new, read + slots
        groups = []
        for (lead, _), spans in together.items():
            for some in _alike(spans, lead):
                if len(some) == 1:
                    alone += some
                else:
                    groups.append(_grouped(self._inputs.read_index_storage[0], some, lead))
        return _Step(self._rows, alone, groups, self._memo)

    def _sample(self, scores: Tensor, output_ids: Tensor) -> None:
        """Write the next tokens, (1, rows, V) to (1 or 2, ...); stands in for one way of sampling for all requests."""
        requests = [one.state.request_id for one in self._inputs.requests_in_batch if one.has_new_token]
        if requests:
            output_ids[0, : len(requests)] = self._choose(requests, scores[0, : len(requests)])


class _Router:
    """Where transformers puts its results."""

    def __init__(self, theirs: Any, deliver: Callable[[Any], None]) -> None:
        self._theirs, self.deliver = theirs, deliver

    def deliver_batch(self, outputs: list[Any]) -> None:
        for output in outputs:
            self.deliver(output)

    def fail_and_deliver(self, state: Any, error: Exception) -> None:
        type(self._theirs).fail_and_deliver(self, state, error)


@dataclass(frozen=True)
class _Span:
    """A request in a step."""

    first: int
    """Its first token among those of the step."""
    new: int
    read: int
    """Where the index of what it sees begins."""
    slots: int
    """What it sees, its new tokens included."""


@dataclass(frozen=True)
class _Group:
    """R requests that feed one token each and begin with the same pages."""

    tokens: Tensor
    """(R,) places of the tokens in the step."""
    shared: Tensor
    """(C,) rows of the pages that all of them begin with."""
    own: Tensor
    """(R, S) rows of the rest of each."""
    there: Tensor
    """(R, S) False for what fills up the shorter ones."""


@dataclass(frozen=True)
class _Step:
    rows: Sequence[tuple[Tensor, Tensor]]
    """Per layer where keys and values of all pages are, (rows, K, D)."""
    alone: Sequence[_Span]
    groups: Sequence[_Group]
    memo: MaskMemo


def _alike(spans: list[_Span], lead: int) -> Iterator[list[_Span]]:
    """Split requests into groups of about equal length, so that what one step gathers is bounded."""
    some: list[_Span] = []
    for span in sorted(spans, key=lambda span: span.slots):
        count = len(some) + 1
        if some and (count * (span.slots - lead) > _GATHERED or count * span.slots > _LOGITS):
            yield some
            some = []
        some.append(span)
    yield some


def _grouped(index: Tensor, spans: list[_Span], lead: int) -> _Group:
    tokens, starts, lengths = (
        torch.tensor(column, device=index.device)
        for column in zip(*((span.first, span.read + lead, span.slots - lead) for span in spans), strict=True)
    )
    offsets = torch.arange(spans[-1].slots - lead, device=index.device)
    # The shorter ones are filled up with a row of their own, because what is nobody's may be no number.
    own = index[starts[:, None] + offsets.minimum(lengths[:, None] - 1)]
    return _Group(tokens, index[spans[0].read : spans[0].read + lead], own, offsets < lengths[:, None])


def _attend_together(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    group: _Group,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Let the tokens of a group attend, (H, R, D); pages that all begin with are gathered once.

    Args:
        query: (H, L, D), of which the group has R.
        keys: (rows, K, D).
        values: (rows, K, D).
        group: Who sees what.
        scaling: Factor of the logits.
        softcap: Bound of the logits.
        sinks: (H,) logits of learned sinks.
    """
    asked = query[:, group.tokens].transpose(0, 1).unflatten(1, (keys.shape[1], -1)).float()  # (R, K, H / K, D)
    own_keys, own_values = (rows.index_select(0, group.own.flatten()).float() for rows in (keys, values))
    own_keys, own_values = (rows.unflatten(0, group.own.shape).transpose(1, 2) for rows in (own_keys, own_values))
    shared_keys, shared_values = (rows.index_select(0, group.shared).float() for rows in (keys, values))
    logits = torch.cat([torch.einsum("rkgd,ckd->rkgc", asked, shared_keys), asked @ own_keys.mT], dim=-1) * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits[..., len(group.shared) :].masked_fill_(~group.there[:, None, None], -torch.inf)
    weights = attention_weights(logits, None if sinks is None else sinks.view(keys.shape[1], -1, 1))
    shared, own = weights.split([len(group.shared), group.own.shape[1]], dim=-1)
    out: Tensor = torch.einsum("rkgc,ckd->rkgd", shared, shared_values) + own @ own_values
    return out.flatten(1, 2).transpose(0, 1)


_STEP: ContextVar[_Step] = ContextVar("locret_step")


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    *,
    read_index: Sequence[Tensor],
    write_index: Sequence[Tensor],
    **_kwargs: Any,
) -> tuple[Tensor, None]:
    """Let each request of a step attend to its own slots, causally; no mask of all tokens against all slots exists.

    Args:
        module: Attention of a layer.
        query: (1, H, L, D), the requests one after the other.
        key: (1, K, L, D).
        value: (1, K, L, D).
        attention_mask: None.
        scaling: Factor of the logits.
        softcap: Bound of the logits.
        s_aux: (H,) logits of learned sinks.
        read_index: The rows that each request sees, one after the other; empty if they are the new tokens.
        write_index: The rows of the new tokens.
    """
    step = _STEP.get()
    keys, values = step.rows[int(module.layer_idx)]  # type: ignore[arg-type]
    new_keys, new_values = (states[0].transpose(0, 1) for states in (key, value))
    keys.index_copy_(0, write_index[0], new_keys)
    values.index_copy_(0, write_index[0], new_values)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    out, index = torch.empty_like(query), read_index[0]
    for one in step.alone:
        span = slice(one.first, one.first + one.new)
        if index.numel():
            seen = index[one.read : one.read + one.slots]
            own_keys, own_values = keys.index_select(0, seen), values.index_select(0, seen)
        else:
            own_keys, own_values = new_keys[span], new_values[span]
        view = View(own_keys.transpose(0, 1)[None], own_values.transpose(0, 1)[None])
        asking = query[:, :, span]
        out[:, :, span] = attend(asking, view, scaling=scaling, memo=step.memo, softcap=softcap, sinks=s_aux)
    for group in step.groups:
        out[0, :, group.tokens] = _attend_together(query[0], keys, values, group, scaling, softcap, s_aux).to(out)
    return out.transpose(1, 2).contiguous(), None


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    """Build no mask."""


AttentionInterface.register(NAME, paged_attention)
AttentionMaskInterface.register(NAME, _no_mask)
