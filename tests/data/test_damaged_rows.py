"""Files of rows that are damaged are refused in one sentence, or only the damaged rows are."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import mutations
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from locret.data.training.json_rows import stream_entries
from locret.data.training.sources import load_rows

ROWS = [
    {"instruction": "Name a colour.", "input": "", "output": "red"},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    {"context": "long text " * 9, "input": "who?", "answers": ["x", "y"], "length": 3},
]


def lines() -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)


def archive(packing: int) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", packing) as files:
        files.writestr("data/rows.jsonl", lines())
    return buffer.getvalue()


def table() -> bytes:
    parquet = pytest.importorskip("pyarrow.parquet", reason="Parquet files need pyarrow")
    import pyarrow

    buffer = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist([ROWS[0], ROWS[0]]), buffer)
    return buffer.getvalue()


FILES = {
    "rows.jsonl": lines,
    "rows.json": lambda: json.dumps(ROWS, indent=1).encode(),
    "stored.zip": lambda: archive(zipfile.ZIP_STORED),
    "packed.zip": lambda: archive(zipfile.ZIP_DEFLATED),
    "rows.parquet": table,
}


def read(path: Path) -> int:
    named = f"{path}!data/rows.jsonl" if path.suffix == ".zip" else str(path)
    read = 0
    for entry in stream_entries([named], max_row_bytes=10_000):
        read += mutations.loaded_or_refused(entry.load) is not None
    return read


@settings(max_examples=settings().max_examples // 2)
@given(data=st.data())
def test_damaged_files_of_rows_are_refused_or_read(tmp_path_factory: Any, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(FILES)))
    content = mutations.bytes_of(data.draw, FILES[name]())
    path = mutations.put(tmp_path_factory.getbasetemp(), name, content)
    mutations.loaded_or_refused(lambda: read(path))


@given(data=st.data())
def test_odd_values_are_refused_or_read(tmp_path_factory: Any, data: st.DataObject) -> None:
    rows = mutations.values_of(data.draw, ROWS)
    content = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    path = mutations.put(tmp_path_factory.getbasetemp(), "odd.jsonl", content or b"\n")
    mutations.loaded_or_refused(lambda: read(path))


@settings(max_examples=settings().max_examples // 4)
@given(data=st.data())
def test_damaged_data_sets_are_refused_or_read(tmp_path_factory: Any, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(("rows.jsonl", "rows.json", "rows.parquet")))
    content = mutations.bytes_of(data.draw, FILES[name]())
    path = mutations.put(tmp_path_factory.getbasetemp() / "sets", name, content)
    mutations.loaded_or_refused(lambda: len(load_rows(str(path))))
