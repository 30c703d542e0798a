"""Keys and values of many requests in one memory, and one forward pass over all of them.

A row holds one unit of every KV head of every layer, each in its cell. A request sees the rows of its context and those
of its own tokens, wherever they lie, so requests share a context by naming its rows. Where KV heads of a context hold
different numbers of units, it has the cells of as many rows as these take in all, one head's after another's. Only
public names of transformers are used: an attention function.
"""

# H query heads, K KV heads, L new tokens of all requests, S rows of one request, D head dim, V vocabulary

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from locret.backbone.adapters import describe, input_device, unwrap
from locret.backbone.attention import MaskMemo, View, attend, attention_weights, capped
from locret.engines.prefix import Prefix

NAME = "locret_rows"
_GATHERED = 1 << 13
"""Rows of their own that requests may have which attend together."""
_LOGITS = 1 << 16
"""Logits of each head that they may have."""


@dataclass(frozen=True, eq=False)
class Shared:
    """The units of a context in rows, for all requests about it."""

    rows: Tensor
    """(C,)"""
    end: int
    """The position of the token that follows."""
    counts: Sequence[Sequence[int]] = ()
    """Units of each layer's KV heads, where these hold different numbers."""

    def cells(self, layer: int, width: int) -> tuple[Tensor, ...]:
        """Return for each KV head of a layer the cells of its units, of so many in a row.

        They are computed at each use, because held they would take memory of which no plan knows.
        """
        counts = self.counts[layer]
        first = sum(map(sum, self.counts[:layer]))
        places = torch.arange(first, first + sum(counts), device=self.rows.device)
        return tuple((self.rows[places // width] * width + places % width).split(list(counts)))


@dataclass(frozen=True)
class Feed:
    """What a pass computes of one request."""

    ids: Sequence[int]
    own: Tensor
    """(S,) its own rows, those of these tokens at the end."""
    shared: Shared | None = None
    """What it sees before them."""
    last: bool = True
    """Whether the next token is wanted."""

    @property
    def end(self) -> int:
        """The position after these tokens."""
        return len(self.own) + (0 if self.shared is None else self.shared.end)


class Rows:
    """Rows for so many units, allocated once, and the passes of a model that works on them alone."""

    def __init__(self, model: nn.Module, count: int) -> None:
        self.model, self.device = model, input_device(model)
        backbone, dtype = describe(unwrap(model)), unwrap(model).dtype
        shape = (count, backbone.num_layers, backbone.num_kv_heads, backbone.head_dim)
        try:
            self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=self.device) for _ in range(2))
        except (RuntimeError, MemoryError) as error:  # CUDA's OutOfMemoryError is a RuntimeError
            raise ValueError(f"{count} units are more than the memory there is; give less ({error})") from error
        self.free = list(range(count))
        self.memo = MaskMemo()

    @property
    def width(self) -> int:
        """Cells of a row."""
        return self.keys.shape[1] * self.keys.shape[2]

    def take(self, count: int) -> list[int]:
        """Return rows that nobody else has."""
        taken = self.free[len(self.free) - count :]
        del self.free[len(self.free) - count :]
        return taken

    def index(self, rows: Sequence[int]) -> Tensor:
        """Return rows as a pass takes them."""
        return torch.tensor(rows, dtype=torch.long, device=self.device)

    def write(self, rows: Sequence[int], prefix: Prefix) -> Shared:
        """Write the units of a context into rows, and return how requests see them."""
        shared = Shared(self.index(rows), prefix.end, prefix.counts)
        for layer, (keys, values) in enumerate(zip(prefix.keys, prefix.values, strict=True)):
            held, places = [(self.keys[:, layer], keys), (self.values[:, layer], values)], shared.rows
            if prefix.counts:
                held = [(self.keys.flatten(0, 2), keys), (self.values.flatten(0, 2), values)]
                places = torch.cat(shared.cells(layer, self.width))
            for buffer, states in held:
                buffer.index_copy_(0, places, states.to(buffer))
        return shared

    @torch.no_grad()
    def run(self, feeds: Sequence[Feed]) -> Tensor:
        """Compute the new tokens of requests; return the logits (requests, V) of those that want the next one."""
        ids = [token for feed in feeds for token in feed.ids]
        places = [at for feed in feeds for at in range(feed.end - len(feed.ids), feed.end)]
        ends = torch.tensor([len(feed.ids) for feed in feeds]).cumsum(0) - 1
        wanted = ends[torch.tensor([feed.last for feed in feeds])].to(self.device)
        new = torch.cat([feed.own[len(feed.own) - len(feed.ids) :] for feed in feeds])
        token = _STEP.set(_Step(self, new, *_planned(feeds)))
        try:
            given = {"input_ids": self.index(ids)[None], "position_ids": self.index(places)[None]}
            out = self.model(**given, use_cache=False, logits_to_keep=wanted if len(wanted) else 1)
        finally:
            _STEP.reset(token)
        return out.logits[0, : len(wanted)].float()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Group:
    """R requests that feed one token each and begin with the same units."""

    tokens: Tensor
    """(R,) places of the tokens in the pass."""
    shared: Shared | None
    """What all of them begin with."""
    own: Tensor
    """(R, S) the rows of each."""
    there: Tensor
    """(R, S) False for what fills up the shorter ones."""


@dataclass(frozen=True)
class _Step:
    held: Rows
    new: Tensor
    """(L,) rows of the new tokens."""
    alone: Sequence[tuple[slice, Feed]]
    """Places of a request's tokens."""
    groups: Sequence[_Group]


_STEP: ContextVar[_Step] = ContextVar("locret_step")


def _planned(feeds: Sequence[Feed]) -> tuple[list[tuple[slice, Feed]], list[_Group]]:
    """Say who attends to what."""
    alone, groups, first = list[tuple[slice, Feed]](), list[_Group](), 0
    together = defaultdict[Shared | None, list[tuple[int, Feed]]](list)
    for feed in feeds:
        if len(feed.ids) == 1:
            together[feed.shared].append((first, feed))
        else:
            alone.append((slice(first, first + len(feed.ids)), feed))
        first += len(feed.ids)
    for one in together.values():
        for some in _alike(one):
            if len(some) == 1:
                alone += [(slice(at, at + 1), feed) for at, feed in some]
            else:
                groups.append(_grouped(some))
    return alone, groups


def _alike(feeds: list[tuple[int, Feed]]) -> Iterator[list[tuple[int, Feed]]]:
    """Split requests into groups of about equal length, so that what a pass gathers is bounded."""
    some: list[tuple[int, Feed]] = []
    for one in sorted(feeds, key=lambda one: one[1].end):
        count = len(some) + 1
        if some and (count * len(one[1].own) > _GATHERED or count * one[1].end > _LOGITS):
            yield some
            some = []
        some.append(one)
    yield some


def _grouped(feeds: list[tuple[int, Feed]]) -> _Group:
    rows = [feed.own for _, feed in feeds]
    # The shorter ones are filled up with a row of their own, because what is nobody's may be no number.
    own = torch.stack([torch.cat([one, one[:1].expand(len(rows[-1]) - len(one))]) for one in rows])
    lengths = torch.tensor([len(one) for one in rows], device=own.device)
    there = torch.arange(own.shape[1], device=own.device) < lengths[:, None]
    return _Group(torch.tensor([at for at, _ in feeds], device=own.device), feeds[0][1].shared, own, there)


def _view(held: Rows, layer: int, feed: Feed) -> View:
    """Return what the tokens of one request attend to in a layer."""
    if (shared := feed.shared) is None or not shared.counts:
        rows = feed.own if shared is None else torch.cat([shared.rows, feed.own])
        keys, values = (one[:, layer].index_select(0, rows).transpose(0, 1) for one in (held.keys, held.values))
        return View(keys[None], values[None])
    own = _cells(held, layer, feed.own)
    heads = [torch.cat(both) for both in zip(shared.cells(layer, held.width), own, strict=True)]
    segments = [[slice(start, end) for start, end in pairwise([0, *accumulate(map(len, heads))])]]
    cells = torch.cat(heads)
    keys, values = (one.flatten(0, 2).index_select(0, cells) for one in (held.keys, held.values))
    return View(keys[None, None], values[None, None], segments=segments)


def _cells(held: Rows, layer: int, rows: Tensor) -> list[Tensor]:
    """Return the cells of rows in a layer, for each KV head."""
    _, layers, kv_heads, _ = held.keys.shape
    return [(rows * layers + layer) * kv_heads + head for head in range(kv_heads)]


def _attend_together(query: Tensor, held: Rows, layer: int, group: _Group, **how: Any) -> Tensor:
    """Let the (H, R, D) queries of a group attend, head by head where these hold different numbers of units."""
    if (shared := group.shared) is None or not shared.counts:
        begins = group.own.new_empty(0) if shared is None else shared.rows
        return _by_products(query, held.keys[:, layer], held.values[:, layer], begins, group.own, group.there, **how)
    heads, sinks = shared.cells(layer, held.width), how.pop("sinks")
    shares = [None] * len(heads) if sinks is None else sinks.chunk(len(heads))
    keys, values = (one.flatten(0, 2)[:, None] for one in (held.keys, held.values))
    parts = zip(query.chunk(len(heads)), heads, _cells(held, layer, group.own), shares, strict=True)
    return torch.cat(
        [
            _by_products(asked, keys, values, cells, own, group.there, sinks=share, **how)
            for asked, cells, own, share in parts
        ]
    )


def _by_products(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    begins: Tensor,
    own: Tensor,
    there: Tensor,
    *,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Let (H, R, D) queries attend to places of (places, K, D) states; what all begin with is gathered once."""
    asked = query.transpose(0, 1).unflatten(1, (keys.shape[1], -1)).float()  # (R, K, H / K, D)
    own_keys, own_values = (rows.index_select(0, own.flatten()).float() for rows in (keys, values))
    own_keys, own_values = (rows.unflatten(0, own.shape).transpose(1, 2) for rows in (own_keys, own_values))
    shared_keys, shared_values = (rows.index_select(0, begins).float() for rows in (keys, values))
    logits = torch.cat([torch.einsum("rkgd,ckd->rkgc", asked, shared_keys), asked @ own_keys.mT], dim=-1) * scaling
    logits = capped(logits, softcap)
    logits[..., len(begins) :].masked_fill_(~there[:, None, None], -torch.inf)
    weights = attention_weights(logits, None if sinks is None else sinks.view(keys.shape[1], -1, 1))
    first, rest = weights.split([len(begins), own.shape[1]], dim=-1)
    out: Tensor = torch.einsum("rkgc,ckd->rkgd", first, shared_values) + rest @ own_values
    return out.flatten(1, 2).transpose(0, 1)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_kwargs: Any,
) -> tuple[Tensor, None]:
    """Let each request of a pass attend to its own rows, causally; called as an attention of transformers."""
    step, layer = _STEP.get(), int(module.layer_idx)  # type: ignore[arg-type]
    for rows, states in ((step.held.keys, key), (step.held.values, value)):
        rows[:, layer].index_copy_(0, step.new, states[0].transpose(0, 1))
    how: dict[str, Any] = {"scaling": query.shape[-1] ** -0.5 if scaling is None else scaling}
    how |= {"softcap": softcap, "sinks": s_aux}
    out = torch.empty_like(query)
    for span, feed in step.alone:
        out[:, :, span] = attend(query[:, :, span], _view(step.held, layer, feed), memo=step.held.memo, **how)
    for group in step.groups:
        asked = query[0, :, group.tokens]
        out[0, :, group.tokens] = _attend_together(asked, step.held, layer, group, **how).to(out)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, lambda *_args, **_kwargs: None)
