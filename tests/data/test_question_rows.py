"""Rows ask for every fact of their texts, hold only the tasks asked for, and share no key with evaluation."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from embedded import tiny_tokenizer

from locret.data import tasks
from locret.data.text.haystack import prompt_length
from locret.data.text.words import NAMES
from locret.data.training.question_rows import QuestionRowsOptions, command, question_rows
from locret.data.training.sources import load_rows

TOKENIZER = tiny_tokenizer()


def test_the_same_seed_gives_the_same_rows_and_another_seed_others() -> None:
    rows = list(question_rows(TOKENIZER, 3, [512], seed=1))
    assert rows == list(question_rows(TOKENIZER, 3, [512], seed=1))
    assert rows != list(question_rows(TOKENIZER, 3, [512], seed=2))
    assert len({row["instruction"] for row in rows}) == 3
    assert {tuple(row) for row in rows} == {("instruction", "input", "output", "file")}


def test_lengths_take_turns() -> None:
    lengths = [prompt_length(TOKENIZER, row["instruction"]) for row in question_rows(TOKENIZER, 4, [300, 600])]
    assert [round(length, -1) for length in lengths] == [300, 600, 300, 600]
    assert all(length <= limit for length, limit in zip(lengths, [300, 600, 300, 600], strict=True))


def test_rows_of_a_subset_hold_and_ask_nothing_else() -> None:
    for row in question_rows(TOKENIZER, 5, [1024], names=["passkey", "multikey"]):
        assert "VAR " not in row["instruction"]
        sentences = re.findall(r"[^.]+\.", row["output"])
        assert sentences
        assert all(re.match(r" ?The (pass key|special magic number for \w+)", sentence) for sentence in sentences)


def test_every_needle_is_asked_for_and_answered() -> None:
    for row in question_rows(TOKENIZER, 3, [1024], names=["multikey"]):
        needles = re.findall(r"One of the special magic numbers for (\w+) is: (\d+)", row["instruction"])
        assert len(needles) > 5
        answers = re.findall(r"special magic number for (\w+) is: (\d+)", row["output"])
        assert sorted(needles) == sorted(answers)
    (one,) = question_rows(TOKENIZER, 1, [1024], names=["multikey"], questions=1)
    assert len(re.findall(r"special magic number for", one["output"])) == 1


def test_no_key_of_a_row_is_ever_asked_for_in_evaluation() -> None:
    pattern = r"special magic numbers for (\w+) is"
    trained = {
        name
        for row in question_rows(TOKENIZER, 20, [1024], names=["multikey"])
        for name in re.findall(pattern, row["instruction"])
    }
    task = tasks.get("multikey")
    asked = {name for seed in range(20) for name in re.findall(pattern, task.sample(TOKENIZER, 512, seed=seed).content)}
    assert len(trained) > len(NAMES) // 4
    assert len(asked) > len(NAMES) // 4
    assert not trained & asked


@pytest.mark.parametrize("ending", ["json", "jsonl"])
def test_the_command_writes_rows_that_training_reads(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"rows.{ending}"
    arguments = ["--rows=3", "--tokens=256,300", "--tasks=passkey,number", "--seed=7", f"--output={path}"]
    assert command(arguments) == 0
    expected = list(question_rows(TOKENIZER, 3, [256, 300], names=["passkey", "number"], seed=7))
    text = path.read_text()
    assert (json.loads(text) if ending == "json" else [json.loads(line) for line in text.splitlines()]) == expected
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert [row["output"] for row in load_rows(str(path))] == [row["output"] for row in expected]


def test_lengths_and_tasks_may_be_lists() -> None:
    options = QuestionRowsOptions(output="a.json", tokens=[100, 200], tasks=["passkey"])
    assert (options.lengths(), options.task_names()) == ([100, 200], ["passkey"])
    assert QuestionRowsOptions(output="a.json").lengths() == [1024]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows=0"], "--rows 0 leaves nothing to write; give 1 or more"),
        (["--questions=0"], "--questions 0 leaves nothing to write; give 1 or more"),
        (["--tokens=1k"], "--tokens 1k is not a length; give a number, or several such as 512,1024"),
        (["--tokens=0"], "--tokens 0 is not a length"),
        (["--density=2"], "--density 2.0 is not a share; give a number from 0 to 1"),
        (["--tasks=passkey,multykey"], 'task "multykey" is unknown; did you mean multikey'),
        (["--tokens=8"], "tokens=8 cannot hold the facts and the question"),
    ],
)
def test_bad_input_is_one_sentence_and_writes_nothing(tmp_path: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        command([f"--output={tmp_path / 'rows.json'}", *arguments])
    assert not list(tmp_path.iterdir())


def test_a_file_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--output rows.txt has another ending than .json and .jsonl; rename it"):
        command(["--output=rows.txt"])


def test_a_missing_folder_is_made_and_one_that_cannot_be_is_refused_before_anything_is_generated(
    tmp_path: Path,
) -> None:
    assert command([f"--output={tmp_path / 'a' / 'b' / 'rows.json'}", "--rows=1", "--tokens=256"]) == 0
    assert len(load_rows(str(tmp_path / "a" / "b" / "rows.json"))) == 1
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written in .*file; choose another folder"):
        QuestionRowsOptions(output=str(tmp_path / "file" / "rows.json"), rows=10**9)


def test_a_share_of_look_alikes_is_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--lookalikes 2.0 is not a share; give a number from 0 to 1"):
        QuestionRowsOptions(output=str(tmp_path / "rows.jsonl"), lookalikes=2.0)
