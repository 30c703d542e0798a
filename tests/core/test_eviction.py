"""Selection: exact size, protection, ties to the newer slot, the oracle's choice on any scores."""

from __future__ import annotations

import oracle as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from locret.policy.selectors import select_kept


def test_ties_go_to_the_newer_slot() -> None:
    kept = select_kept(torch.tensor([[[1.0, 0.0, 1.0, 1.0, -0.0]]]), 2)
    assert kept.tolist() == [[[2, 3]]]
    assert select_kept(torch.tensor([[[0.0, -0.0, 0.0]]]), 1).tolist() == [[[2]]]


def test_protection_beats_infinite_scores_and_nan_loses_to_everything() -> None:
    scores = torch.tensor([[[torch.inf, torch.nan, -torch.inf, -5.0]]])
    protected = torch.tensor([False, False, True, False])
    assert select_kept(scores, 1, protected).tolist() == [[[2]]]
    assert select_kept(scores, 3, protected).tolist() == [[[0, 2, 3]]]


FLOATS = st.floats(width=32, allow_nan=False) | st.sampled_from([0.0, -0.0, 1.0])


@settings(max_examples=200, deadline=None)
@given(st.lists(FLOATS, min_size=1, max_size=40), st.integers(1, 45), st.integers(0, 40))
def test_any_scores_give_the_oracles_choice(scores: list[float], budget: int, protected: int) -> None:
    newest = set(range(len(scores) - min(protected, len(scores)), len(scores)))
    mask = torch.tensor([slot in newest for slot in range(len(scores))])
    kept = select_kept(torch.tensor(scores)[None, None], budget, mask if protected else None)
    assert kept[0, 0].tolist() == reference.select_kept(scores, budget, newest if protected else set())
