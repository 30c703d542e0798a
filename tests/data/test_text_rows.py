"""Rows of ordinary texts: what is asked of a piece, what is left out, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from locret.conversation.head_shares import REQUEST
from locret.data.training import text_rows
from locret.data.training.rows import detect_schema, read_row

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
