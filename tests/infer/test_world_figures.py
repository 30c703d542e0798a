"""The pictures of the world's page name what is not beaten, and say which rows stand on few texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from locret.infer.evaluation.tiers import Held
from locret.infer.evaluation.world import figures


def held(method: str, total: int, score: float) -> Held:
    return Held(method, "32", total, 0, 0.0, score, 1.0)


def test_what_is_not_beaten_is_named_first_and_others_where_there_is_room() -> None:
    few, more = held("locret+shares", 1000, 98.0), held("locret+shares", 1800, 100.0)
    near, far = held("snapkv", 1000, 97.0), held("h2o", 1800, 40.0)
    top = held("oracle", 1000, 100.0)
    assert figures.named([top, near, far, few, more]) == [few, more, far], "an oracle at the top takes nobody's room"
    assert figures.named([top, near, far]) == [near, far]
    same = held("locret+shares+original", 1000, 98.0)
    assert figures.named([few, same]) == [few], "of two at one place, one is named"


def test_rows_of_few_texts_are_grey_and_say_how_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    drawn: list[Any] = []
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.append(figure))
    rows = [
        {"method": method, "task": task, "tokens": 64, "budget": 32, "texts": texts, "score": score}
        for method, texts, score in (("locret", 42, 80.0), ("kvpress/kvzip", 1, 100.0))
        for task in ("passkey", "number")
    ]
    figures.draw_map(rows, "agnostic", tmp_path / "map.png")
    axes = drawn[0].axes[0]
    labels = axes.get_yticklabels()
    assert [label.get_text() for label in labels] == ["kvpress/kvzip (1 of 42 texts)  100", "locret  80"]
    assert labels[0].get_color() != labels[1].get_color()
    assert axes.get_title(loc="left").endswith("grey names: fewer texts")
    figures.draw_map([row for row in rows if row["texts"] == 42], "agnostic", tmp_path / "map.png")
    assert drawn[1].axes[0].get_title(loc="left") == "agnostic, budget 32; behind each name its mean"
