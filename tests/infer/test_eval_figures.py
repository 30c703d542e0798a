"""The numbers behind an evaluation's pictures, by hand; and that every picture it can draw is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from locret.data import tasks
from locret.infer.evaluation import figures, series
from locret.infer.evaluation.series import Line, Point, Reading


def cell(method: str, budget: int | None = None, score: float = 0.0, **changes: Any) -> dict[str, Any]:
    settings = {"task": "passkey", "tokens": 2048, "chunk_size": 64, "stabilizers": 16, "n": 4, "standard_error": 2.0}
    return {**settings, "method": method, "budget": budget, "score": score, **changes}


def record(depth: float | None, tokens: int, score: float, **changes: Any) -> dict[str, Any]:
    settings = {"task": "passkey", "method": "locret", "budget": 64, "chunk_size": 32, "stabilizers": 8}
    return {**settings, "depth": depth, "tokens": tokens, "score": score, **changes}


def drawn(name: str, folder: Path) -> bool:
    return (folder / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


CURVE = [
    cell("full", None, 100.0, chunk_size=None, stabilizers=None, standard_error=0.0),
    cell("locret", 128, 90.0),
    cell("locret", 64, 75.0),
    cell("random", 64, 0.0),
    cell("random", 128, 5.0),
]


def test_lines_run_from_small_to_large_budgets_and_full_holds_for_all() -> None:
    (panel,) = series.panels(CURVE, "budget")
    assert (panel.task, panel.tokens) == ("passkey", 2048)
    assert panel.lines == (
        Line("full", "full", (Point(0, 100.0, 0.0),), True),
        Line("locret", "locret", (Point(64, 75.0, 2.0), Point(128, 90.0, 2.0)), False),
        Line("random", "random", (Point(64, 0.0, 2.0), Point(128, 5.0, 2.0)), False),
    )


def test_one_value_of_a_setting_is_no_figure() -> None:
    assert series.panels(CURVE, "stabilizers") == []
    assert series.panels(CURVE[:2], "budget") == []


def test_each_task_and_length_is_a_panel() -> None:
    cells = CURVE + [{**c, "tokens": 8192} for c in CURVE] + [{**c, "task": "number"} for c in CURVE]
    shown = [(panel.task, panel.tokens) for panel in series.panels(cells, "budget")]
    assert shown == [("passkey", 2048), ("passkey", 8192), ("number", 2048)]


def test_stabilizers_that_follow_the_budget_leave_one_line() -> None:
    cells = [cell("locret", budget, 50.0, stabilizers=budget // 4) for budget in (64, 128)]
    (panel,) = series.panels(cells, "budget")
    assert [(line.label, len(line.points)) for line in panel.lines] == [("locret", 2)]
    assert series.panels(cells, "stabilizers") == []


def test_budgets_tell_the_lines_of_an_ablation_apart() -> None:
    cells = [cell("locret", budget, 1.0, stabilizers=n) for budget in (64, 128) for n in (16, 0, 32)]
    (panel,) = series.panels(cells, "stabilizers")
    assert [line.label for line in panel.lines] == ["locret, budget 64", "locret, budget 128"]
    assert [point.x for point in panel.lines[0].points] == [0, 16, 32]


def test_heat_map_averages_by_depth_and_length() -> None:
    records = [record(0.25, 1024, 1.0), record(0.25, 1024, 0.0), record(0.75, 1024, 1.0), record(0.75, 2048, 0.5)]
    heat = series.heat_map(records)
    assert heat.lengths == (1024, 2048)
    assert heat.depths == (0.0, 0.5, 1.0)
    assert heat.scores == ((50.0, None), (100.0, 50.0))
    assert heat.counts == ((2, 0), (1, 1))


def test_drawn_depths_fall_into_ten_rows() -> None:
    records = [record((i + 0.5) / 20, 1024, float(i < 2)) for i in range(20)] + [record(1.0, 1024, 1.0)]
    heat = series.heat_map(records)
    assert [count for (count,) in heat.counts] == [2] * 9 + [3]
    assert heat.scores[0] == (100.0,)
    assert heat.scores[1] == (0.0,)
    assert heat.scores[9] == (pytest.approx(100 / 3),)


def test_heat_map_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no samples with a depth"):
        series.heat_map([])


def test_only_tasks_whose_answer_is_in_one_place_get_a_heat_map() -> None:
    assert all(tasks.get(name).single_needle for name in ("passkey", "number", "multikey"))
    assert not tasks.get("ruler/vt").single_needle


def test_lines_of_a_figure_look_different() -> None:
    assert len({figures.style(index) for index in range(49)}) == 49
    assert figures.style(0) == ("#0072B2", "o")


def test_ways_of_reading_have_a_heat_map_each() -> None:
    records = [
        record(0.5, 1024, 1.0),
        record(0.5, 1024, 1.0, task="number"),
        record(0.5, 1024, 1.0, task="ruler/niah_multivalue"),
        record(None, 1024, 1.0),
        record(0.5, 1024, 1.0, method="full", budget=None, chunk_size=None, stabilizers=None),
    ]
    grouped = series.readings(records)
    assert {reading.title: list(tasks) for reading, tasks in grouped.items()} == {
        "locret, budget 64": ["passkey", "number"],
        "full, all units": ["passkey"],
    }
    assert len(grouped[Reading("locret", "budget 64")]["passkey"]) == 1


def test_heat_maps_of_an_ablation_are_not_mixed() -> None:
    grouped = series.readings([record(0.5, 1024, 1.0, stabilizers=n) for n in (0, 8)])
    titles = [f"locret, budget 64, chunk 32, stabilizers {n}" for n in (0, 8)]
    assert [reading.title for reading in grouped] == titles


@pytest.mark.slow
def test_titles_of_heat_maps_are_not_written_over_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra locret[eval]")
    figure: Any = None

    def keep(made: Any, path: Path) -> None:
        nonlocal figure
        figure = made

    monkeypatch.setattr(figures, "save", keep)
    method = "snapkv:kernel=7,pooling=max+prompt_end+adaptive_heads"
    rows = [record(0.5, 1024, 1.0, method=method, stabilizers=n, budget=b) for n in (0, 8) for b in (64, 128)]
    maps = {reading: series.heat_map(own["passkey"]) for reading, own in series.readings(rows).items()}
    figures.draw_heat_maps(maps, "passkey", tmp_path / "map.png")
    figure.canvas.draw()
    shown = [axes for axes in figure.axes if axes.get_title(loc="left")]
    titles = [axes._left_title.get_window_extent() for axes in shown]
    assert len(titles) == 4
    for number, title in enumerate(titles):
        assert not any(title.overlaps(other) for other in titles[:number])
        assert title.x1 <= figure.bbox.x1
    assert all(axes.get_window_extent().width / figure.dpi > 1.2 for axes in shown), "maps keep their width"


@pytest.mark.slow
def test_every_picture_is_written_and_named(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra locret[eval]")
    cells = CURVE + [cell("locret", 64, 1.0, stabilizers=0), cell("locret", 64, 1.0, chunk_size=256)]
    records = [record(0.5, 1024, 1.0), record(0.1, 2048, 0.0), record(0.3, 1024, 1.0, task="number")]
    names = figures.write_all(tmp_path, records, {"cells": cells})
    assert names == [
        "accuracy_by_budget.png",
        "accuracy_by_chunk_size.png",
        "accuracy_by_stabilizers.png",
        "heat_map_passkey.png",
        "heat_map_number.png",
    ]
    assert all(drawn(name, tmp_path) for name in names)
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(names)


def test_run_with_one_budget_and_no_needle_draws_nothing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra locret[eval]")
    assert figures.write_all(tmp_path, [], {"cells": CURVE[:2]}) == []


def test_missing_matplotlib_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"--figures all needs matplotlib; install it with `pip install 'locret\[eval"):
        figures.write_all(tmp_path, [], {"cells": []})


@pytest.mark.parametrize(
    ("name", "single"),
    [("niah/needle", True), ("ruler/niah_single_2", True), ("ruler/niah_multikey_1", False), ("ruler/vt", False)],
)
def test_published_needles_get_a_heat_map_where_one_place_holds_the_answer(name: str, single: bool) -> None:
    assert tasks.get(name).single_needle is single


def line(label: str, *scores: float, everywhere: bool = False) -> Line:
    return Line(label, label, tuple(Point(2**i, score, 0.0) for i, score in enumerate(scores)), everywhere)


def test_lines_that_share_a_stretch_run_side_by_side_and_others_stay() -> None:
    lines = [line("full", 100, everywhere=True), line("a", 50, 100, 100), line("b", 100, 100, 100), line("c", 0, 0, 20)]
    shifts = figures.side_by_side(lines)
    assert [up for _, up in shifts] == pytest.approx([2.4, 0, -2.4, 0])
    assert [right for right, _ in shifts] == pytest.approx([0, -3, 0, 3])


def test_lines_that_only_cross_are_not_moved_up() -> None:
    shifts = figures.side_by_side([line("a", 0, 50, 100), line("b", 100, 50, 0)])
    assert [up for _, up in shifts] == [0, 0]


def test_shares_are_the_axis_of_a_figure_of_their_own() -> None:
    own = {"budget": None, "stabilizers": None, "chunk_size": None}
    cells = [
        cell("random", **{**own, "score": score, "budget_share": share}) for share, score in ((0.2, 9.0), (0.1, 4.0))
    ]
    cells.append(cell("full", None, 50.0, chunk_size=None, stabilizers=None))
    assert series.panels(cells, "budget") == []
    (panel,) = series.panels(cells, "budget_share")
    assert [(point.x, point.score) for point in panel.lines[0].points] == [(0.1, 4.0), (0.2, 9.0)]
    assert panel.lines[1].everywhere
    assert series.label("budget_share", 0.1) == "10%"
