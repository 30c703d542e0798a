"""Options of the world's tasks that ask for more than there is are refused, not made smaller."""

from __future__ import annotations

import random

import pytest

from locret.data import tasks
from locret.data.tasks.generated.base import Draw


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("count", {"kinds": 8}, "kinds=8 is more than there are; ask for 7 or fewer"),
        ("shots", {"rules": 500}, "rules=500 is more than there are"),
        ("shots", {"shots": 500}, "shots=500 is more than there are"),
        ("prices", {"things": 60, "apart": 1}, "things=60 is more than there are"),
        ("qa3", {"moves": 1}, "moves=1 has no place before the last; ask for 2 or more"),
    ],
)
def test_more_than_there_is_is_refused(name: str, options: dict[str, int], message: str) -> None:
    task = tasks.get(f"world/{name}", **options)
    with pytest.raises(ValueError, match=message):
        task.plant(Draw(random.Random(0), "eval"))  # type: ignore[attr-defined]
