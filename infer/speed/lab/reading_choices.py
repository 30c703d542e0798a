"""What the choices inside reading and writing are worth: each beside what was tried in its place, in the same rounds.

    python -m locret.infer.speed.lab.reading_choices --output infer/speed/records/reading_choices_cpu

chunk      one layer's attention of a chunk with one mask for the whole chunk, over a few rows at a time
token      one layer's attention of a new token with keys looked up per query head, over groups as rows of one product
scores     q, k, v and scores by one product, W1 [Wq; Wk; Wv] stacked under the projections, over one after the other
evict      kept units gathered number by number, or put into the evicted slots, over rows gathered through the workspace
ratings    sixteen generated tokens rated one at a time, over all at once

Random tensors of the given shape stand in for a layer's; nothing else runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from locret.backbone.attention import MaskMemo, attend
from locret.cache.layer import UNIT_TENSORS, RetentionLayer, Workspace
from locret.cache.unscored import MOST
from locret.cli import parse_options, run
from locret.infer.speed.lab.choices import LayerOptions, choices_page, measure_choices
from locret.infer.speed.side_by_side import write
from locret.policy.selectors import select_kept

_Sides = dict[str, Callable[[], Any]]
_USED = {
    "chunk": "a few rows at a time",
    "token": "groups as rows",
    "scores": "one after the other",
    "evict": "rows through the workspace",
    "ratings": "all at once",
}


@dataclass(frozen=True, kw_only=True)
class ChoiceOptions(LayerOptions):
    """The layer, what it holds, and how often."""

    hidden: int = 512
    """Width of the backbone."""
    budget: int = 1024
    """Units per KV head that stay."""
    chunk: int = 512
    """Tokens of a chunk."""
    repeats: int = 20
    """Rounds in which everything is measured once."""


def sides(options: ChoiceOptions) -> _Sides:
    """Return everything that is timed; what shares a name before the comma returns the same numbers."""
    return {**_attention(options), **_scores(options), **_evictions(options), **_ratings(options)}


def _attention(options: ChoiceOptions) -> _Sides:
    units, memo, scaling = options.budget + options.chunk, MaskMemo(), options.head_dim**-0.5
    query = torch.randn(1, options.heads, options.chunk, options.head_dim)
    key, value = torch.randn(2, 1, options.kv_heads, units, options.head_dim)

    def one_mask() -> Tensor:
        mask = memo.causal(options.chunk, units, None, query)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)

    def per_head() -> Tensor:
        return F.scaled_dot_product_attention(query[:, :, -1:], key, value, scale=scaling, enable_gqa=True)

    return {
        "chunk": lambda: attend(query, key, value, scaling=scaling, memo=memo),
        "chunk, one mask": one_mask,
        "token": _often(lambda: attend(query[:, :, -1:], key, value, scaling=scaling, memo=memo)),
        "token, per query head": _often(per_head),
    }


def _scores(options: ChoiceOptions) -> _Sides:
    widths = [count * options.head_dim for count in (options.heads, options.kv_heads, options.kv_heads)]
    hidden = torch.randn(1, options.chunk, options.hidden)
    projections = [torch.randn(width, options.hidden) * options.hidden**-0.5 for width in widths]
    head = options.fresh_head()
    stacked = torch.cat([*projections, head.fc1.weight.detach() @ torch.cat(projections)])

    @torch.no_grad()
    def one_after_the_other() -> list[Tensor]:
        parts = [F.linear(hidden, weight) for weight in projections]
        return [*parts, head(torch.cat(parts, dim=-1))]

    @torch.no_grad()
    def at_once() -> list[Tensor]:
        *parts, inner = F.linear(hidden, stacked).split([*widths, options.hidden_dim], dim=-1)
        return [*parts, head.fc2(head.activation(inner))]

    return {"scores": one_after_the_other, "scores, stacked": at_once}


def _evictions(options: ChoiceOptions, times: int = 16) -> _Sides:
    units, budget = options.budget + options.chunk, options.budget
    layer = RetentionLayer(rotary=None, workspace=Workspace(), compact=False)  # type: ignore[arg-type]  # nothing is rotated
    layer.reserve(units)
    keys, values = torch.randn(2, 1, options.kv_heads, units, options.head_dim)
    layer.lazy_initialization(keys, values)
    full = {
        "keys": keys,
        "values": values,
        "scores": torch.rand(1, options.kv_heads, units),
        "positions": torch.arange(units, dtype=torch.int32).expand(1, options.kv_heads, units),
    }
    for name in UNIT_TENSORS:
        getattr(layer, name).copy_(full[name])

    def refill() -> None:
        # Which units are kept must be the same in every round; what the other buffers hold does not change the time.
        layer.scores.copy_(full["scores"])
        layer.fill = units

    def rows() -> RetentionLayer:
        refill()
        layer.evict(budget, 0)
        return layer

    def number_by_number() -> RetentionLayer:
        refill()
        kept = select_kept(layer.scores, budget)
        for name in UNIT_TENSORS:
            held = getattr(layer, name)
            index = kept if held.ndim == 3 else kept[..., None].expand(*kept.shape, held.shape[-1])
            held[:, :, :budget] = held.gather(2, index)
        layer.fill = budget
        return layer

    def into_the_holes() -> RetentionLayer:
        refill()
        kept = torch.zeros(layer.scores.shape, dtype=torch.bool).scatter_(2, select_kept(layer.scores, budget), True)
        # As many slots become free among the first as units stay behind them; heads differ, so all move `moved` slots,
        # the surplus onto themselves.
        moved = min(options.chunk, budget)
        holes = kept[..., :budget].int().argsort(dim=-1, stable=True)[..., :moved]
        found, last = kept[..., budget:].int().sort(dim=-1, descending=True, stable=True)
        source = torch.where(found[..., :moved] > 0, last[..., :moved] + budget, holes)
        for name in UNIT_TENSORS:
            held = getattr(layer, name)
            flat = held.view(-1, *held.shape[3:])
            first = torch.arange(options.kv_heads)[:, None] * units
            flat.index_copy_(0, (holes[0] + first).flatten(), flat.index_select(0, (source[0] + first).flatten()))
        layer.fill = budget
        return layer

    return {
        "evict": _often(rows, times),
        "evict, number by number": _often(number_by_number, times),
        "evict, into the evicted slots": _often(into_the_holes, times),
    }


def _ratings(options: ChoiceOptions) -> _Sides:
    head = options.fresh_head()
    features = torch.randn(1, MOST, head.fc1.in_features)

    @torch.no_grad()
    def at_once() -> Tensor:
        scores: Tensor = head(features)
        return scores

    @torch.no_grad()
    def one_by_one() -> Tensor:
        return torch.cat([head(features[:, token : token + 1]) for token in range(MOST)], dim=1)

    return {"ratings": _often(at_once), "ratings, one at a time": _often(one_by_one)}


def _often(side: Callable[[], Any], times: int = 16) -> Callable[[], Any]:
    """Return a side that does the same several times: so short a one would find what the one before it has read."""

    def repeated() -> Any:
        for _ in range(times - 1):
            side()
        return side()

    return repeated


def command(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write the record if asked to."""
    description = "Measure what the choices inside reading and writing are worth."
    (options,), _ = parse_options("reading_choices", description, [ChoiceOptions], argv)
    torch.manual_seed(0)
    record = measure_choices(sides(options), _USED, options)
    title = "What choices inside reading and writing are worth"
    write(record, choices_page(record, title, "locret.infer.speed.lab.reading_choices"), options.output)
    return 0


if __name__ == "__main__":
    run(command)
