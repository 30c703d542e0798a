"""What a lookup is: options, an index of the second tier's keys, and which of its units each query attends to."""

# B batch, N query heads, K KV heads, L queries, H units of the second tier, R recalled units, D head dim

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from locret.backbone.attention import View
from locret.backbone.head_ranks import HeadRanks
from locret.base.registry import Chosen

DECODED = 4096
"""Units whose keys are decoded at once, where a tier holds codes."""


@dataclass(frozen=True)
class KeysInSpans:
    """Keys of a tier that holds codes: states only while they are looked at."""

    shape: tuple[int, ...]
    """B, K, H, D."""
    device: torch.device
    """Where the tier is."""
    span: Callable[[slice], Tensor]
    """Returns the (B, K, units, D) keys of neighbouring units."""


@dataclass(frozen=True)
class KeysOfHeads:
    """Keys of a tier whose KV heads hold different numbers of units."""

    shape: tuple[int, ...]
    """B, K, H of the head that holds the most, D."""
    device: torch.device
    heads: tuple[tuple[Tensor, ...], ...]
    """(units, D) of each row and KV head; the last unit of each has rank H - 1."""


Keys = Tensor | KeysInSpans | KeysOfHeads
"""(B, K, H, D) of the second tier."""


def blocks(keys: Keys, multiple: int = 1, first: int = 0) -> Iterator[tuple[slice, Tensor]]:
    """Yield spans of units from `first` on that are looked at together, and their keys.

    States come at once, codes a few thousand at a time, and always whole multiples of a page but for the last.
    """
    assert not isinstance(keys, KeysOfHeads)  # which lookups that are not `uneven` never see
    units = keys.shape[2]
    size = max(1, DECODED // multiple) * multiple if isinstance(keys, KeysInSpans) else units
    for start in range(first, units, size):
        span = slice(start, min(start + size, units))
        yield span, keys.span(span) if isinstance(keys, KeysInSpans) else keys[:, :, span]


def logits_of(query: Tensor, keys: Keys) -> Tensor:
    """Return the products (B, K, Q, H) of (B, K, Q, D) queries with all keys."""
    found = [query @ part.transpose(-1, -2) for _, part in blocks(keys)]
    return found[0] if len(found) == 1 else torch.cat(found, dim=-1)


WHOLE = {"when": "chunk", "positions": "original", "budget": 1, "stabilizers": 0, "local_len": 1, "host_budget": "all"}
"""The policy of papers that keep all of a prompt, in its original positions, and read it densely.

What a chunk evicts, the next chunk recalls, so that fast memory holds a chunk and the dense layers.
"""


@dataclass(slots=True, kw_only=True)  # not frozen, which takes longer to make: there is one per layer and token
class Ask:
    """What queries of one layer ask of its second tier."""

    query: Tensor
    """(B, N, L, D), post-rotary."""
    window: Tensor
    """(B, N, W, D) the newest queries, those of `query` last, as many as the lookup wants; zeros before the first."""
    near: View
    """What the queries see of the fast tier, their own units last."""
    keys: Keys
    """(B, K, H, D) of the second tier, post-rotary, ascending in position, on the tier's device."""
    positions: Tensor
    """(B, K, H) original positions; -1 where a row holds fewer units than others."""
    padded: bool
    """Whether there are such rows."""
    index: Any
    """What the lookup's `index` returned for these keys."""
    count: int
    """Units to recall for each query and KV head, no more than H."""
    scaling: float
    """Factor of the logits."""
    nth: int
    """Which of the full-attention layers asks, from 0."""
    layers: int
    """How many there are."""
    generating: bool
    """Whether a token is being generated, rather than the prompt's last tokens read."""
    fed: bool
    """Whether that token is the prompt's last one, which `generate` feeds itself."""
    shared: dict[str, Any]
    """Lives for one forward pass: what one layer leaves for those after it."""
    ranks: HeadRanks | None = None
    """The processes that share the heads."""


class Lookup(Chosen):
    """Finds the units of the second tier that a query attends to. Subclasses are frozen dataclasses of options."""

    kind: ClassVar[str] = "lookup"
    reading: ClassVar[bool] = False
    """Whether the chunks of a text recall too, from what was evicted before; with original positions only."""

    uneven: ClassVar[bool] = False
    """Whether KV heads may hold different numbers of units."""

    def index(self, keys: Keys, positions: Tensor) -> Any:
        """Return what speeds up the search, built once for units that do not change.

        Args:
            keys: (B, K, H, D), post-rotary, ascending in position, on the tier's device.
            positions: (B, K, H) original positions; -1 for empty slots in front of short rows.
        """
        return None

    def resident(self, nth: int, layers: int) -> bool:
        """Return whether the `nth` of the full-attention layers has its second tier in the device's memory."""
        return False

    def remembers(self, nth: int, layers: int) -> int:
        """Return how many of the newest queries the `nth` of the full-attention layers must remember."""
        return 0

    def check(self, recall: int) -> None:
        """Refuse a number of units to recall that contradicts the option `tokens`, where there is one.

        Raises:
            ValueError: Saying what to change.
        """
        if (tokens := self.asked()) is not None and tokens != recall:
            self.refuse(f"tokens={tokens}, but recall={recall}; leave tokens out, or recall as many")

    def asked(self) -> int | None:
        """Return the units to recall that an option says; None: as many as the policy says."""
        return getattr(self, "tokens", None)

    def as_method(self) -> dict[str, Any] | None:
        """Return the policy that makes this lookup a method of its own, as its paper has it; None if it is none."""
        return None

    @abstractmethod
    def choose(self, ask: Ask) -> Tensor | None:
        """Return what is recalled.

        Returns:
            (B, heads, queries, R) int64 ranks of units, on the tier's device, none of them twice for one query: heads
            are N, where every query head has its own units, K, where those of a group share them, or 1; queries are L,
            or 1 where all share them. -1 is no unit, where some choose fewer. None: all units.
        """
