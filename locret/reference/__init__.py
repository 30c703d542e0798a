"""The slow, obvious version of everything that is fast elsewhere: the oracle of the tests. Needs only torch.

Loops over heads, tokens and slots; every line can be checked against the papers by eye. Never imported by the library.
"""

from __future__ import annotations

from locret.reference.retaining import (
    attend,
    head_scores,
    kept_after_chunks,
    labels,
    loss,
    ranking_loss,
    read_prompt,
    rotate,
    select_kept,
)

__all__ = [
    "attend",
    "head_scores",
    "kept_after_chunks",
    "labels",
    "loss",
    "ranking_loss",
    "read_prompt",
    "rotate",
    "select_kept",
]
