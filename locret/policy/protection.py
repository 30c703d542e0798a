"""What stays of a text whatever the scores: ranges of its tokens, whole or with a share of the budget. No tensors.

A span without a share is pinned: all its units stay. One with a share keeps at least that part of the budget, its own
best units by score, or all of them where it is shorter. Both hold in every full-attention layer and KV head, from the
chunk in which a token is read to the last eviction. What is protected is part of the budget, never beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from locret.base.fields import shown

MOST_SPANS = 1 << 14
"""Protected spans of a row."""
_END = 1 << 62
_ROUNDING = 1e-9
"""What a product of a share and a budget may lack of a whole number."""


@dataclass(frozen=True)
class Span:
    """Tokens of a text that are protected.

    Raises:
        ValueError: If it holds no token, or its share is none.

    Examples:
        >>> Span(0, 40)  # all units of the first 40 tokens stay
        Span(start=0, end=40, share=None, name='')
        >>> Span(40, 9000, share=0.25).units(1024)  # of these at least so many, with a budget of 1,024
        256
    """

    start: int
    """Position of its first token in the text."""
    end: int | None
    """Position after its last token; None: as far as the text goes."""
    share: float | None = None
    """Share of the budget that it keeps at least, rounded down to units; None: all its units stay."""
    name: str = ""
    """What messages call it."""

    def __post_init__(self) -> None:
        for value in (self.start, 0 if self.end is None else self.end):
            if type(value) is not int or not 0 <= value <= _END:
                raise ValueError(f"{self.label} does not begin and end at positions of tokens; give whole numbers")
        if self.end is not None and self.end <= self.start:
            raise ValueError(f"{self.label} holds no token; its end has to be larger than its start")
        if self.share is not None and (
            type(self.share) not in (int, float) or not isfinite(self.share) or not 0 < self.share <= 1
        ):
            raise ValueError(f"{self.label} has share={shown(self.share)}; give more than 0 and at most 1, such as 0.1")

    @property
    def label(self) -> str:
        """The span as messages name it."""
        place = f"tokens {self.start} to {'the end' if self.end is None else self.end}"
        return f"{self.name} ({place})" if self.name else f"the span of {place}"

    def within(self, read: int) -> range:
        """Return those of its tokens that are among the first `read` ones of the text."""
        return range(
            min(self.start, read), read if self.end is None else max(min(self.end, read), min(self.start, read))
        )

    def units(self, budget: int) -> int:
        """Return the units per KV head that its share of a budget comes to."""
        assert self.share is not None
        return int(self.share * budget + _ROUNDING)

    def moved(self, distance: int, first: int = 0) -> Span | None:
        """Return the span in a text that begins earlier, or later; None if nothing of it comes after `first`."""
        start, end = max(self.start + distance, first), None if self.end is None else self.end + distance
        return None if end is not None and end <= start else Span(start, end, self.share, self.name)


@dataclass(frozen=True)
class Guarantee:
    """What stays of one row in one layer."""

    pins: tuple[tuple[int, int], ...]
    """Start and end of what stays as a whole, ascending, none touching another."""
    shares: tuple[tuple[int, int, int], ...]
    """Start, end, and the units that stay at least, ascending, none touching another."""

    @classmethod
    def of(cls, spans: Sequence[Span], budget: int) -> Guarantee:
        """Return what spans come to where the budget is so many units per KV head."""
        pins = list[tuple[int, int]]()
        for start, end in sorted((one.start, _end(one)) for one in spans if one.share is None):
            if pins and start <= pins[-1][1]:
                pins[-1] = pins[-1][0], max(pins[-1][1], end)
            else:
                pins.append((start, end))
        shares = sorted((one.start, _end(one), one.units(budget)) for one in spans if one.share is not None)
        return cls(tuple(pins), tuple(shares))

    def needed(self, read: int) -> int:
        """Return the units per KV head that stay of a text of which so many tokens have been read."""
        total = sum(_overlap(pin, (0, read)) for pin in self.pins)
        for start, end, units in self.shares:
            pinned = sum(_overlap(pin, (start, min(end, read))) for pin in self.pins)
            total += max(0, min(units, _overlap((start, end), (0, read))) - pinned)
        return total


def _end(span: Span) -> int:
    return _END if span.end is None else span.end


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> int:
    return max(0, min(one[1], other[1]) - max(one[0], other[0]))


Rows = tuple[tuple[Span, ...], ...]
"""The spans of each row of a batch, or once for all rows; nothing where nothing is protected."""


def checked_rows(rows: Iterable[Iterable[Span]]) -> Rows:
    """Return the spans of rows."""
    rows = tuple(rows)
    for spans in rows:
        if not isinstance(spans, Iterable) or isinstance(spans, str):
            raise ValueError(f"{shown(spans)} is no list of spans; give one for all rows, as [locret.Span(start, end)]")
    found = tuple(tuple(spans) for spans in rows)
    for spans in found:
        for span in spans:
            if not isinstance(span, Span):
                raise ValueError(f"{shown(span)} is no span of a text; give locret.Span(start, end), or with a share")
        if len(spans) > MOST_SPANS:
            raise ValueError(f"{len(spans):,} spans are more than {MOST_SPANS:,}; join those that follow each other")
        shared = sorted((one for one in spans if one.share is not None), key=lambda one: one.start)
        for one, other in zip(shared, shared[1:], strict=False):
            if other.start < _end(one):
                raise ValueError(
                    f"{one.label} and {other.label} have tokens in common, and a share each; give such tokens one share"
                )
    return found if any(found) else ()


def moved(rows: Rows, distance: int, first: int = 0) -> Rows:
    """Return the spans in texts that begin so many tokens later, as far as they come after the `first` tokens."""
    return checked_rows([[there for one in spans if (there := one.moved(distance, first))] for spans in rows])


def closed(rows: Rows, end: int) -> Rows:
    """Return the spans with an end, where a text has so many tokens and another one follows."""
    return tuple(tuple(replace(one, end=end) if one.end is None else one for one in spans) for spans in rows)


def spans_data(rows: Rows) -> list[list[list[Any]]]:
    """Return the spans of rows as plain data, for `spans_from`."""
    return [[[one.start, one.end, one.share, one.name] for one in spans] for spans in rows]


def spans_from(data: Any) -> Rows:
    """Return the spans that a file holds."""
    rows: list[Any] = data if isinstance(data, list) else [None]
    for spans in rows:
        for one in spans if isinstance(spans, list) and len(spans) <= MOST_SPANS else [None]:
            if not isinstance(one, list) or len(one) != 4 or not isinstance(one[3], str):
                raise ValueError(f"its protected spans are {shown(data)}, which are none")
    return checked_rows([[Span(*one) for one in spans] for spans in rows])
