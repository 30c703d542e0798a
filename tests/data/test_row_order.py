"""Rows come in an order that seed and epoch decide, and a stream goes on where it stopped."""

from __future__ import annotations

import itertools
import json

import pytest
from embedded import tiny_tokenizer

from locret.data.training.row_order import Buffered, StreamedRows
from locret.data.training.sources import load_rows
from locret.data.training.stream import TrainingStream

TOKENIZER = tiny_tokenizer()
ROWS = [{"prompt": "the house " * (index + 1), "answer": "Oslo"} for index in range(12)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    return path


def stream_of(path, **options):
    rows = load_rows(str(path), streaming=True)
    options = {"seed": 1, "max_length": 500, "shuffle_buffer": 4, **options}
    return TrainingStream(rows, TOKENIZER, **options)


def take(stream, count):
    return [example.row for example in itertools.islice(stream, count)]


def test_every_epoch_of_a_stream_has_all_rows_in_another_order(path):
    stream = stream_of(path)
    first, second = take(stream, 12), take(stream, 12)
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second
    assert take(stream_of(path), 12) == first
    assert take(stream_of(path, seed=2), 12) != first


def test_a_row_comes_at_most_a_buffer_before_its_place(path):
    order = take(stream_of(path), 12)
    assert all(row - place <= 4 for place, row in enumerate(order))
    assert order != list(range(12))
    assert take(stream_of(path, shuffle_buffer=1), 12) == list(range(12))


@pytest.mark.parametrize("done", [0, 5, 12, 17])
def test_a_restored_stream_goes_on_where_the_state_was_taken(path, done):
    with path.open("a") as file:
        file.write('\n{"prompt": "the house", "answer": ""}')
    uninterrupted = stream_of(path, skip_bad_rows=True)
    expected = take(uninterrupted, done + 20)[done:]
    first = stream_of(path, skip_bad_rows=True)
    take(first, done)
    resumed = stream_of(path, skip_bad_rows=True)
    resumed.restore(json.loads(json.dumps(first.state())))
    assert take(resumed, 20) == expected
    assert resumed.report.to_dict() == uninterrupted.report.to_dict()


def test_processes_together_read_what_one_process_reads(path):
    alone = take(stream_of(path), 10)
    shared = [take(stream_of(path, rank=rank, world=2), 5) for rank in range(2)]
    assert [shared[index % 2][index // 2] for index in range(10)] == alone


def test_another_buffer_is_another_stream(path):
    with pytest.raises(ValueError, match="^--resume: the checkpoint's stream was made with shuffle_buffer=4, this run"):
        stream_of(path, shuffle_buffer=5).restore(stream_of(path).state())


def test_a_row_is_read_only_when_its_turn_comes(path):
    path.write_text(path.read_text() + '\n{"prompt": ')
    stream = stream_of(path, shuffle_buffer=1)
    assert take(stream, 12) == list(range(12))
    with pytest.raises(ValueError, match=r"rows.jsonl:13 \(row 12 from 0\) is not a JSON object .*--skip-bad-rows"):
        next(stream)


def test_a_buffer_holds_no_more_rows_than_it_may():
    opened = itertools.count()
    entries = StreamedRows(lambda: (next(opened) and None for _ in range(100)))
    next(Buffered(entries, 0, 10).epoch(0))
    assert next(opened) == 11


@pytest.mark.parametrize("streaming", [False, True])
def test_a_row_of_a_table_that_is_not_utf8_is_found(tmp_path, streaming):
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = [b"the house", b"caf\xe9", b"Oslo"]
    offsets = pa.array([0, 9, 13, 17], pa.int32()).buffers()[1]
    prompts = pa.StringArray.from_buffers(3, offsets, pa.py_buffer(b"".join(texts)))
    pq.write_table(pa.table({"prompt": prompts, "answer": ["a", "b", "c"]}), tmp_path / "rows.parquet")
    rows = load_rows(str(tmp_path / "rows.parquet"), streaming=streaming)
    if streaming:
        with pytest.raises(ValueError, match=r"rows.parquet: cannot be read after \d rows \(.*leave out --streaming$"):
            list(rows.begin())
        return
    stream = TrainingStream(rows, TOKENIZER, seed=0, max_length=50, skip_bad_rows=True)
    assert sorted(take(stream, 2)) == [0, 2]
    assert len(take(stream, 1)) == 1
    assert stream.dropped == {"invalid UTF-8": 1}


@pytest.mark.parametrize("kind", ["parquet", "saved", "folder"])
def test_whatever_can_be_loaded_can_be_streamed(tmp_path, kind):
    import datasets

    table = datasets.Dataset.from_list(ROWS)
    if kind == "parquet":
        table.to_parquet(tmp_path / "rows.parquet")
    elif kind == "saved":
        table.save_to_disk(tmp_path / "rows")
    else:
        (tmp_path / "rows").mkdir()
        (tmp_path / "rows" / "train.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
        (tmp_path / "rows" / "test.jsonl").write_text(json.dumps(ROWS[0]))
    source = str(tmp_path / ("rows.parquet" if kind == "parquet" else "rows"))
    streamed = load_rows(source, streaming=True)
    assert [entry.load() for entry in streamed.begin()] == ROWS == list(load_rows(source))
    if kind == "folder":
        assert len(load_rows(source, split="test")) == 1
        with pytest.raises(ValueError, match="there is no split 'dev'; choose one of train, test"):
            load_rows(source, split="dev", streaming=True)


def test_columns_are_those_of_the_first_rows_together_even_if_some_are_bad(tmp_path):
    rows = ["{", '{"instruction": "Who?"}', '{"instruction": "Who?", "output": "Me."}']
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    stream = TrainingStream(
        load_rows(str(tmp_path / "rows.jsonl")), TOKENIZER, seed=0, max_length=99, skip_bad_rows=True
    )
    assert stream.schema.name == "LongAlpaca"
    assert take(stream, 2) == [2, 2]
    assert stream.dropped == {"not JSON": 1, "no answer": 1}
    (tmp_path / "bad.jsonl").write_text("{\n[")
    with pytest.raises(ValueError, match=r"no row can be read; .*bad.jsonl:1 \(row 0 from 0\) is not a JSON object"):
        TrainingStream(load_rows(str(tmp_path / "bad.jsonl")), TOKENIZER, seed=0, max_length=99)


def test_rows_outside_the_wanted_lengths_are_no_bad_rows(path):
    lengths = {
        example.row: example.prompt_ids.shape[1] + example.answer_ids.shape[1]
        for example in itertools.islice(stream_of(path), 12)
    }
    low, high = sorted(lengths.values())[2], sorted(lengths.values())[8]
    stream = stream_of(path, min_tokens=low, max_tokens=high)
    wanted = sorted(row for row, length in lengths.items() if low <= length <= high)
    assert sorted(take(stream, len(wanted))) == wanted
    take(stream, 1)
    assert stream.dropped == {
        f"shorter than --min-tokens {low}": sum(length < low for length in lengths.values()),
        f"longer than --max-tokens {high}": sum(length > high for length in lengths.values()),
    }


def test_the_report_names_the_first_rows_of_each_reason_once(tmp_path):
    bad = [{"prompt": "the house", "answer": ""}] * 30
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, [ROWS[0], *bad])))
    stream = stream_of(tmp_path / "rows.jsonl", skip_bad_rows=True, shuffle_buffer=1)
    take(stream, 4)
    report = stream.report.to_dict()
    assert (report["read"], report["used"]) == (31, 1)
    assert report["dropped"]["no answer"]["count"] == 30
    places = [f"{tmp_path / 'rows.jsonl'}:{line} (row {line - 1} from 0)" for line in range(2, 22)]
    assert report["dropped"]["no answer"]["first_rows"] == places
    assert str(stream.report) == "30 no answer"
