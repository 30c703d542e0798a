"""Files of every kind give their rows or one sentence, every schema is one Row, and texts of your own make some."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import mutations
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from locret.conversation.head_shares import REQUEST
from locret.conversation.turns import Message
from locret.data.training import text_rows
from locret.data.training.rows import Row, detect_schema, read_row
from locret.data.training.sources import BadRow, load_rows

ROWS = [{"prompt": f"question {index}", "answer": f"answer {index}"} for index in range(7)]


# -- files -----------------------------------------------------------------------------------------------------------


def table() -> bytes:
    import pyarrow
    import pyarrow.parquet

    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), buffer)
    return buffer.getvalue()


FILES = {
    "rows.jsonl": lambda: "\n".join(map(json.dumps, ROWS)).encode(),
    "rows.json": lambda: json.dumps(ROWS, indent=1).encode(),
    "rows.parquet": table,
}


@settings(max_examples=40)
@given(data=st.data())
def test_damaged_files_of_rows_are_refused_in_one_sentence_or_read(tmp_path_factory: Any, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(FILES)))
    folder = tmp_path_factory.mktemp("damaged")  # datasets remembers a file by its name
    path = mutations.put(folder, name, mutations.bytes_of(data.draw, FILES[name]()))
    mutations.loaded_or_refused(lambda: list(load_rows(str(path))))


# -- data sets -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl", "rows.parquet", "folder"])
def test_local_data_of_every_kind_give_their_rows(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "folder":
        mutations.put(path / "more", "train.jsonl", FILES["rows.jsonl"]())
        mutations.put(path, "test.jsonl", b'{"prompt": "held back"}')
        assert list(load_rows(str(path), split="test")) == [{"prompt": "held back", "answer": None}]
    else:
        path.write_bytes(FILES[name]())
        assert list(load_rows(str(path), split="train[:2]")) == ROWS[:2]
    assert list(load_rows(str(path))) == ROWS


REFUSED = [
    ("LongAlpca", {}, r"no data set of that name; did you mean LongAlpaca or LongAlpaca-16k or LongAlign"),
    ("no/such.json", {}, "no such file or folder; check the path"),
    ("empty.json", {}, r"empty.json cannot be read \(it is empty; it needs at least one row\); check the file"),
    ("rows.csv", {}, r"its ending is not known; convert it to .json, .jsonl, .parquet"),
    (
        "rows.json",
        {"split": "test"},
        r"rows.json cannot be read \(Unknown split \"test\".*\); check the file and the split",
    ),
    ("rows.json", {"split": "train[7:]"}, r"split 'train\[7:\]' has no rows; choose another split"),
]


@pytest.mark.parametrize(("dataset", "more", "sentence"), REFUSED, ids=[f"{one[0]} {one[1]}" for one in REFUSED])
def test_what_cannot_be_loaded_says_why_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dataset: str, more: Any, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {"empty.json": b" [] \n", "rows.csv": b"a,b", "rows.json": FILES["rows.json"]()}
    for name, content in files.items():
        mutations.put((tmp_path / name).parent, Path(name).name, content)
    with pytest.raises(ValueError, match=sentence) as caught:
        load_rows(dataset, **more)
    assert "\n" not in str(caught.value)


# -- schemas ---------------------------------------------------------------------------------------------------------

QUESTION_AND_ANSWER = Row((Message("user", "Who?"),), "Me.")
CHAT = [("system", "Be kind."), ("user", "Hi."), ("assistant", "Hello."), ("user", "Who?"), ("assistant", "Me.")]


def row_of(record: dict[str, Any]) -> Row:
    return read_row(record, detect_schema(record, "rows.json"))


@pytest.mark.parametrize(
    "record",
    [
        {"instruction": "Who?", "output": "Me.", "input": None, "file": None},
        {"id": "1", "conversations": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "Me."}]},
        {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}], "prompt": "copy"},
        {"messages": {"role": ["user", "assistant"], "content": ["Who?", "Me."]}},
        {"prompt": "Who?", "answer": "Me."},
    ],
)
def test_every_schema_gives_prompt_and_answer(record: dict[str, Any]) -> None:
    assert row_of(record) == QUESTION_AND_ANSWER


def test_texts_stand_before_what_is_asked_of_them() -> None:
    assert row_of({"instruction": "Add.", "input": "1 2", "output": "3"}).messages[0].content == "Add.\n1 2"
    found = row_of({"document": "A text.", "question": "Who?", "answer": "Me."})
    assert found.messages[0].content == "A text.\n\nWho?"
    messages = [{"role": role, "content": text} for role, text in [*CHAT, ("user", "Thanks.")]]
    assert row_of({"messages": messages}) == Row(tuple(Message(*turn) for turn in CHAT[:4]), "Me.")


@pytest.mark.parametrize(
    ("record", "reason", "sentence"),
    [
        ({"instruction": "Who?", "output": None}, "no answer", "has no answer (LongAlpaca schema, instruction, output"),
        ({"document": " ", "question": "Who?", "answer": "Me."}, "empty context", "has an empty field 'document'"),
        ({"prompt": "a\ud83d", "answer": "Me."}, "invalid UTF-8", "has half a surrogate pair at character 1 of field"),
        ({"prompt": 7, "answer": "Me."}, "wrong type", "has a field 'prompt' of type int where text is needed"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "unknown role", "has the role 'tool' in field 'messages'"),
        ({"document": "a", "questions": [{"question": "What?"}]}, "no answer", "has a question without text or answer"),
    ],
)
def test_an_unusable_row_names_its_field(record: dict[str, Any], reason: str, sentence: str) -> None:
    with pytest.raises(BadRow) as caught:
        row_of(record)
    assert str(caught.value).startswith(sentence)
    assert caught.value.reason == reason


TEXT = (
    "A {0} is a small animal that lives in the garden of the house. "
    "It is {0} number {1} of the village, and it eats apples.\n"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("manuals/one.txt", "manuals/two.md", "novels/three.txt", "novels/test.txt"):
        file = tmp_path / "texts" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(TEXT.format(Path(name).stem, number) for number in range(60)))
    (tmp_path / "texts" / "picture.png").write_bytes(b"\x89PNG" * 100)
    answer = "It is one number {} of the village"
    asked = [
        {"context": "manuals/one.txt", "question": f"Who is number {n}?", "answer": answer.format(n)} for n in range(60)
    ]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(one) + "\n" for one in asked))
    return tmp_path


def made(folder: Path, *more: str) -> list[dict[str, Any]]:
    output = folder / "rows.jsonl"
    arguments = ["--texts", str(folder / "texts"), "--output", str(output), "--characters", "300-900", *more]
    assert text_rows.command(arguments) == 0
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_rows_ask_for_sentences_for_peoples_answers_and_for_the_whole_piece(folder: Path) -> None:
    rows = made(folder, "--questions", str(folder / "asked.jsonl"), "--rows", "30", "--leave-out", "novels/test.txt")
    schema = detect_schema(rows[0], "rows.jsonl")
    for index, row in enumerate(rows):
        assert read_row(row, schema).asked
        flat = text_rows.flat(row["document"])
        repeats = [one for one in row["questions"] if one["question"] == REQUEST]
        assert len(repeats) == (index % 3 == 2)
        assert all(text_rows.flat(one["answer"]) in flat for one in row["questions"])
        assert "test number" not in flat
    assert [one for row in rows for one in row["questions"] if one["question"].startswith("Who is number")]
    assert made(folder, "--rows", "4", "--seed", "3") == made(folder, "--rows", "4", "--seed", "3")


def test_what_is_for_evaluation_is_never_in_a_row(folder: Path) -> None:
    rows = made(folder, "--questions", str(folder / "asked.jsonl"), "--rows", "60", "--until", "0.5")
    whole = (folder / "texts" / "manuals" / "one.txt").read_text()
    late = [f"one number {n} of" for n in range(60) if whole.index(f"one number {n} of") >= len(whole) // 2]
    assert late
    assert not [one for one in late for row in rows if one in row["document"]]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--leave-out", "novels/tset.txt"], "--leave-out novels/tset.txt is not a file of --texts"),
        (["--characters", "many"], "--characters many is not a range of 200 or more; give such as 1600-7000"),
        (["--texts", "nowhere"], "--texts nowhere is not a folder"),
        (["--questions", "bad.jsonl"], "bad.jsonl:1 is not an object with context, question and answer"),
    ],
)
def test_what_makes_no_sense_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, more: list[str], message: str
) -> None:
    monkeypatch.chdir(folder)
    for line in ("{", '{"context": "no.txt", "question": "Who?", "answer": "x"}', '{"context": "manuals/one.txt"}'):
        Path("bad.jsonl").write_text(line + "\n")
        with pytest.raises(ValueError, match=message):
            made(folder, *more)
