"""Tasks and suites are found by name, with options that are checked, and suites average as their papers do."""

from __future__ import annotations

import re

import pytest
from bench_cases import golden

from locret.data import tasks
from locret.data.tasks.published import suites

ROWS = [(suites.get(name), row) for name in suites.names() for row in suites.get(name).published]
# Section 4 of the paper: the printed averages contradict their own cells.
WRONG = {
    ("infinitebench-locret", "Phi-3-mini-128K", "MInference"): 34.32,
    ("infinitebench-locret", "Phi-3-mini-128K", "Locret"): 38.57,
    ("longbench-omnikv", "Llama-3-8B-262K", "OmniKV exp, 30 %"): 36.39,
    ("longbench-omnikv", "Yi-9B-200K", "InfLLM, about 30 %"): 40.46,
}


def test_every_task_is_found_by_name_and_says_what_it_measures() -> None:
    names = tasks.names()
    assert len(set(names)) == len(names) > 110
    for name in names:
        task = tasks.get(name)
        assert (task.name, task.family) == (name, name.partition("/")[0])
        assert task.source
        assert task.metric
    for family in ("infinitebench", "leval", "longbench"):
        assert {f"{family}/{form}" for form in golden(family)} <= set(tasks.names(family))
    assert [tasks.get(name).name for name in ("passkey", "number", "multikey")] == [
        *("niah/passkey", "infinitebench_generated/number_string", "ruler/niah_multikey_1"),
    ]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("longbench/qaspr", {}, 'task "longbench/qaspr" is unknown; did you mean longbench/qasper'),
        ("two_stage", {}, 'task "two_stage" was retired; release 0.1.0'),
        ("leval/tpo", {"prompt": "x"}, 'task leval/tpo: it has no option "prompt"; did you mean prompt_style?'),
        ("leval/tpo", {"prompt_style": "x"}, "task leval/tpo: prompt_style='x' is unknown; use one of fixed, official"),
        ("leval/tpo", {"max_new_tokens": "9"}, "task leval/tpo: max_new_tokens='9' must be a whole number, 1 or more"),
        ("scbench/kv", {"golden": 1}, 'scbench option "golden" was retired; release 0.1.0'),
        (
            "babilong/qa1",
            {"length": "3k"},
            'option "length" was retired: --lengths chooses it, and --suite babilong-0k',
        ),
    ],
)
def test_an_unknown_name_or_option_lists_the_nearest(name, options, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        tasks.get(name, **options)


def test_every_suite_names_tasks_that_there_are_once() -> None:
    for name in suites.names():
        suite = suites.get(name)
        assert set(suite.tasks) <= set(tasks.names())
        assert len(set(suite.tasks)) == len(suite.tasks)
        assert not suite.groups or tuple(task for group in suite.groups for task in group) == suite.tasks
    wanted = {"infinitebench-locret": 9, "infinitebench": 12, "leval-locret": 6, "longbench-en": 16, "longbench": 21}
    assert {name: len(suites.get(name).tasks) for name in wanted} == wanted
    assert all(suites.get(f"ruler-{k}k").tokens == 1024 * k for k in (4, 8, 16, 32, 64, 128))
    for name, message in (("infinitebench-lockret", "unknown; did you mean infinitebench-loc"), ("world", "retired")):
        with pytest.raises(ValueError, match=message):
            suites.get(name)


@pytest.mark.parametrize(("suite", "row"), ROWS, ids=lambda one: getattr(one, "name", getattr(one, "method", None)))
def test_printed_cells_give_the_printed_average(suite, row) -> None:
    known = {name: one for name, one in zip(suite.tasks, row.scores, strict=False) if one is not None}
    average = suite.average(known) if len(known) == len(suite.tasks) else None
    if not row.scores:
        assert suite.name.startswith("ruler-")
    elif (wrong := WRONG.get((suite.name, row.model, row.method))) is not None:
        assert average == pytest.approx(wrong, abs=0.01)
        assert abs(row.average - wrong) > 1
    else:
        assert average == pytest.approx(row.average, abs=0.1)


def test_averages_are_of_what_is_there_and_of_groups() -> None:
    scores = {"x": 10, "y": 20, "z": 60}
    for groups, average in (((), 30), ((("x", "y"), ("z",)), 37.5)):
        suite = suites.Suite(name="a", title="", tasks=("x", "y", "z"), groups=groups)
        assert (suite.average(scores), suite.average({"x": 10, "y": 20}), suite.average({})) == (average, 15, None)
