"""Tasks and the rows of published files: found in a local copy or on the Hub, and what is wrong with others."""

from __future__ import annotations

import json
import re
import zipfile
from io import BytesIO

import pytest
import yaml
from bench_cases import HERE, entries, golden, write_lines
from hub_server import Repo

from locret.data import tasks
from locret.data.tasks.published import suites
from locret.data.tasks.rows import BadRow, candidates, open_rows, read_rows

GOOD = {"context": "a text", "input": "a question", "answers": ["an answer"]}
QASPER = tasks.get("longbench/qasper")
REFUSED = yaml.safe_load((HERE / "answers.yaml").read_text(encoding="utf-8"))


def test_every_kind_of_file_gives_its_rows_and_their_places(tmp_path) -> None:
    rows = [{"context": f"text {index} 中\u2028", "n": index} for index in range(5)]
    lines = write_lines(tmp_path / "rows.jsonl", [b"\xef\xbb\xbf" + json.dumps(rows[0]).encode(), b"\r", *rows[1:]])
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "lines.json").write_text("\n".join(map(json.dumps, rows)))
    with zipfile.ZipFile(tmp_path / "rows.zip", "w") as archive:
        archive.write(lines, "data/rows.jsonl")
    for name in ("rows.jsonl", "rows.zip!data/rows.jsonl", "rows.json", "lines.json"):
        found = list(read_rows(str(tmp_path / name)))
        assert [row.fields for row in found] == rows
        assert found[4].where == f"{tmp_path / name}: row 4 (counted from 0)"


def test_a_local_copy_may_lie_in_any_published_place(tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    for number, spot in enumerate(candidates(QASPER)):
        archive, _, member = spot.partition("!")
        path = tmp_path / str(number) / archive
        path.parent.mkdir(parents=True)
        if member:
            with zipfile.ZipFile(path, "w") as files:
                files.writestr(member, json.dumps(GOOD))
        else:
            write_lines(path, [GOOD])
        rows = open_rows(QASPER, [str(tmp_path / "empty"), str(tmp_path / str(number))])
        assert (rows.facts["file"], rows.facts["revision"]) == (spot.split("/")[-1], None)
        assert rows.sample(0).targets == ("an answer",)
        assert (rows.facts["items"], len(rows.facts["sha256"])) == (1, 64)


BAD = [
    (b'{"context": "a \xff"}', "is no intact file of rows"),
    (b'{"context": ', "is no intact file of rows"),
    (b'["a"]', "is of type list where an object is needed"),
    ({**GOOD, "context": 3}, "has a field 'context' of type int where text is needed"),
    ({"input": "q", "answers": ["a"]}, "has no field 'context' (it has input, answers)"),
    ({**GOOD, "answers": []}, "has an empty field 'answers'"),
    ({**GOOD, "dataset": "hotpotqa"}, "says 'hotpotqa' in field 'dataset' where 'qasper' is read"),
]


@pytest.mark.parametrize(("row", "detail"), BAD)
def test_a_bad_row_is_named_with_its_file_and_number(tmp_path, row, detail) -> None:
    path = write_lines(tmp_path / "qasper.jsonl", [GOOD, row, GOOD])
    with pytest.raises(ValueError, match=re.escape(detail)) as refused:
        open_rows(QASPER, [str(tmp_path)])
    assert str(refused.value).startswith(str(path))


def test_fields_of_one_benchmark_are_checked_too() -> None:
    for name, row, detail in REFUSED["rows"]:
        with pytest.raises(BadRow, match=f"^rows.jsonl:1 .*{re.escape(detail)}"):
            list(tasks.get(name).items(entries([row])))


def test_a_damaged_file_is_refused_with_the_way_out(tmp_path) -> None:
    for name, file in (("leval/tpo", "tpo.jsonl"), ("longbench/lcc", "data.zip")):
        (tmp_path / file).write_text("no")
        with pytest.raises(ValueError, match=rf"{file}.* is no intact file of rows \(.*\); fetch it again"):
            open_rows(tasks.get(name), [str(tmp_path)])


def test_a_task_is_fetched_from_the_hub_at_its_pinned_commit_and_from_the_cache_after_that(hub) -> None:
    archive = BytesIO()
    with zipfile.ZipFile(archive, "w") as files:
        files.writestr("data/qasper.jsonl", json.dumps(GOOD) + "\n")
    hub.repos[f"datasets/{QASPER.repo}"] = Repo(commits={QASPER.revision: {"data.zip": archive.getvalue()}})
    rows, file = open_rows(QASPER), "zai-org/LongBench/data.zip!data/qasper.jsonl"
    assert (rows.facts["file"], rows.facts["revision"]) == (file, QASPER.revision)
    assert hub.requests[-1] == ("GET", f"/datasets/{QASPER.repo}/resolve/{QASPER.revision}/data.zip")
    asked = len(hub.requests)
    assert open_rows(QASPER).sample(0).reply == "an answer"
    assert len(hub.requests) == asked  # a commit never changes: nothing is asked again


def test_what_the_hub_does_not_have_is_named(hub) -> None:
    task = tasks.get("leval/tpo")
    with pytest.raises(ValueError, match="cannot load L4NLP/LEval: it is neither a data set here"):
        open_rows(task)
    hub.repos[f"datasets/{task.repo}"] = Repo(commits={task.revision: {}}, branches={})
    with pytest.raises(ValueError, match=r"has no LEval/Exam/tpo.jsonl at .*, the rows of leval/tpo; give --data-dir"):
        open_rows(task)


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
    assert len(set(names)) == len(names) > 100
    for name in names:
        task = tasks.get(name)
        assert (task.name, task.family) == (name, name.partition("/")[0])
        assert task.source
        assert task.metric
    for family in ("infinitebench", "leval", "longbench"):
        assert {f"{family}/{form}" for form in golden(family)} <= set(tasks.names(family))
    assert [tasks.get(name).name for name in ("passkey", "number", "multikey")] == [
        *("niah/passkey", "infinitebench_generated/number_string", "ruler/niah_multikey_1")
    ]


def test_an_unknown_name_or_option_lists_the_nearest() -> None:
    for name, options, message in REFUSED["names"]:
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
