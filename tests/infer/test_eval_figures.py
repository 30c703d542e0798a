"""The numbers behind an evaluation's pictures, by hand; and that every picture it can draw is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from locret.data import tasks
from locret.infer.evaluation import figures
from locret.infer.evaluation.figures import Line


def cell(method: str, budget: int | None = None, score: float = 0.0, **changes: Any) -> dict[str, Any]:
    settings = {"task": "passkey", "tokens": 2048, "chunk_size": 64, "stabilizers": 16, "n": 4, "standard_error": 2.0}
    return {**settings, "method": method, "budget": budget, "score": score, **changes}


def record(depth: float | None, tokens: int, score: float, **changes: Any) -> dict[str, Any]:
    settings = {"task": "passkey", "method": "locret", "budget": 64, "chunk_size": 32, "stabilizers": 8}
    return {**settings, "depth": depth, "tokens": tokens, "score": score, **changes}


WHOLE = {"budget": None, "chunk_size": None, "stabilizers": None}
CURVE = [
    cell("full", score=100.0, standard_error=0.0, chunk_size=None, stabilizers=None),
    *(cell("locret", budget, score) for budget, score in ((128, 90.0), (64, 75.0))),
    *(cell("random", budget, score) for budget, score in ((64, 0.0), (128, 5.0))),
]


def test_lines_run_from_small_to_large_budgets_and_full_holds_for_all() -> None:
    cells = CURVE + [{**c, "tokens": 8192} for c in CURVE] + [{**c, "task": "number"} for c in CURVE]
    found = figures.panels(cells, "budget")
    assert list(found) == [("passkey", 2048), ("passkey", 8192), ("number", 2048)]
    assert found["passkey", 2048] == [
        Line("full", [(0, 100.0, 0.0)], True),
        Line("locret", [(64, 75.0, 2.0), (128, 90.0, 2.0)], False),
        Line("random", [(64, 0.0, 2.0), (128, 5.0, 2.0)], False),
    ]


SHARES = [
    cell("random", score=s, budget_share=x, chunk_size=None, stabilizers=None) for x, s in ((0.2, 9.0), (0.1, 4.0))
]


@pytest.mark.parametrize(
    ("cells", "axis", "lines"),
    [
        (CURVE, "stabilizers", {}),
        (CURVE[:2], "budget", {}),
        # Stabilizers that follow the budget leave one line.
        ([cell("locret", b, stabilizers=b // 4) for b in (64, 128)], "budget", {"locret": [64, 128]}),
        ([cell("locret", b, stabilizers=b // 4) for b in (64, 128)], "stabilizers", {}),
        (
            [cell("locret", b, stabilizers=n) for b in (64, 128) for n in (16, 0, 32)],
            "stabilizers",
            {"locret, budget 64": [0, 16, 32], "locret, budget 128": [0, 16, 32]},
        ),
        (SHARES, "budget", {}),
        (SHARES, "budget_share", {"random": [0.1, 0.2]}),
    ],
)
def test_a_setting_with_several_values_is_a_figure(cells: Any, axis: str, lines: dict[str, Any]) -> None:
    found = figures.panels(cells, axis)
    assert {line.label: [x for x, _, _ in line.points] for own in found.values() for line in own} == lines


def test_heat_maps_average_by_depth_and_length() -> None:
    records = [record(0.25, 1024, 1.0), record(0.25, 1024, 0.0), record(0.75, 1024, 1.0), record(0.75, 2048, 0.5)]
    assert figures.heat_map(records) == ([0.0, 0.5, 1.0], [1024, 2048], [[50.0, None], [100.0, 50.0]])
    # Depths that were drawn fall into ten rows.
    records = [record((i + 0.5) / 20, 1024, float(i < 2)) for i in range(20)] + [record(1.0, 1024, 1.0)]
    assert [score for (score,) in figures.heat_map(records).scores] == [100, *[0] * 8, pytest.approx(100 / 3)]


def test_ways_of_reading_have_a_heat_map_each_of_tasks_whose_answer_is_in_one_place() -> None:
    records = [
        record(0.5, 1024, 1.0),
        record(0.5, 1024, 1.0, task="number"),
        record(0.5, 1024, 1.0, task="ruler/niah_multivalue"),
        record(None, 1024, 1.0),
        record(0.5, 1024, 1.0, method="full", **WHOLE),
        *(record(0.5, 1024, 1.0, method="h2o", stabilizers=n) for n in (0, 8)),
    ]
    found = {f"{one.method}, {one.amount}": list(by_task) for one, by_task in figures.readings(records).items()}
    assert found == {
        "locret, budget 64": ["passkey", "number"],
        "full, all units": ["passkey"],
        "h2o, budget 64, chunk 32, stabilizers 0": ["passkey"],
        "h2o, budget 64, chunk 32, stabilizers 8": ["passkey"],
    }
    single = {name: tasks.get(name).single_needle for name in ("multikey", "niah/needle", "ruler/niah_single_2")}
    assert all(single.values()), single
    assert not any(tasks.get(name).single_needle for name in ("ruler/niah_multikey_1", "ruler/vt"))


@pytest.mark.slow
def test_titles_of_heat_maps_are_not_written_over_each_other() -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra locret[eval]")
    method = "snapkv:kernel=7,pooling=max+prompt_end+adaptive_heads"
    rows = [record(0.5, 1024, 1.0, method=method, stabilizers=n, budget=b) for n in (0, 8) for b in (64, 128)]
    maps = {reading: figures.heat_map(own["passkey"]) for reading, own in figures.readings(rows).items()}
    figure = figures.draw_heat_maps(maps, "passkey")
    figure.canvas.draw()
    titles = [axes._left_title.get_window_extent() for axes in figure.axes if axes.get_title(loc="left")]
    assert len(titles) == 4
    for number, title in enumerate(titles):
        assert not any(title.overlaps(other) for other in titles[:number])
        assert title.x1 <= figure.bbox.x1


def test_every_picture_is_written_and_named(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra locret[eval]")
    assert figures.write_all(tmp_path, [], CURVE[:2]) == []
    cells = CURVE + [cell("locret", 64, 1.0, stabilizers=0), cell("locret", 64, 1.0, chunk_size=256)]
    records = [record(0.5, 1024, 1.0), record(0.1, 2048, 0.0), record(0.3, 1024, 1.0, task="number")]
    names = figures.write_all(tmp_path, records, cells)
    assert names == [
        *(f"accuracy_by_{axis}.png" for axis in ("budget", "chunk_size", "stabilizers")),
        *(f"heat_map_{task}.png" for task in ("passkey", "number")),
    ]
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(names)
    assert all((tmp_path / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" for name in names)
