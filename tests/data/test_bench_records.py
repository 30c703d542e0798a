"""Rows of published files: every one that is there, and for each that cannot be asked its place and what is wrong."""

from __future__ import annotations

import json
import zipfile

import pytest
from bench_cases import write_lines

from locret.data.tasks import published as benchmarks
from locret.data.tasks.published.base import BadRow
from locret.data.tasks.published.loading import open_task
from locret.data.tasks.published.records import read_records

ROWS = [{"context": f"text {index}", "n": index} for index in range(5)]
GOOD = {"context": "a text", "input": "a question", "answers": ["an answer"]}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def test_every_kind_of_file_gives_its_rows_and_their_places(tmp_path):
    import datasets

    lines = write_lines(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    datasets.Dataset.from_list(ROWS).to_parquet(tmp_path / "rows.parquet")
    with zipfile.ZipFile(tmp_path / "rows.zip", "w") as archive:
        archive.write(lines, "data/rows.jsonl")
    for name in ("rows.jsonl", "rows.zip!data/rows.jsonl"):
        places = [f"{tmp_path}/{name}:{number}" for number in range(1, 6)]
        assert list(read_records(tmp_path / name)) == list(zip(places, ROWS, strict=True))
    for name in ("rows.json", "rows.parquet"):
        places = [f"{tmp_path}/{name}: row {number}" for number in range(5)]
        assert list(read_records(tmp_path / name)) == list(zip(places, ROWS, strict=True))


def test_a_byte_order_mark_windows_line_ends_and_empty_lines_are_no_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n  \n{"a": "\xe4\xb8\xad\\u2028"}')
    assert list(read_records(path)) == [(f"{path}:1", {"a": 1}), (f"{path}:4", {"a": "中\u2028"})]


def test_a_line_as_long_as_allowed_is_a_row_and_one_byte_more_is_none(tmp_path):
    line = json.dumps({"a": "x" * 30}).encode()
    path = write_lines(tmp_path / "rows.jsonl", [line, line + b" ", {"a": 2}])
    _, longer, last = (row for _, row in read_records(path, max_row_bytes=len(line)))
    assert str(longer).startswith(f"{path}:2: the line has {len(line) + 1} bytes where {len(line)} are allowed")
    assert last == {"a": 2}
    # The last line may end without a line break.
    path.write_bytes(line)
    assert [row for _, row in read_records(path, max_row_bytes=len(line))] == [{"a": "x" * 30}]


BAD = [
    (b'{"context": "a \xff"}', "invalid UTF-8", "byte 15 of the line (0xff) is not UTF-8"),
    (json.dumps({**GOOD, "context": "\ud800"}).encode(), "invalid UTF-8", "field 'context' holds half a surrogate"),
    (b'{"context": ', "not JSON", "the line is not JSON"),
    (b"[" * 100_000, "not JSON", "the line is not JSON"),
    (b'["a"]', "wrong type", "the row is of type list where an object is needed"),
    ({**GOOD, "context": " \n"}, "no context", "field 'context' is empty"),
    ({**GOOD, "context": 3}, "wrong type", "field 'context' is of type int where text is needed"),
    ({**GOOD, "context": None}, "wrong type", "field 'context' is of type NoneType where text is needed"),
    ({"input": "q", "answers": ["a"]}, "no context", "field 'context' is missing (the row has input, answers)"),
    ({**GOOD, "answers": []}, "no answers", "field 'answers' is empty"),
    ({**GOOD, "answers": None}, "no answers", "field 'answers' is empty"),
    ({**GOOD, "answers": ["a", ""]}, "no answers", "field 'answers[1]' is empty"),
    ({**GOOD, "answers": ["a", {"b": 1}]}, "wrong type", "field 'answers[1]' is of type dict where text or a number"),
    ({**GOOD, "answers": [None]}, "wrong type", "field 'answers[0]' is null where text or a number is needed"),
    ({**GOOD, "answers": True}, "wrong type", "field 'answers' is of type bool where text or a number is needed"),
    ({**GOOD, "dataset": "hotpotqa"}, "other task", "field 'dataset' says 'hotpotqa' where 'qasper' is read"),
    (json.dumps({**GOOD, "context": "x" * 5_000_000}).encode(), "line too long", "bytes where 4,900,000 are allowed"),
]


@pytest.mark.parametrize(("row", "reason", "detail"), BAD, ids=[f"{i}-{bad[1]}" for i, bad in enumerate(BAD)])
def test_a_bad_row_is_named_with_file_and_line_and_left_out_only_on_request(tmp_path, row, reason, detail):
    path = write_lines(tmp_path / "qasper.jsonl", [GOOD, row, GOOD])
    task = benchmarks.get("longbench/qasper")
    with pytest.raises(BadRow) as refused:
        list(open_task(task, data_dir=tmp_path).items())
    assert str(refused.value).startswith(f"{path}:2: ")
    assert detail in str(refused.value)
    assert str(refused.value).endswith("mend or drop the row, or pass --skip-bad-rows to leave out such rows")
    rows = open_task(task, data_dir=tmp_path, skip_bad_rows=True)
    assert [item.id for item in rows.items()] == ["0", "2"]
    assert rows.skipped_by_reason() == {reason: 1}
    list(rows.items())
    assert len(rows.skipped) == 1  # reading again counts anew


CHOICE = {"context": "c", "input": "q", "options": ["a", "b", "c", "d"], "answer": ["b"]}
NUMBER = {**CHOICE, "answer": [7]}
EXAM = {"input": "d", "instructions": ["q", "r"], "outputs": ["a", "b"], "evaluation": "exam"}


@pytest.mark.parametrize(
    ("name", "row", "detail"),
    [
        ("infinitebench/code_debug", {**CHOICE, "answer": ["e"]}, "field 'answer' is ['e'], which is not one of the"),
        ("infinitebench/code_debug", {**CHOICE, "options": ["b"]}, "field 'options' has 1 entries where 4 are needed"),
        ("infinitebench/code_run", {**NUMBER, "input": "f(1)"}, "field 'input' names no call such as func_1(2): 'f"),
        ("infinitebench/math_find", {**NUMBER, "input": "What?"}, "field 'input' does not say \"The ... of\": 'What?'"),
        (
            "infinitebench/math_calc",
            {**NUMBER, "answer": [1, "x"]},
            "field 'answer' holds 'x' where a number is needed",
        ),
        (
            "longbench/passage_retrieval_en",
            GOOD,
            "field 'answers' holds 'an answer' where 'Paragraph 12' would be right",
        ),
        ("longbench/trec", GOOD, "field 'all_classes' is empty, and the metric looks for classes"),
        ("infinitebench/passkey", {"context": "c", "answer": "1"}, "field 'input' is missing (the row has context, an"),
        ("leval/tpo", {**EXAM, "outputs": ["a"]}, "the row has 2 instructions and 1 outputs where it needs as many"),
        ("leval/tpo", {**EXAM, "evaluation": 1}, "field 'evaluation' is of type int where text is needed"),
        ("leval/sci_fi", EXAM, "field 'outputs' holds 'a' without its [fact: ...] part"),
    ],
)
def test_fields_of_one_benchmark_are_checked_too(name, row, detail):
    with pytest.raises(BadRow) as refused:
        list(benchmarks.get(name).items([("rows.jsonl:7", row)]))
    assert str(refused.value).startswith(f"rows.jsonl:7: {detail}")


def test_a_file_that_is_none_is_refused_whole(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "object.json").write_text('{"a": 1}')
    (tmp_path / "lines.json").write_text('{"a": 1}\n{"a": 2}\n')
    (tmp_path / "bytes.json").write_bytes(b'["\xff"]')
    (tmp_path / "no.parquet").write_text("no")
    (tmp_path / "no.zip").write_text("no")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("b.jsonl", "{}")
    for name, message in [
        ("empty.jsonl", "is empty; it needs at least one row"),
        ("object.json", "holds a dict where a list of rows is needed"),
        ("lines.json", "a file with one object a line must end in .jsonl"),
        ("bytes.json", "byte 2 is not UTF-8"),
        ("no.parquet", "no.parquet is not Parquet"),
        ("no.zip!a.jsonl", "no.zip is no intact zip archive"),
        ("a.zip!a.jsonl", "a.zip has no file a.jsonl inside"),
        ("rows.csv", "the ending '.csv' is not known; convert the file to .jsonl, .json, .parquet"),
    ]:
        with pytest.raises(ValueError, match="^" + str(tmp_path)) as refused:
            list(read_records(tmp_path / name))
        assert message in str(refused.value)
    for name in ("missing.jsonl", "missing.parquet", "missing.zip!a.jsonl"):
        with pytest.raises(OSError, match="cannot be read") as missing:
            list(read_records(tmp_path / name))
        assert name.split("!")[0] in str(missing.value)
