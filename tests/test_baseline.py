"""What the engine computes is what was recorded; and what the comparison says where it is not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1]))

from tests.baseline import difference, differences, quiet
from tests.baseline_cases import RECORD


@pytest.mark.long
def test_what_is_computed_is_what_was_recorded() -> None:
    quiet()
    found = dict(differences(RECORD, close=True))
    assert len(found) > 60
    assert {name: text for name, text in found.items() if text} == {}


def compared(now: dict[str, Any], tolerance: float = 0.0) -> str | None:
    numbers = {"positions": torch.tensor([0, 1, 5, 0, 2, 5]), "scores": torch.tensor([1.0, 3, 2, 9, 8, 7])}
    before = {name: {"shapes": [[1, 1, 3], [1, 1, 3]]} for name in numbers} | {
        "ids": [[4, 5]],
        "file": {"k": "(2,) f 1"},
    }
    return difference(before, numbers, now, tolerance)


def held(positions: list[list[int]], scores: list[list[float]]) -> dict[str, list[Tensor]]:
    return {
        "positions": [torch.tensor([[row]]) for row in positions],
        "scores": [torch.tensor([[row]]) for row in scores],
    }


PLAIN = {"ids": [[4, 5]], "file": {"k": "(2,) f 1"}}
KEPT, SCORES = [[0, 1, 5], [0, 2, 5]], [[1.0, 3, 2], [9.0, 8, 7]]


def test_nothing_differs_in_what_was_recorded() -> None:
    assert compared({**held(KEPT, SCORES), **PLAIN}) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (held([[0, 1, 5], [0, 3, 5]], SCORES), "positions: 2 of 2 tensors, [0, 0, 1]: 2 when recorded, 3 now (1 of 3 "),
        (
            held(KEPT, [[1.0, 3, 2], [9.0, 8, 7.5]]),
            "scores: 2 of 2 tensors, [0, 0, 2]: 7.0 when recorded, 7.5 now (1 of",
        ),
        ({"ids": [[4, 6]]}, "ids: [0] [1] 5 when recorded, 6 now"),
        ({"file": {"k": "(2,) f 2"}}, "file: k: (2,) f 1 when recorded, (2,) f 2 now"),
        ({"file": {}}, "file: k: (2,) f 1 when recorded, nothing now"),
        ({"more": 1}, "recorded are positions, scores, ids, file; computed positions, scores, ids, file, more"),
    ],
)
def test_the_first_difference_is_said(change: dict[str, Any], said: str) -> None:
    text = compared({**held(KEPT, SCORES), **PLAIN, **change})
    assert text is not None
    assert text.startswith(said)


def test_with_a_tolerance_a_near_tie_may_fall_otherwise_and_nothing_else() -> None:
    tied = held([[0, 1, 5], [0, 2, 4]], [[1.0, 3, 2], [9.0, 8, 7.0001]])
    assert compared({**tied, **PLAIN}) is not None
    assert compared({**tied, **PLAIN}, tolerance=1e-4) is None
    better = held([[0, 1, 5], [0, 2, 4]], [[1.0, 3, 2], [9.0, 8, 7.1]])
    assert compared({**better, **PLAIN}, tolerance=1e-4) is not None
    assert compared({**held(KEPT, [[1.0, 3, 2], [9.0, 8, 7.0001]]), **PLAIN}, tolerance=1e-4) is None
    assert compared({**held(KEPT, SCORES), **PLAIN, "file": {"k": "(2,) f 2"}}, tolerance=1e-4) is None
    assert compared({**held(KEPT, SCORES), **PLAIN, "file": {"k": "(3,) f 1"}}, tolerance=1e-4) is not None
