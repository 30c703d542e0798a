"""Look over a scorer's shoulder on every forward pass. Imported by the tests beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import oracle as reference
import pytest
import torch
from families import prompt
from torch import Tensor

from locret import RetentionCache, RetentionPolicy, generate, scorers
from locret.backbone.chunk import Chunk

GREEDY = {"do_sample": False, "eos_token_id": None}


def policy(when: str = "chunk", **changes: Any) -> RetentionPolicy:
    numbers = {"budget": 24, "chunk_size": 11, "stabilizers": 5, "local_len": 6, "positions": "original", "when": when}
    return RetentionPolicy(**{**numbers, **changes})


def read_and_answer(model: Any, scorer: scorers.Scorer, **changes: Any) -> RetentionCache:
    decode = {"decode_budget": 33, "decode_interval": 3} if scorer.rates_answers else {}
    cache = RetentionCache(model, scorer, policy(**{**decode, **changes}))
    generate(model, prompt(61), cache=cache, max_new_tokens=5, **GREEDY)
    return cache


def watch(monkeypatch: pytest.MonkeyPatch, scorer: scorers.Scorer, see: Callable[[Chunk, Tensor], None]) -> None:
    """Call `see` with every chunk and the scores it got, which are infinite for units that stay as sinks."""
    kind = type(scorer)
    score = kind.score

    def watched(self: scorers.Scorer, chunk: Chunk) -> Tensor:
        scores = score(self, chunk)
        if self is scorer:
            whole = scores.shape[-1] == chunk.key.shape[2] and (chunk.selects or chunk.last) and not chunk.generating
            sinks = self.sink_tokens(chunk.budget, chunk.recent) if whole else 0
            positions = chunk.unit_positions
            see(chunk, scores.masked_fill((positions >= 0) & (positions < sinks), torch.inf) if sinks else scores)
        return scores

    monkeypatch.setattr(kind, "score", watched)


def dense(chunk: Chunk) -> Tensor:
    """Return (N, L, S) attention of the only row of a chunk."""
    assert len(chunk.query) == 1
    return reference.attention(chunk.query[0], chunk.key[0], chunk.scaling, chunk.softcap, chunk.learned_sinks)
