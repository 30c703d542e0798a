"""Everything that can rate cache units. To add a scorer: one file next to these, and one line in `_SCORERS`."""

from __future__ import annotations

from typing import Any

from locret.backbone.chunk import Chunk
from locret.nearest import nearest
from locret.scorers.base import Rated, Scorer, TokenPass, TokenScorer
from locret.scorers.expected_attention import ExpectedAttentionScorer
from locret.scorers.h2o import H2OScorer
from locret.scorers.key_difference import KeyDifferenceScorer
from locret.scorers.key_norm import KeyNormScorer
from locret.scorers.nacl import NACLScorer
from locret.scorers.oracle import OracleScorer
from locret.scorers.random import RandomScorer
from locret.scorers.retaining_heads import RetainingHeadScorer
from locret.scorers.sage_kv import SageKVScorer
from locret.scorers.scissorhands import ScissorhandsScorer
from locret.scorers.sirllm import SirLLMScorer
from locret.scorers.snapkv import SnapKVScorer
from locret.scorers.streaming import StreamingScorer
from locret.scorers.tova import TOVAScorer

__all__ = [
    "FALLBACK",
    "Chunk",
    "ExpectedAttentionScorer",
    "H2OScorer",
    "KeyDifferenceScorer",
    "KeyNormScorer",
    "NACLScorer",
    "OracleScorer",
    "RandomScorer",
    "Rated",
    "RetainingHeadScorer",
    "SageKVScorer",
    "ScissorhandsScorer",
    "Scorer",
    "SirLLMScorer",
    "SnapKVScorer",
    "StreamingScorer",
    "TOVAScorer",
    "TokenPass",
    "TokenScorer",
    "find",
    "get",
    "names",
]

_SCORERS: tuple[type[Scorer], ...] = (
    ExpectedAttentionScorer,
    H2OScorer,
    KeyDifferenceScorer,
    KeyNormScorer,
    NACLScorer,
    OracleScorer,
    RandomScorer,
    RetainingHeadScorer,
    SageKVScorer,
    ScissorhandsScorer,
    SirLLMScorer,
    SnapKVScorer,
    StreamingScorer,
    TOVAScorer,
)

FALLBACK = "expected_attention"
"""The training-free scorer that commands use for a backbone without heads: the best in the table of docs/scorers.md."""


def names() -> list[str]:
    """Return the names that `get` knows, sorted."""
    return sorted(scorer.name for scorer in _SCORERS)


def get(name: str, **options: Any) -> Scorer:
    """Return the scorer called `name` with its options.

    Raises:
        ValueError: If there is no such scorer (the message lists the nearest names), or it has no such option.

    Examples:
        >>> scorers.get("snapkv", window=32).window
        32
    """
    try:
        return find(name)(**options)
    except TypeError as error:
        raise ValueError(f"scorer {name}: {error}") from error


def find(name: str) -> type[Scorer]:
    """Return the class of the scorer called `name`.

    Raises:
        ValueError: If there is no such scorer; the message lists the nearest names.
    """
    for scorer in _SCORERS:
        if scorer.name == name:
            return scorer
    near = nearest(name, names()) or names()
    raise ValueError(f'scorer "{name}" is unknown; did you mean {" or ".join(near)}?')
