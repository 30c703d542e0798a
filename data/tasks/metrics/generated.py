"""Metrics of generated tasks, each as its benchmark defines it. All return a score from 0 to 1."""

from __future__ import annotations

import re
from collections.abc import Sequence


def first_integer(prediction: str, target: str) -> float:
    """Return 1 if the first run of digits is the target (InfiniteBench, R.PassKey and R.Number)."""
    pieces = [piece for piece in re.split(r"[^0-9]", prediction) if piece]
    return float(bool(pieces) and pieces[0] == target)


def all_contained(prediction: str, targets: Sequence[str]) -> float:
    """Return the share of targets that occur in the prediction, whatever the case (RULER, string match "all")."""
    low = prediction.lower()
    return sum(target.lower() in low for target in targets) / len(targets)
