"""Published tasks are found by name, their rows in a local copy or on the Hub, and what is missing is named."""

from __future__ import annotations

import json
import re
import zipfile
from io import BytesIO

import pytest
from bench_cases import golden, write_lines
from hub_server import Repo

from locret.data import tasks as benchmarks
from locret.data.tasks.published.loading import candidates, open_task

ROW = {"context": "a text", "input": "a question", "answers": ["an answer"]}


def test_every_task_has_a_form_of_its_own_and_is_found_by_name():
    names = [name for name in benchmarks.names(None) if "/" in name]
    assert len(set(names)) == len(names)
    for name in names:
        assert benchmarks.get(name).name == name
    for family in ("infinitebench", "leval", "longbench"):
        assert {f"{family}/{form}" for form in golden(family)} <= set(benchmarks.names(family))


def test_the_protocols_are_the_published_ones():
    get = benchmarks.get
    new = {name: get(f"infinitebench/{name}").max_new_tokens for name in golden("infinitebench")}
    assert new == {
        "passkey": 6, "number_string": 12, "kv_retrieval": 50, "longbook_sum_eng": 1200, "longbook_qa_eng": 40,
        "longbook_choice_eng": 40, "longdialogue_qa_eng": 40, "longbook_qa_chn": 40, "code_debug": 5, "code_run": 5,
        "math_find": 3, "math_calc": 30000,
    }  # fmt: skip
    assert {get(f"infinitebench/{name}").limit for name in new} == {131072 - tokens for tokens in new.values()}
    assert not any(get(f"infinitebench/{name}").chat for name in new)
    assert {(get(f"leval/{name}").max_new_tokens, get(f"leval/{name}").limit) for name in golden("leval")} == {
        (512, 128_000 - 512)
    }
    no_chat = {name for name in golden("longbench") if not get(f"longbench/{name}").chat}
    assert no_chat == {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}
    samsum = get("longbench/samsum")
    assert (samsum.stop, samsum.min_new_tokens) == (("\n",), 1)
    assert not any(get(f"longbench/{name}").stop for name in golden("longbench") if name != "samsum")


def test_the_generation_lengths_of_longbench_are_those_of_its_own_configuration(shared):
    lengths = json.loads((shared / "data/longbench/config/dataset2maxlen.json").read_text())
    assert {name: benchmarks.get(f"longbench/{name}").max_new_tokens for name in lengths} == lengths


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("longbench/qaspr", {}, 'task "longbench/qaspr" is unknown; did you mean longbench/qasper'),
        ("qasper", {}, 'task "qasper" is unknown; did you mean longbench/qasper?'),
        ("", {}, 'task "" is unknown'),
        ("leval/tpo", {"prompt": "x"}, 'task leval/tpo: it has no option "prompt"; did you mean prompt_style?'),
        ("leval/tpo", {"prompt_style": "x"}, "task leval/tpo: prompt_style='x' is unknown; use one of fixed, official"),
        ("leval/tpo", {"limit": 1}, "task leval/tpo: limit=1 must be a number of tokens, 2 or more"),
        ("leval/tpo", {"max_new_tokens": "9"}, "task leval/tpo: max_new_tokens='9' must be a whole number, 1 or more"),
        ("infinitebench/passkey", {"answer_room": 1}, "answer_room=1 must be true or false"),
    ],
)
def test_an_unknown_name_or_option_lists_the_nearest(name, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        benchmarks.get(name, **options)


def test_options_stand_in_the_task():
    task = benchmarks.get("leval/codeU", prompt_style="official", limit=4096)
    assert task.options() == {
        "max_new_tokens": 512,
        "limit": 4096,
        "max_row_bytes": 4_900_000,
        "prompt_style": "official",
    }


@pytest.mark.parametrize("place", [0, 1, 2, 3, 4, 5, -1])
@pytest.mark.slow
def test_a_local_copy_may_lie_in_any_published_place(tmp_path, place):
    task = benchmarks.get("longbench/qasper")
    spot = candidates(task)[place]
    archive, _, member = spot.partition("!")
    if member:
        (tmp_path / archive).parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(tmp_path / archive, "w") as files:
            files.writestr(member, json.dumps(ROW))
    elif spot.endswith(".parquet"):
        import datasets

        (tmp_path / spot).parent.mkdir(parents=True, exist_ok=True)
        datasets.Dataset.from_list([ROW]).to_parquet(tmp_path / spot)
    else:
        write_lines(tmp_path / spot, [ROW])
    rows = open_task(task, data_dir=tmp_path)
    assert rows.path == rows.origin == str(tmp_path / spot)
    assert rows.revision is None
    assert [item.targets for item in rows.items()] == [("an answer",)]
    assert len(rows.sha256()) == 64


def test_several_local_copies_are_searched_in_order(tmp_path):
    write_lines(tmp_path / "b" / "data" / "qasper.jsonl", [ROW, ROW])
    (tmp_path / "a").mkdir()
    rows = open_task(benchmarks.get("longbench/qasper"), data_dir=[tmp_path / "a", tmp_path / "b"])
    assert rows.path == str(tmp_path / "b" / "data" / "qasper.jsonl")
    with pytest.raises(ValueError, match=r"holds no rows of longbench/qasper; looked for longbench/data/qasper\.jsonl"):
        open_task(benchmarks.get("longbench/qasper"), data_dir=tmp_path / "a")
    with pytest.raises(ValueError, match="is not a folder"):
        open_task(benchmarks.get("longbench/qasper"), data_dir=tmp_path / "c")
    with pytest.raises(ValueError, match="--data-revision abc is of no use with --data-dir"):
        open_task(benchmarks.get("longbench/qasper"), data_dir=tmp_path / "b", revision="abc")


def test_real_files_give_exactly_their_rows_and_fields(shared):
    data = shared / "data"
    listed = {entry["path"]: entry for entry in json.loads((data / "manifest.json").read_text())}
    roots = [data, data / "infinitebench_generated", data / "derived/infinitebench", data / "derived/leval"]
    found = 0
    for name in [name for family in ("infinitebench", "leval", "longbench") for name in benchmarks.names(family)]:
        task = benchmarks.get(name)
        try:
            rows = open_task(task, data_dir=roots)
        except ValueError:
            continue
        found += 1
        entry = listed[str(rows.path)[len(str(data)) + 1 :]]
        items = list(rows.items())
        assert rows.sha256() == entry["sha256"]
        with open(rows.path, encoding="utf-8") as stream:
            records = [json.loads(line) for line in stream]
        assert len(records) == entry["rows"]
        assert len({item.id for item in items}) == len(items)
        if name.startswith("leval/"):
            asked = [
                (row, answer)
                for row in records
                if row["evaluation"] in ("exam", "f1", "rouge")
                for answer in row["outputs"]
            ]
            kept = [item for item in items if not item.plain]
            assert [item.document for item in kept] == [row["input"] for row, _ in asked]
            if name != "leval/sci_fi":
                assert [item.targets for item in kept] == [(answer,) for _, answer in asked]
            assert task.size is None or len(kept) <= task.size
        else:
            contexts = [row["context"].replace("$$MASK$$", "**MASK**") for row in records]
            assert [item.document for item in items] == contexts
            assert len(items) <= (task.size or len(items))
            for item, row in zip(items, records, strict=True):
                answers = row["answers" if name.startswith("longbench/") else "answer"]
                answers = [str(answer) for answer in (answers if isinstance(answers, list) else [answers])]
                assert list(item.targets) == answers or (len(item.targets), item.targets[0]) == (2, answers[0])
    assert found == 44


def test_a_task_is_fetched_from_the_hub_at_its_pinned_commit_and_from_the_cache_after_that(hub):
    task = benchmarks.get("longbench/qasper")
    archive = BytesIO()
    with zipfile.ZipFile(archive, "w") as files:
        files.writestr("data/qasper.jsonl", json.dumps(ROW) + "\n")
    hub.repos[f"datasets/{task.repo}"] = Repo(commits={task.revision: {"data.zip": archive.getvalue()}})
    rows = open_task(task)
    assert [item.targets for item in rows.items()] == [("an answer",)]
    assert (rows.origin, rows.revision) == ("zai-org/LongBench/data.zip!data/qasper.jsonl", task.revision)
    assert hub.requests[-1] == ("GET", f"/datasets/{task.repo}/resolve/{task.revision}/data.zip")
    asked = len(hub.requests)
    assert len(list(open_task(task).items())) == 1
    assert len(hub.requests) == asked  # a commit never changes: nothing is asked again


def test_another_revision_of_the_hub_can_be_asked_for(hub):
    task = benchmarks.get("leval/tpo")
    row = {"input": "d", "instructions": ["q"], "outputs": ["A"], "evaluation": "exam"}
    repo = Repo(commits={"b" * 40: {"LEval/Exam/tpo.jsonl": json.dumps(row).encode()}}, branches={"newer": "b" * 40})
    hub.repos[f"datasets/{task.repo}"] = repo
    rows = open_task(task, revision="newer")
    assert rows.revision == "b" * 40
    assert [item.reply for item in rows.items()] == ["A"]


@pytest.mark.slow
def test_what_the_hub_does_not_have_is_named(hub):
    task = benchmarks.get("leval/tpo")
    with pytest.raises(ValueError, match=f"leval/tpo: L4NLP/LEval/LEval/Exam/tpo.jsonl at {task.revision}: .* data"):
        open_task(task)
    hub.repos[f"datasets/{task.repo}"] = Repo(commits={task.revision: {}}, branches={})
    with pytest.raises(ValueError, match="the Hub has no such file that you may read; check --data-revision, or give"):
        open_task(task)
    with pytest.raises(ValueError, match="at main: the Hub has no such revision"):
        open_task(task, revision="main")
    hub.broken_with = 500
    with pytest.raises(OSError, match="could not be fetched|was not reached"):
        open_task(task)


def test_without_the_network_a_local_copy_is_asked_for():
    with pytest.raises(OSError, match="is not in the download cache .* or give --data-dir with a local copy"):
        open_task(benchmarks.get("longbench/qasper"))
    with pytest.raises(ValueError, match="task infinitebench/passkey_8192 is not on the Hub; give --data-dir"):
        open_task(benchmarks.get("infinitebench/passkey_8192"))
