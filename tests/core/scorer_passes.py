"""Look over a scorer's shoulder on every forward pass. Imported by the tests beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from locret import RetentionPolicy, reference, scorers
from locret.instrument import Chunk

GREEDY = {"do_sample": False, "eos_token_id": None}


def policy(when: str = "chunk", **changes: Any) -> RetentionPolicy:
    numbers = {"budget": 24, "chunk_size": 11, "stabilizers": 5, "local_len": 6, "positions": "original", "when": when}
    return RetentionPolicy(**{**numbers, **changes})


def watch(monkeypatch: pytest.MonkeyPatch, scorer: scorers.Scorer, see: Callable[[Chunk, Tensor], None]) -> None:
    """Call `see` with every chunk and the scores it got."""
    score = scorer.score

    def watched(chunk: Chunk) -> Tensor:
        scores = score(chunk)
        see(chunk, scores)
        return scores

    monkeypatch.setattr(scorer, "score", watched)


def dense(chunk: Chunk) -> Tensor:
    """Return (N, L, S) attention of the only row of a chunk."""
    assert len(chunk.query) == 1
    return reference.attention(chunk.query[0], chunk.key[0], chunk.scaling, chunk.softcap)
