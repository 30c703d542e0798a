"""OmniKV: a few filter layers choose the tokens that the layers after them attend to.

Paper:     OmniKV (ICLR 2025), sections 4.1, 4.2 and D.10, Algorithm 1; "raw" as in its released code.
Formula:   S_j = sum_t alpha_t max_h A[h, t, j], A the softmax over all that the window's query t sees, h any head; one
           set of tokens for all heads, and for all layers up to the next filter layer. alpha is 1 (uniform),
           2^(t - w) (exp), or 0 but for the last query (last). The answer's first token is that of a dense pass.
Dense:     layers before the first filter layer, filter layers, and the layer after each; their units stay in fast
           memory.
Deviates:  candidates are what lies in the second tier, so the newest tokens of the prompt that the fast tier keeps, two
           at least, are visible anyway; logits are those before a backbone's own soft cap and learned sinks; window
           queries have their own positions, where the released code gives all the newest one's.
Cost:      one product with all keys of a filter layer per token; sparse layers move the chosen units alone.
"""

# B batch, N query heads, K KV heads, W queries of the window, H units of the tier, T positions of the text, R recalled

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from locret.backbone.head_ranks import HeadRanks
from locret.base.fields import Range
from locret.lookups.base import WHOLE, Ask, Keys, Lookup, logits_of

PUBLISHED: Mapping[int, tuple[int, ...]] = MappingProxyType({32: (2, 8, 18), 48: (6, 11, 30), 80: (4, 19, 41)})
"""Filter layers by number of layers: Llama-3-8B-262K, Yi-9B-200K, Llama-3.1-70B."""
_SHALLOW = 16
_SCORES, _CHOSEN = "omnikv scores", "omnikv chosen"
_ANY = 1 << 30
"""Units to recall where a share of the text says how many."""
_TERMS = 1 << 24
"""Logits that exist at once, over all heads."""


def default_filters(layers: int) -> tuple[int, ...]:
    """Return the published filter layers; scaled from Llama-3-8B's for other depths.

    Of fewer than 16 layers three filter layers would leave next to none that is sparse: the middle one is taken alone.
    """
    if layers in PUBLISHED:
        return PUBLISHED[layers]
    if layers < _SHALLOW:
        return (layers * 8 // 32,)
    return tuple(round(layer * layers / 32) for layer in PUBLISHED[32])


def dense_layers(filters: Sequence[int], layers: int) -> list[int]:
    """Return the layers that attend to everything."""
    return sorted({*range(filters[0]), *filters, *(layer + 1 for layer in filters if layer + 1 < layers)})


@dataclass(frozen=True, kw_only=True)
class OmniKVLookup(Lookup):
    """Recall the tokens that a filter layer chose for the layers after it (OmniKV)."""

    name: ClassVar[str] = "omnikv"
    over_ranks: ClassVar[bool] = True
    reading: ClassVar[bool] = True
    ranges = {"selector": ("uniform", "exp", "last", "raw"), "window": Range(1), "prefill": Range(0)}

    filter_layers: str | int | None = None
    """Full-attention layers that choose, such as 2-8-18; none: those of the paper for 32, 48 and 80 layers, scaled for
    other depths."""
    selector: str = "last"
    """How queries of the window weigh: "last", "exp" or "uniform"; "raw" is last by logits without softmax, as in the
    released code."""
    window: int = 16
    """Queries of the observation window, from which uniform and exp look (w, 16)."""
    tokens: int | float | None = None
    """Units that sparse layers attend to: a number, or a share of the text (0.067); none: as many as recall says."""
    prefill: int = 0
    """Read sparsely too: each chunk attends to this many times as many older tokens as it has (OmniKV-prefill's r, 1 to
    8), chosen by all its queries alike; 0 reads densely."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window != type(self).window and not self._looks_back:
            self.refuse(
                f'window={self.window} is what uniform and exp look from, but selector="{self.selector}" looks from '
                "the newest query alone; leave window out, or take one of those"
            )
        if self.tokens is not None and (self.tokens <= 0 or (isinstance(self.tokens, float) and self.tokens > 1)):
            self.refuse(f"tokens={self.tokens} is neither a number of units nor a share of the text, up to 1.0")
        if self.filter_layers is not None:
            parts = str(self.filter_layers).split("-")
            numbers = [int(part) for part in parts if part.isascii() and part.isdigit()]
            if len(numbers) != len(parts) or sorted(set(numbers)) != numbers:
                self.refuse(f"filter_layers={self.filter_layers} are not layers in ascending order; write 2-8-18")

    def filters(self, layers: int) -> tuple[int, ...]:
        """Return the filter layers of a backbone."""
        if self.filter_layers is None:
            return default_filters(layers)
        return tuple(map(int, str(self.filter_layers).split("-")))

    def asked(self) -> int | None:
        """See `Lookup`; a share of the text follows from it."""
        return self._recalled(self.tokens) if isinstance(self.tokens, int) else None

    def resident(self, nth: int, layers: int) -> bool:
        filters = self.filters(layers)
        named, dense = "-".join(map(str, filters)), dense_layers(filters, layers)
        if filters[-1] >= layers:
            self.refuse(f"filter_layers={named} names layers that a backbone of {layers} does not have; lower them")
        if len(dense) == layers:
            self.refuse(f"filter_layers={named} leave no sparse layer of {layers}; choose lower or fewer ones")
        return nth in dense

    def remembers(self, nth: int, layers: int) -> int:
        """Return the window of a filter layer; "last" and "raw" look from the newest query alone."""
        return self.window if self._looks_back and nth in self.filters(layers) else 0

    def as_method(self) -> dict[str, Any]:
        """See `Lookup`; sparse layers hold next to nothing of the prompt."""
        recall = _ANY if isinstance(self.tokens, float) else self._recalled(self.tokens or 2048)
        return {**WHOLE, "local_len": self.window if self._looks_back else 1, "recall": recall}

    @property
    def _looks_back(self) -> bool:
        return self.selector in ("uniform", "exp")

    def _recalled(self, tokens: int) -> int:
        """Return how many units are recalled, of those that are visible: the window's own tokens count among them."""
        return max(1, tokens - self.window) if self._looks_back else tokens

    def _count(self, ask: Ask) -> int:
        units = ask.keys.shape[2]
        count = ask.count
        if isinstance(self.tokens, float):
            count = min(count, max(1, int(self.tokens * units)))
        return count if _answers(ask) else min(units, max(count, self.prefill * ask.query.shape[2]))

    def index(self, keys: Keys, positions: Tensor) -> bool:
        """Return whether all heads hold the same tokens."""
        return bool((positions == positions[:, :1]).all())

    def choose(self, ask: Ask) -> Tensor | None:
        """See `Lookup`; ranks are (B, 1, 1, R), or (B, K, 1, R) where heads hold different tokens."""
        if not _answers(ask) and not self.prefill:
            return None
        filters = self.filters(ask.layers)
        if ask.nth in filters:
            ask.shared[_SCORES] = self._scores(ask)
            ask.shared.pop(_CHOSEN, None)
        if ask.nth in dense_layers(filters, ask.layers) or _SCORES not in ask.shared:
            return None
        positions = _positions(ask)
        of, ranks = ask.shared.get(_CHOSEN, (None, None))
        if of is None or of.shape != positions.shape or not torch.equal(of, positions.to(of.device)):
            ranks = self._best(ask.shared[_SCORES].to(positions.device), positions, self._count(ask))
            ask.shared[_CHOSEN] = positions, ranks
        return ranks.to(positions.device)  # type: ignore[no-any-return]

    def _scores(self, ask: Ask) -> Tensor:
        """Return (B, T) scores of the text's tokens; -inf for those that are no candidates."""
        query, positions, answers = ask.query, _positions(ask), _answers(ask)
        if answers:
            query = ask.window if self._looks_back else ask.query[:, :, -1:]
        length, units = query.shape[2], ask.keys.shape[2]
        weights = torch.ones(length, device=ask.keys.device)
        if answers and self.selector == "exp":
            weights = 2.0 ** torch.arange(-length, 0, device=ask.keys.device)
        grouped = query.to(ask.keys.device).unflatten(1, (ask.keys.shape[1], -1))
        rows = max(1, _TERMS // (query.shape[0] * query.shape[1] * units))
        total: Tensor | float = 0.0
        for start in range(0, length, rows):
            block = grouped[:, :, :, start : start + rows].flatten(2, 3)
            logits = logits_of(block, ask.keys).float() * ask.scaling
            logits = logits.masked_fill((ask.positions < 0)[:, :, None], -torch.inf)
            shares = logits
            if self.selector != "raw" or not answers:
                steps = torch.arange(start, min(start + rows, length), device=block.device)
                near = _near_logits(ask, block, steps - length + 1)
                shares = (logits - torch.cat([logits, near], dim=-1).logsumexp(-1, keepdim=True)).exp()
            shares = shares.unflatten(2, (grouped.shape[2], -1)).amax(2)  # (B, K, W, H)
            total = total + _by_token(shares, positions, weights[start : start + rows], ask.ranks)
        assert isinstance(total, Tensor)
        return total

    def _best(self, scores: Tensor, positions: Tensor, count: int) -> Tensor:
        """Return the (B, heads, 1, count) ranks of the best tokens among those that each head holds, ascending."""
        last = scores.shape[1] - 1
        found = scores[:, None].expand(-1, positions.shape[1], -1).gather(2, positions.clamp(0, last).long())
        found = found.masked_fill((positions < 0) | (positions > last), -torch.inf)
        return found.topk(count, dim=-1).indices.sort(dim=-1).values[:, :, None]


def _answers(ask: Ask) -> bool:
    """Return whether a query follows the prompt: its last token belongs to it, whoever feeds it."""
    return ask.generating and not ask.fed


def _near_logits(ask: Ask, query: Tensor, later: Tensor) -> Tensor:
    """Return (B, K, G * R, S) logits of what (B, K, G * R, D) queries see of the fast tier.

    Args:
        ask: What is asked.
        query: R queries of each query head of a group.
        later: (R,) how many tokens each query is behind the newest one, as 0 or a negative number.
    """
    keys = ask.near.keys.to(query.device)
    logits = (query @ keys.transpose(-1, -2)).float() * ask.scaling
    slots = torch.arange(keys.shape[2], device=query.device)
    unseen = (slots >= slots.shape[0] + later[:, None]).repeat(query.shape[2] // len(later), 1)
    if ask.near.row_start is not None:
        unseen = unseen | (slots < ask.near.row_start.to(query.device)[:, None, None, None])
    return logits.masked_fill(unseen, -torch.inf)


def _positions(ask: Ask) -> Tensor:
    """Return (B, K or 1, H) positions: one row of them where all heads hold the same tokens, none elsewhere."""
    return ask.positions[:, :1] if ask.index and ask.ranks is None else ask.positions


def _by_token(shares: Tensor, positions: Tensor, weights: Tensor, ranks: HeadRanks | None) -> Tensor:
    """Return (B, T): the largest share of any head, weighed and summed over queries."""
    last = positions.max()
    if positions.shape[1] == 1 and ranks is None:  # alike for all heads, so weighed before they are put in their places
        shares = (shares.amax(1, keepdim=True) * weights[:, None]).sum(2, keepdim=True)
        weights = weights.new_ones(1)
    tokens = int(last if ranks is None else ranks.largest(last)) + 1
    where = torch.where(positions < 0, tokens, positions).long()  # what is no token goes behind the last
    table = shares.new_full((len(shares), shares.shape[2], tokens + 1), -torch.inf)
    for head in range(shares.shape[1]):
        own = where[:, head, None].expand(-1, shares.shape[2], -1)
        table.scatter_reduce_(2, own, shares[:, head], "amax")
    if ranks is not None:
        table = ranks.largest(table)
    return (table[..., :tokens] * weights[:, None]).sum(1)
