"""Suites average as their papers do, and what papers print is held as printed."""

from __future__ import annotations

import pytest

from locret.data import tasks as benchmarks
from locret.data.tasks.published import suites
from locret.data.tasks.published.suites import PublishedRow

ROWS = [(suites.get(name), row) for name in suites.names() for row in suites.get(name).published]
# Section 4 of the paper: the printed averages contradict their own cells.
WRONG = {
    ("infinitebench-locret", "Phi-3-mini-128K", "MInference"): 34.32,
    ("infinitebench-locret", "Phi-3-mini-128K", "Locret"): 38.57,
    ("longbench-omnikv", "Llama-3-8B-262K", "OmniKV exp, 30 %"): 36.39,
    ("longbench-omnikv", "Yi-9B-200K", "InfLLM, about 30 %"): 40.46,
}


def test_every_suite_names_tasks_that_there_are_once() -> None:
    assert {"infinitebench-locret", "infinitebench", "leval-locret", "longbench-en", "longbench"} <= set(suites.names())
    for name in suites.names():
        suite = suites.get(name)
        assert set(suite.tasks) <= set(benchmarks.names(None))
        assert len(set(suite.tasks)) == len(suite.tasks)
        assert not suite.groups or tuple(task for _, group in suite.groups for task in group) == suite.tasks


def test_suites_have_as_many_tasks_as_their_tables() -> None:
    counts = {name: len(suites.get(name).tasks) for name in suites.names()}
    wanted = {"infinitebench-locret": 9, "infinitebench": 12, "leval-locret": 6, "longbench-en": 16, "longbench": 21}
    assert {name: counts[name] for name in wanted} == wanted


@pytest.mark.parametrize(("suite", "row"), ROWS, ids=lambda one: getattr(one, "name", getattr(one, "method", None)))
def test_printed_cells_give_the_printed_average(suite: suites.Suite, row: PublishedRow) -> None:
    average = suite.cells_average(row)
    wrong = WRONG.get((suite.name, row.model, row.method))
    if not row.scores:
        assert suite.name.startswith("ruler-")
    elif row.average is None:
        assert suite.name == "multistep-omnikv"
    elif wrong is not None:
        assert average == pytest.approx(wrong, abs=0.01)
        assert abs(row.average - wrong) > 1
    else:
        assert average == pytest.approx(row.average, abs=0.1)


def test_averages_by_hand() -> None:
    plain = suites.Suite(name="a", title="", tasks=("x", "y", "z"))
    assert plain.average({"x": 10, "y": 20, "z": 60}) == 30
    assert plain.average({"x": 10, "y": 20}) == 15  # of what is there
    assert plain.average({}) is None
    grouped = suites.Suite(name="b", title="", tasks=("x", "y", "z"), groups=(("one", ("x", "y")), ("two", ("z",))))
    assert grouped.average({"x": 10, "y": 20, "z": 60}) == 37.5  # (15 + 60) / 2
    assert grouped.group_means({"x": 10, "z": 60}) == {"two": 60}


def test_rulers_reference_averages_stand_at_their_lengths() -> None:
    assert [suites.get(f"ruler-{k}k").tokens for k in (4, 8, 16, 32, 64, 128)] == [4096 * 2**step for step in range(6)]
    assert [row.average for row in suites.get("ruler-128k").published] == [77.0, 66.7]


def test_an_unknown_suite_names_the_nearest() -> None:
    with pytest.raises(ValueError, match='--suite "infinitebench-lockret" is unknown; did you mean infinitebench-loc'):
        suites.get("infinitebench-lockret")


def test_a_retired_suite_names_the_last_release_that_has_it() -> None:
    with pytest.raises(
        ValueError, match=r'--suite "world" was retired; release 0\.1\.0 \(git tag lab-frozen\) is the last'
    ):
        suites.get("world")
