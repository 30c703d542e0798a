"""Everything that can rate cache units. To add a scorer: one file beside these, one line in `_SCORERS`."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from locret.scorers.base import Scorer, TokenScorer
from locret.scorers.oracle import OracleScorer
from locret.scorers.random import RandomScorer
from locret.scorers.retaining_heads import RetainingHeadScorer
from locret.scorers.streaming import StreamingScorer

__all__ = [
    "OracleScorer",
    "RandomScorer",
    "RetainingHeadScorer",
    "Scorer",
    "StreamingScorer",
    "TokenScorer",
    "get",
    "names",
]

_SCORERS: tuple[type[Scorer], ...] = (
    OracleScorer,
    RandomScorer,
    RetainingHeadScorer,
    StreamingScorer,
)


def names() -> list[str]:
    """Return the names that `get` knows, sorted."""
    return sorted(scorer.name for scorer in _SCORERS)


def get(name: str, **options: Any) -> Scorer:
    """Return the scorer called `name` with its options.

    Raises:
        ValueError: If there is no such scorer (the message lists the nearest names), or it has no such option.
    """
    for scorer in _SCORERS:
        if scorer.name == name:
            try:
                return scorer(**options)
            except TypeError as error:
                raise ValueError(f"scorer {name}: {error}") from error
    near = get_close_matches(name, names(), n=3) or names()
    raise ValueError(f'scorer "{name}" is unknown; did you mean {" or ".join(near)}?')
