"""An unknown name is answered with the names that are meant, whatever its case and on either side of a slash."""

from __future__ import annotations

import pytest

from locret import scorers
from locret.base.nearest import nearest
from locret.data.tasks.published import suites
from locret.infer.evaluation import methods
from locret.infer.speed import ways

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


def test_methods_scorers_and_suites_are_found_in_any_case() -> None:
    with pytest.raises(ValueError, match=r'method "LOCRET" is unknown; did you mean locret\?'):
        methods.get("LOCRET")
    with pytest.raises(ValueError, match=r"\+PYRAMID is unknown; did you mean \+pyramid\?"):
        methods.get("locret+PYRAMID")
    with pytest.raises(ValueError, match=r'--methods "SnapKV" is unknown; did you mean snapkv\?'):
        ways.get("SnapKV")
    with pytest.raises(ValueError, match=r'scorer "TOVA" is unknown; did you mean tova\?'):
        scorers.find("TOVA")
    with pytest.raises(ValueError, match='--suite "LEVAL-LOCRET" is unknown; did you mean leval-locret'):
        suites.get("LEVAL-LOCRET")
