"""Keys and values of many requests in one memory, and one forward pass over all of them.

A row holds one unit of all KV heads. A request sees the rows of its context and those of its own tokens, wherever they
lie, so requests share a context by naming its rows. Only public names of transformers are used: an attention function.
"""

# H query heads, K KV heads, L new tokens of all requests, S rows of one request, D head dim, V vocabulary

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from locret.backbone.adapters import describe, input_device, unwrap
from locret.backbone.attention import MaskMemo, View, attend, attention_weights, capped

NAME = "locret_rows"
_GATHERED = 1 << 13
"""Rows of their own that requests may have which attend together."""
_LOGITS = 1 << 16
"""Logits of each head that they may have."""


@dataclass(frozen=True)
class Feed:
    """What a pass computes of one request."""

    ids: Sequence[int]
    rows: Tensor
    """(S,) what it sees, the rows of these tokens at the end."""
    shared: int = 0
    """How many of the first rows it shares with all requests of its context."""
    last: bool = True
    """Whether the next token is wanted."""


class Rows:
    """Rows for so many units, allocated once, and the passes of a model that works on them alone."""

    def __init__(self, model: nn.Module, count: int) -> None:
        self.model, self.device = model, input_device(model)
        backbone, dtype = describe(unwrap(model)), unwrap(model).dtype
        shape = (count, backbone.num_kv_heads, backbone.head_dim)
        try:
            self.layers = [
                (
                    torch.zeros(shape, dtype=dtype, device=self.device),
                    torch.zeros(shape, dtype=dtype, device=self.device),
                )
                for _ in range(backbone.num_layers)
            ]
        except (RuntimeError, MemoryError) as error:  # CUDA's OutOfMemoryError is a RuntimeError
            raise ValueError(f"{count} units are more than the memory there is; give less ({error})") from error
        self.free = list(range(count))
        self._memo = MaskMemo()

    def take(self, count: int) -> list[int]:
        """Return rows that nobody else has."""
        taken = self.free[len(self.free) - count :]
        del self.free[len(self.free) - count :]
        return taken

    def index(self, rows: Sequence[int]) -> Tensor:
        """Return rows as a pass takes them."""
        return torch.tensor(rows, dtype=torch.long, device=self.device)

    def write(self, rows: Sequence[int], keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Write units, for each layer (U, K, D), into rows."""
        index = self.index(rows)
        for (all_keys, all_values), key, value in zip(self.layers, keys, values, strict=True):
            all_keys.index_copy_(0, index, key.to(all_keys))
            all_values.index_copy_(0, index, value.to(all_values))

    @torch.no_grad()
    def run(self, feeds: Sequence[Feed]) -> Tensor:
        """Compute the new tokens of requests; return the logits (requests, V) of those that want the next one."""
        ids = [token for feed in feeds for token in feed.ids]
        places = [at for feed in feeds for at in range(len(feed.rows) - len(feed.ids), len(feed.rows))]
        ends = torch.tensor([len(feed.ids) for feed in feeds]).cumsum(0) - 1
        wanted = ends[torch.tensor([feed.last for feed in feeds])].to(self.device)
        new = torch.cat([feed.rows[len(feed.rows) - len(feed.ids) :] for feed in feeds])
        token = _STEP.set(_Step(self.layers, new, *_planned(feeds), self._memo))
        try:
            given = {"input_ids": self.index(ids)[None], "position_ids": self.index(places)[None]}
            out = self.model(**given, use_cache=False, logits_to_keep=wanted if len(wanted) else 1)
        finally:
            _STEP.reset(token)
        return out.logits[0, : len(wanted)].float()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Group:
    """R requests that feed one token each and begin with the same rows."""

    tokens: Tensor
    """(R,) places of the tokens in the pass."""
    shared: Tensor
    """(C,) rows that all of them begin with."""
    own: Tensor
    """(R, S) the rest of each."""
    there: Tensor
    """(R, S) False for what fills up the shorter ones."""


@dataclass(frozen=True)
class _Step:
    layers: Sequence[tuple[Tensor, Tensor]]
    new: Tensor
    """(L,) rows of the new tokens."""
    alone: Sequence[tuple[slice, Tensor]]
    """Tokens of a request, and the rows that it sees."""
    groups: Sequence[_Group]
    memo: MaskMemo


_STEP: ContextVar[_Step] = ContextVar("locret_step")


def _planned(feeds: Sequence[Feed]) -> tuple[list[tuple[slice, Tensor]], list[_Group]]:
    """Say who attends to what."""
    alone, groups, first = list[tuple[slice, Tensor]](), list[_Group](), 0
    together = defaultdict[int, list[tuple[int, Feed]]](list)
    for feed in feeds:
        if len(feed.ids) == 1:
            together[int(feed.rows[0]) if feed.shared else -1].append((first, feed))
        else:
            alone.append((slice(first, first + len(feed.ids)), feed.rows))
        first += len(feed.ids)
    for one in together.values():
        for some in _alike(one):
            if len(some) == 1:
                alone += [(slice(at, at + 1), feed.rows) for at, feed in some]
            else:
                groups.append(_grouped(some))
    return alone, groups


def _alike(feeds: list[tuple[int, Feed]]) -> Iterator[list[tuple[int, Feed]]]:
    """Split requests into groups of about equal length, so that what a pass gathers is bounded."""
    some: list[tuple[int, Feed]] = []
    for one in sorted(feeds, key=lambda one: len(one[1].rows)):
        count, slots = len(some) + 1, len(one[1].rows)
        if some and (count * (slots - one[1].shared) > _GATHERED or count * slots > _LOGITS):
            yield some
            some = []
        some.append(one)
    yield some


def _grouped(feeds: list[tuple[int, Feed]]) -> _Group:
    lead, rows = feeds[0][1].shared, [feed.rows[feed.shared :] for _, feed in feeds]
    # The shorter ones are filled up with a row of their own, because what is nobody's may be no number.
    own = torch.stack([torch.cat([one, one[:1].expand(len(rows[-1]) - len(one))]) for one in rows])
    lengths = torch.tensor([len(one) for one in rows], device=own.device)
    there = torch.arange(own.shape[1], device=own.device) < lengths[:, None]
    return _Group(torch.tensor([at for at, _ in feeds], device=own.device), feeds[0][1].rows[:lead], own, there)


def _attend_together(
    query: Tensor, keys: Tensor, values: Tensor, group: _Group, scaling: float, softcap: Any, sinks: Tensor | None
) -> Tensor:
    """Let the tokens of a group, of (H, L, D) queries, attend, (H, R, D); what all begin with is gathered once."""
    asked = query[:, group.tokens].transpose(0, 1).unflatten(1, (keys.shape[1], -1)).float()  # (R, K, H / K, D)
    own_keys, own_values = (rows.index_select(0, group.own.flatten()).float() for rows in (keys, values))
    own_keys, own_values = (rows.unflatten(0, group.own.shape).transpose(1, 2) for rows in (own_keys, own_values))
    shared_keys, shared_values = (rows.index_select(0, group.shared).float() for rows in (keys, values))
    logits = torch.cat([torch.einsum("rkgd,ckd->rkgc", asked, shared_keys), asked @ own_keys.mT], dim=-1) * scaling
    logits = capped(logits, softcap)
    logits[..., len(group.shared) :].masked_fill_(~group.there[:, None, None], -torch.inf)
    weights = attention_weights(logits, None if sinks is None else sinks.view(keys.shape[1], -1, 1))
    shared, own = weights.split([len(group.shared), group.own.shape[1]], dim=-1)
    out: Tensor = torch.einsum("rkgc,ckd->rkgd", shared, shared_values) + own @ own_values
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
    step = _STEP.get()
    keys, values = step.layers[int(module.layer_idx)]  # type: ignore[arg-type]
    for rows, states in ((keys, key), (values, value)):
        rows.index_copy_(0, step.new, states[0].transpose(0, 1))
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = torch.empty_like(query)
    for span, own in step.alone:
        seen_keys, seen_values = (rows.index_select(0, own).transpose(0, 1)[None] for rows in (keys, values))
        options: dict[str, Any] = {"scaling": scaling, "memo": step.memo, "softcap": softcap, "sinks": s_aux}
        out[:, :, span] = attend(query[:, :, span], View(seen_keys, seen_values), **options)
    for group in step.groups:
        out[0, :, group.tokens] = _attend_together(query[0], keys, values, group, scaling, softcap, s_aux).to(out)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, lambda *_args, **_kwargs: None)
