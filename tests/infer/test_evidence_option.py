"""`--evidence` and `--reread` of `locret-infer` and `locret-context ask`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from locret.conversation.evidence import Answered, Passage
from locret.infer import command, context_command

MODEL = ["--model", "checkpoints/tiny", "--heads", "checkpoints/tiny-heads"]
ASK = ["--question", "What is the pass key?", "--max-new-tokens", "12"]


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("The grass is green. " * 40 + "The pass key is 71432. " + "The sky is blue. " * 40)
    return str(path)


def test_answers_come_with_their_evidence(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = str(tmp_path / "text.ctx")
    read = ["--prompt-file", text, "--budget", "32", "--evidence", "--reread", text, "--save-context", saved, "--quiet"]
    command.command([*MODEL, *read, *ASK, "--json"])
    record = json.loads(capsys.readouterr().out)
    (answer,) = record["answers"]
    assert answer["evidence"]["text"] == answer["answer"]
    assert answer["evidence"]["evicted"] is True
    context_command.command(["ask", saved, *MODEL, *ASK, "--evidence", "--json", "--quiet"])
    (context,) = json.loads(capsys.readouterr().out)["contexts"]
    again = context["answers"][0]["evidence"]
    first = answer["evidence"]["before"] or answer["answer"]
    assert (again["text"], again["before"]) == (first, None)
    command.command(["--context", saved, *MODEL, *ASK, "--evidence", "--quiet"])
    out = capsys.readouterr().out
    assert out.startswith("> What is the pass key?\n")
    assert "evidence: the least certain token leads by " in out
    assert out.endswith("; evidence may be gone\n" if again["flagged"] else "; not flagged\n")


@pytest.mark.parametrize(
    ("before", "said"),
    [
        (None, "; evidence may be gone"),
        ("It is 5.", "; these were read again, and it stays"),
        ("It is 6.", "; these were read again, and before the answer was 'It is 6.'"),
        ("It is " + "a word " * 40, " a word ...'"),
    ],
)
def test_the_answer_before_is_told_from_the_one_that_is_given(before: str | None, said: str) -> None:
    passages = (Passage(start=64, end=160, attention=0.3),)
    found = Answered(text="It is 5.", margin=0.2, passages=passages, evicted=True, before=before)
    line = command._evidence_line(found)
    assert line.endswith(said)
    assert "the least certain token leads by 0.20; looked most at tokens 64-160" in line
    assert len(line) < 300


@pytest.mark.parametrize("sampling", [(), ("--temperature", "0.8", "--top-k", "0", "--seed", "3")])
def test_the_answer_is_word_for_word_that_without_evidence(
    backbone: Path, heads: Path, text: str, tmp_path: Path, infer: Callable[..., Any], sampling: tuple[str, ...]
) -> None:
    model, saved = ["--model", backbone, "--heads", heads], tmp_path / "text.ctx"
    assert infer(*model, "--prompt-file", text, "--save-context", saved, "--quiet").code == 0
    call = [*model, "--context", saved, *ASK, *sampling, "--json", "--quiet"]
    (plain,), (own,) = (json.loads(infer(*call, *more).out)["answers"] for more in ([], ["--evidence"]))
    assert own["answer"] == plain["answer"]


@pytest.mark.parametrize("reading", [["--budget-share", "0.1"], ["--template", "none"], ["--template", "original"]])
def test_a_text_is_read_again_as_it_was_read(
    backbone: Path, heads: Path, text: str, tmp_path: Path, infer: Callable[..., Any], context: Any, reading: list[str]
) -> None:
    model, saved = ["--model", backbone, "--heads", heads], tmp_path / "text.ctx"
    again = [*ASK, "--evidence", "--reread", text, "--json", "--quiet"]
    first = infer(*model, "--prompt-file", text, "--chunk-size", "64", *reading, *again, "--save-context", saved)
    second = context("ask", saved, *model, *again)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    ((answer,), (held,)) = json.loads(first.out)["answers"], json.loads(second.out)["contexts"]
    assert answer["evidence"]["before"] is not None
    assert held["answers"] == [answer]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--reread", "a.txt"], "--reread a.txt needs --evidence"),
        (["--evidence", "--num-beams", "2"], "--evidence watches one answer, but --num-beams 2 are searched"),
        (["--evidence", "--reread", "nowhere.txt"], "--reread nowhere.txt: no such file"),
        (["--evidence", "--reread", "-"], "--reread - is standard input"),
        (
            ["--evidence", "--reread", "a", "--turns", "text"],
            "--reread reads passages in the room of a turn, which --t",
        ),
        (["--ledger", "256"], r'option "--ledger" was retired; release 0\.1\.0 \(git tag lab-frozen\)'),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, given: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        command.command([*MODEL, "--prompt-file", text, *ASK, *given])


def test_nothing_asked_has_no_evidence(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--evidence is about an answer, but nothing is asked"):
        command.command([*MODEL, "--prompt-file", text, "--evidence", "--save-context", str(tmp_path / "a")])


def test_any_scorer_and_any_saved_context_have_evidence(text: str, tmp_path: Path, capsys: Any) -> None:
    saved = str(tmp_path / "text.ctx")
    model = ["--model", "checkpoints/tiny", "--scorer", "snapkv"]
    command.command([*model, "--prompt-file", text, "--budget", "64", "--save-context", saved, "--quiet"])
    context_command.command(["ask", saved, *model, *ASK, "--evidence", "--quiet"])
    assert "evidence: the least certain token leads by " in capsys.readouterr().out
