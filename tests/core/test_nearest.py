"""An unknown name is answered with the names that are meant, whatever its case and on either side of a slash."""

from __future__ import annotations

import pytest

from locret import scorers
from locret.base.nearest import nearest
from locret.data.tasks.published import suites
from locret.infer.evaluation import methods
from locret.infer.evaluation.eval_options import EvalOptions
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


def test_at_most_three_names_are_suggested_in_the_order_of_tables() -> None:
    assert nearest("key", [f"{letter}/key" for letter in "dcba"]) == ["d/key", "c/key", "b/key"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("narrativeqa", r"longbench/narrativeqa\?"),
        ("vt", r"scbench/vt or ruler/vt\?"),
        ("2stageretr", "twostage/2stage"),
        ("PassKey", "passkey"),
        ("passky", "passkey"),
    ],
)
def test_a_task_without_its_benchmark_is_found(name: str, expected: str) -> None:
    with pytest.raises(ValueError, match=f'task "{name}" is unknown; did you mean {expected}'):
        EvalOptions(tasks=name)


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
