"""What is measured of composing: documents are cut where sentences end, and every way is asked the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from locret.infer.evaluation.composing import ARMS, ComposingOptions, command, cut, summary


def test_a_text_is_cut_into_equal_parts_where_sentences_end() -> None:
    text = "One is here. Two is there! Is three? Four is. Five and six are gone."
    assert cut(text, 2) == ["One is here. Two is there! Is three?", "Four is. Five and six are gone."]
    assert " ".join(cut(text, 4)) == text
    with pytest.raises(ValueError, match="a text of 4 sentences cannot be cut into 9 documents"):
        cut(text, 9)


def test_scores_are_told_apart_by_where_the_asked_document_stands() -> None:
    scores = [dict.fromkeys((*ARMS, "reversed"), value) for value in (1.0, 0.0, 0.5)]
    scores[0]["reversed"] = 0.0
    found = summary(scores, [[0], [1], [0, 1]], 2)
    assert found["scores"]["full cache"] == 0.5
    assert found["asked"] == {"first": 0.5, "last": 0.0}  # in order and reversed


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"documents": [1]}, "two documents or more"),
        ({"samples": 0}, "give at least 1 and 8"),
        ({"tasks": []}, "one of them names nothing"),
    ],
)
def test_numbers_that_measure_nothing_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ComposingOptions(**options)  # type: ignore[arg-type]


def test_every_way_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--samples", "1", "--tokens", "[400]", "--documents", "[2]", "--tasks", "[multivalue]", "--budget", "64"]
    assert command([*few, "--output", str(tmp_path / "a")]) == 0
    record = json.loads((tmp_path / "a.json").read_text())
    (row,) = record["rows"]
    assert set(row["scores"]) == {*ARMS, "reversed"}
    assert row["scores"]["full cache"] > 0.7
    assert (tmp_path / "a.md").read_text().splitlines()[2].startswith("| multivalue | 400 | 2 | ")
