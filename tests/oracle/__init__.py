"""The slow, obvious version of everything that is fast elsewhere: the oracle of the tests. Needs only torch.

Loops over heads, tokens and slots; every line can be checked against the papers by eye. Never imported by the library.
"""

from __future__ import annotations

from oracle.attention_scorers import (
    attention,
    h2o,
    low_events,
    nacl_kept,
    reduce_group,
    sage_kept,
    snapkv,
    snapkv_of_imdc,
    tova,
)
from oracle.budgets import (
    adaptive_sizes,
    decremental_chunks,
    kept_with_protection,
    memory_sizes,
    pyramid_budgets,
    select_over_heads,
)
from oracle.infllm import infllm
from oracle.lookups import omnikv_visible, quest_visible
from oracle.merging import loco
from oracle.recall import answer_with_recall, best_units
from oracle.retaining import attend, labels, loss, ranking_loss, read_prompt, rotate, select_kept
from oracle.rounding import packed, rounded_by_channel, rounded_by_token
from oracle.sparse_reading import read_by_choice
from oracle.token_and_key_scorers import expected_attention, key_difference, key_norm, mean_rotation, surprisal

__all__ = [
    "adaptive_sizes", "answer_with_recall", "attend", "attention", "best_units", "decremental_chunks",
    "expected_attention", "h2o", "infllm", "kept_with_protection",
    "key_difference", "key_norm", "labels", "loco", "loss", "low_events", "mean_rotation",
    "memory_sizes", "nacl_kept", "omnikv_visible", "packed", "pyramid_budgets", "quest_visible", "ranking_loss",
    "read_by_choice", "read_prompt", "reduce_group", "rotate", "rounded_by_channel", "rounded_by_token",
    "sage_kept", "select_kept", "select_over_heads", "snapkv", "snapkv_of_imdc", "surprisal",
    "tova",
]  # fmt: skip
