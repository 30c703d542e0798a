"""Rows of JSON files are found where they lie, and one that cannot be read stops only itself."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from locret.data.training.json_rows import BadRow, JsonRows, stream_entries

# Values with all that could mislead a search for the end of a row.
TEXT = st.text(st.sampled_from('a"\\{}[],:\n é\u4e2d'), max_size=12)
VALUES = st.recursive(TEXT | st.none() | st.integers(), lambda inner: st.lists(inner, max_size=3), max_leaves=5)
ROWS = st.lists(st.dictionaries(TEXT, VALUES, max_size=3), min_size=1, max_size=6).filter(any)


def rows_of(path, **options):
    return JsonRows([path], **{"max_row_bytes": 10_000, **options})


def outcome(entry):
    try:
        return entry.load()
    except BadRow as error:
        return error.reason


@settings(max_examples=150, deadline=None)
@given(rows=ROWS, indent=st.sampled_from([None, 0, 2]), ascii_only=st.booleans(), mark=st.booleans())
@pytest.mark.slow
def test_a_list_gives_what_json_gives_however_it_is_written(tmp_path_factory, rows, indent, ascii_only, mark):
    path = tmp_path_factory.mktemp("list") / "rows.json"
    path.write_text(json.dumps(rows, indent=indent, ensure_ascii=ascii_only), encoding="utf-8-sig" if mark else "utf-8")
    assert list(rows_of(path)) == rows
    assert [entry.load() for entry in stream_entries([path], max_row_bytes=10_000)] == rows


@settings(max_examples=50, deadline=None)
@given(rows=ROWS, suffix=st.sampled_from(["json", "jsonl"]), end=st.sampled_from(["\n", "\r\n", "\n\n \n"]))
def test_lines_give_their_rows_and_blank_ones_none(tmp_path_factory, rows, suffix, end):
    path = tmp_path_factory.mktemp("lines") / f"rows.{suffix}"
    path.write_bytes(end.join(map(json.dumps, rows)).encode())
    assert list(rows_of(path)) == rows


def test_places_are_the_lines_where_rows_begin(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n\n{"a": 2}\n')
    (tmp_path / "rows.json").write_text('[\n {\n  "a": "\\n"\n },\n {"a": 2}, {"a": 3}\n]\n')
    rows = JsonRows([tmp_path / "rows.jsonl", tmp_path / "rows.json"], max_row_bytes=100)
    ends = [rows.entry(index).where.removeprefix(f"{tmp_path}/") for index in range(len(rows))]
    assert ends == [
        "rows.jsonl:1 (row 0 from 0)",
        "rows.jsonl:3 (row 1 from 0)",
        "rows.json:2 (row 2 from 0)",
        "rows.json:5 (row 3 from 0)",
        "rows.json:5 (row 4 from 0)",
    ]
    assert list(rows.select([4, 0])) == [{"a": 3}, {"a": 1}]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("rows.jsonl", b'{"a": 1}\n{"a": "caf\xe9"}\n{"a": 3}', [{"a": 1}, "invalid UTF-8", {"a": 3}]),
        ("rows.json", b'[{"a": 1}, {"a": "caf\xe9"}, {"a": 3}]', [{"a": 1}, "invalid UTF-8", {"a": 3}]),
        ("rows.jsonl", b'{"a": 1}\n[2]\n"x"\nnull', [{"a": 1}, "wrong type", "wrong type", "wrong type"]),
        ("rows.json", b'[{"a": 1}, [2], "x", null]', [{"a": 1}, "wrong type", "wrong type", "wrong type"]),
        ("rows.jsonl", b'{"a": 1}\n{"a": \n{"a": 3}', [{"a": 1}, "not JSON", {"a": 3}]),
        ("rows.json", b'[{"a": 1}, {"a": }, {"a": 3}]', [{"a": 1}, "not JSON", {"a": 3}]),
        ("rows.json", b'[{"a": 1}, {"a": "cut of', [{"a": 1}, "not JSON"]),
        ("rows.json", b'[{"a": 1}, {"a": 2}] and more', [{"a": 1}, {"a": 2}, "not JSON"]),
        ("rows.json", b'{"a": [\n1\n]}', ["not JSON", "wrong type", "not JSON"]),
        ("rows.jsonl", b'{"a": 1}\n{"a": "' + b"x" * 200 + b'"}\n{"a": 3}', [{"a": 1}, "row too long", {"a": 3}]),
        ("rows.json", b'[{"a": 1}, {"a": "' + b"x" * 200 + b'"}, {"a": 3}]', [{"a": 1}, "row too long", {"a": 3}]),
    ],
)
def test_a_row_that_cannot_be_read_stops_only_itself(tmp_path, name, content, expected):
    (tmp_path / name).write_bytes(content)
    rows = rows_of(tmp_path / name, max_row_bytes=100)
    assert [outcome(rows.entry(index)) for index in range(len(rows))] == expected
    streamed = stream_entries([tmp_path / name], max_row_bytes=100)
    assert [outcome(entry) for entry in streamed] == expected


def test_a_long_row_names_its_size_and_the_option(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"a": "x" * 5_000_000}))
    with pytest.raises(BadRow, match=r"jsonl:1 .* has 5,000,009 bytes where 4,900,000 are allowed \(--max-row-bytes"):
        rows_of(tmp_path / "rows.jsonl", max_row_bytes=4_900_000)[0]


@pytest.mark.parametrize("content", [b"", b" [ ] \n", b"\xef\xbb\xbf\n", b"\n" * 5000])
def test_an_empty_file_is_refused(tmp_path, content):
    (tmp_path / "rows.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"rows.json is empty; it needs at least one row$"):
        rows_of(tmp_path / "rows.json")


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="permissions do not bind this user")
def test_a_file_without_permission_is_an_os_error(tmp_path):
    (tmp_path / "rows.json").write_text('[{"a": 1}]')
    (tmp_path / "rows.json").chmod(0)
    with pytest.raises(OSError, match="rows.json cannot be read"):
        rows_of(tmp_path / "rows.json")
