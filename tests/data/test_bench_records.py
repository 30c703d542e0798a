"""Rows of published files: every one that is there, and for each that cannot be asked its place and what is wrong."""

from __future__ import annotations

import json
import zipfile

import pytest
from bench_cases import entries, load, write_lines

from locret.data import tasks as benchmarks
from locret.data.tasks.published.loading import open_task
from locret.data.training.json_rows import BadRow, stream_entries

ROWS = [{"context": f"text {index}", "n": index} for index in range(5)]
GOOD = {"context": "a text", "input": "a question", "answers": ["an answer"]}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.slow
def test_every_kind_of_file_gives_its_rows_and_their_places(tmp_path):
    import datasets

    lines = write_lines(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    datasets.Dataset.from_list(ROWS).to_parquet(tmp_path / "rows.parquet")
    with zipfile.ZipFile(tmp_path / "rows.zip", "w") as archive:
        archive.write(lines, "data/rows.jsonl")
    for name in ("rows.jsonl", "rows.zip!data/rows.jsonl", "rows.json", "rows.parquet"):
        found = [(entry.where, entry.load()) for entry in stream_entries([tmp_path / name])]
        assert [row for _, row in found] == ROWS
        assert found[4][0] == f"{tmp_path}/{name}: row 4 (counted from 0)"


def test_a_byte_order_mark_windows_line_ends_and_empty_lines_are_no_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n  \n{"a": "\xe4\xb8\xad\\u2028"}')
    found = [(entry.where, entry.load()) for entry in stream_entries([path])]
    places = [f"{path}: row {row} (counted from 0)" for row in range(2)]
    assert found == list(zip(places, [{"a": 1}, {"a": "中\u2028"}], strict=True))


def test_a_line_as_long_as_allowed_is_a_row_and_one_byte_more_is_none(tmp_path):
    line = json.dumps({"a": "x" * 30}).encode()
    path = write_lines(tmp_path / "rows.jsonl", [line, line + b" ", {"a": 2}])
    first, longer, last = stream_entries([path], max_row_bytes=len(line))
    with pytest.raises(BadRow, match=rf": row 1 .* has {len(line) + 1} bytes where {len(line)} are allowed"):
        longer.load()
    assert (first.load(), last.load()) == ({"a": "x" * 30}, {"a": 2})
    # The last line may end without a line break.
    path.write_bytes(line)
    assert load(path, max_row_bytes=len(line)) == [{"a": "x" * 30}]


BAD = [
    (b'{"context": "a \xff"}', "invalid UTF-8", "is not UTF-8 at byte 15 of the row (0xff)"),
    (json.dumps({**GOOD, "context": "\ud800"}).encode(), "invalid UTF-8", "has half a surrogate pair"),
    (b'{"context": ', "not JSON", "is not a JSON object"),
    (b"[" * 100_000, "not JSON", "is not a JSON object"),
    (b'["a"]', "wrong type", "is of type list where an object is needed"),
    ({**GOOD, "context": " \n"}, "no context", "has an empty field 'context'"),
    ({**GOOD, "context": 3}, "wrong type", "has a field 'context' of type int where text is needed"),
    ({**GOOD, "context": None}, "wrong type", "has a field 'context' of type NoneType where text is needed"),
    ({"input": "q", "answers": ["a"]}, "no context", "has no field 'context' (it has input, answers)"),
    ({**GOOD, "answers": []}, "no answers", "has an empty field 'answers'"),
    ({**GOOD, "answers": None}, "no answers", "has an empty field 'answers'"),
    ({**GOOD, "answers": ["a", ""]}, "no answers", "has an empty field 'answers[1]'"),
    (
        {**GOOD, "answers": ["a", {"b": 1}]},
        "wrong type",
        "has a field 'answers[1]' of type dict where text",
    ),
    (
        {**GOOD, "answers": [None]},
        "wrong type",
        "has a field 'answers[0]' of type NoneType where text or",
    ),
    ({**GOOD, "answers": True}, "wrong type", "has a field 'answers' of type bool where text or a number is needed"),
    ({**GOOD, "dataset": "hotpotqa"}, "other task", "says 'hotpotqa' in field 'dataset' where 'qasper' is read"),
    (json.dumps({**GOOD, "context": "x" * 5_000_000}).encode(), "row too long", "bytes where 4,900,000 are allowed"),
]


@pytest.mark.parametrize(("row", "reason", "detail"), BAD, ids=[f"{i}-{bad[1]}" for i, bad in enumerate(BAD)])
def test_a_bad_row_is_named_with_file_and_line_and_left_out_only_on_request(tmp_path, row, reason, detail):
    path = write_lines(tmp_path / "qasper.jsonl", [GOOD, row, GOOD])
    task = benchmarks.get("longbench/qasper")
    with pytest.raises(BadRow) as refused:
        list(open_task(task, data_dir=tmp_path).items())
    assert str(refused.value).startswith(f"{path}: row 1 (counted from 0) ")
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
        (
            "infinitebench/code_debug",
            {**CHOICE, "answer": ["e"]},
            "has ['e'] in field 'answer', which is not one of",
        ),
        (
            "infinitebench/code_debug",
            {**CHOICE, "options": ["b"]},
            "has 1 entries in field 'options' where 4",
        ),
        ("infinitebench/code_run", {**NUMBER, "input": "f(1)"}, "names no call such as func_1(2) in field 'input': 'f"),
        (
            "infinitebench/math_find",
            {**NUMBER, "input": "What?"},
            "does not say \"The ... of\" in field 'input': '",
        ),
        (
            "infinitebench/math_calc",
            {**NUMBER, "answer": [1, "x"]},
            "holds 'x' in field 'answer' where a number is needed",
        ),
        (
            "longbench/passage_retrieval_en",
            GOOD,
            "holds 'an answer' in field 'answers' where 'Paragraph 12' is right",
        ),
        ("longbench/trec", GOOD, "has an empty field 'all_classes', and the metric looks for classes"),
        ("infinitebench/passkey", {"context": "c", "answer": "1"}, "has no field 'input' (it has context, an"),
        ("leval/tpo", {**EXAM, "outputs": ["a"]}, "has 2 instructions and 1 outputs where it needs as many"),
        ("leval/tpo", {**EXAM, "evaluation": 1}, "has a field 'evaluation' of type int where text is needed"),
        ("leval/sci_fi", EXAM, "holds 'a' in field 'outputs' without its [fact: ...] part"),
    ],
)
def test_fields_of_one_benchmark_are_checked_too(name, row, detail):
    with pytest.raises(BadRow) as refused:
        list(benchmarks.get(name).items(entries([row], "rows.jsonl:7")))
    assert str(refused.value).startswith(f"rows.jsonl:7 {detail}")


def test_a_file_that_is_none_is_refused_whole(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "no.parquet").write_text("no")
    (tmp_path / "no.zip").write_text("no")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("b.jsonl", "{}")
    for name, message in [
        ("empty.jsonl", "is empty; it needs at least one row"),
        ("no.parquet", "no.parquet cannot be read (Parquet file size"),
        ("no.zip!a.jsonl", "no.zip!a.jsonl cannot be read (File is not a zip file)"),
        ("a.zip!a.jsonl", "a.zip!a.jsonl cannot be read (\"There is no item named 'a.jsonl'"),
    ]:
        with pytest.raises(ValueError, match="^" + str(tmp_path)) as refused:
            load(tmp_path / name)
        assert message in str(refused.value)
    for name in ("missing.jsonl", "missing.parquet", "missing.zip!a.jsonl"):
        with pytest.raises(OSError, match="cannot be read") as missing:
            load(tmp_path / name)
        assert name.split("!")[0] in str(missing.value)
