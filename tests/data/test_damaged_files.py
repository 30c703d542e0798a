"""Damaged archives and Parquet files are one sentence that names the file, or give rows; nothing else."""

from __future__ import annotations

import json
import random
import zipfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from locret.data.training.json_rows import BadRow, stream_entries
from locret.data.training.row_order import Permuted, StreamedRows
from locret.data.training.sources import load_rows

ROWS = [{"instruction": f"The number of row {i} is {i}. " * 20, "output": f"It is {i}."} for i in range(30)]
COMPRESSIONS = {"deflate": zipfile.ZIP_DEFLATED, "bzip2": zipfile.ZIP_BZIP2, "lzma": zipfile.ZIP_LZMA}


def mutations(content: bytes, count: int):
    """Yield copies with a few bytes changed, some of them cut off."""
    drawn = random.Random(len(content))
    for _ in range(count):
        changed = bytearray(content)
        for _ in range(drawn.choice((1, 1, 3))):
            changed[drawn.randrange(len(changed))] = drawn.randrange(256)
        yield bytes(changed[: drawn.randrange(len(changed))] if drawn.random() < 0.1 else changed)


def read(entries) -> None:
    for entry in entries:
        try:
            entry.load()
        except BadRow:
            continue


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_damaged_archive_is_one_sentence(tmp_path: Path, compression: str) -> None:
    archive = tmp_path / "rows.zip"
    with zipfile.ZipFile(archive, "w", COMPRESSIONS[compression]) as file:
        file.writestr("a/rows.jsonl", "\n".join(map(json.dumps, ROWS)))
    messages = []
    for content in list(mutations(archive.read_bytes(), 60)):
        archive.write_bytes(content)
        try:
            read(stream_entries([f"{archive}!a/rows.jsonl"]))
        except ValueError as error:
            messages.append(str(error))
    assert len(messages) > 20
    assert all(str(archive) in message and "\n" not in message for message in messages)


@pytest.mark.parametrize("compression", ["snappy", "none"])
def test_a_damaged_table_is_one_sentence_however_it_is_read(tmp_path: Path, compression: str) -> None:
    whole = tmp_path / "whole.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), whole, compression=compression)
    messages = []
    for number, content in enumerate(mutations(whole.read_bytes(), 12)):
        table = tmp_path / f"{number}.parquet"  # datasets remembers a file by its name
        table.write_bytes(content)
        for way in ("entries", "indexed", "streamed"):
            try:
                if way == "entries":
                    read(stream_entries([table]))
                    continue
                rows = load_rows(str(table), streaming=way == "streamed")
                read(rows.begin() if isinstance(rows, StreamedRows) else Permuted(rows, 0).in_file_order())
            except ValueError as error:
                messages.append(str(error))
    assert len(messages) > 5
    assert all(".parquet" in message and "\n" not in message for message in messages)


def test_a_saved_data_set_that_is_damaged_is_one_sentence(tmp_path: Path) -> None:
    for content in ("{}", "[", '{"_data_files": [{"filename": "none.arrow"}]}'):
        (tmp_path / "state.json").write_text(content)
        with pytest.raises(ValueError, match="cannot be read .*; save the data set again"):
            load_rows(str(tmp_path))
