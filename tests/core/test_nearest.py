"""An unknown name is answered with the names that are meant, whatever its case and on either side of a slash."""

from __future__ import annotations

import pytest

from locret.base.nearest import nearest

KNOWN = ("passkey", "two_stage", "long/qa", "long/vt", "short/vt", "other/narrative_qa")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Passky", ["passkey"]),
        ("vt", ["long/vt", "short/vt"]),
        ("narrativeqa", ["other/narrative_qa"]),
        ("lung/vt", ["long/vt"]),  # with a slash only whole names count
        ("stage", ["two_stage"]),
        ("nothing of the kind", []),
    ],
)
def test_names_are_compared_in_lower_case_and_without_what_precedes_their_slash(name: str, expected: list[str]) -> None:
    assert nearest(name, KNOWN) == expected
