"""Rows that are made here: of the published form and the wanted length, holding what they ask for, seeded."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import pytest
from bench_cases import entries, golden
from embedded import tiny_tokenizer

from locret.data import tasks
from locret.data.tasks.prompts import build_prompt
from locret.data.tasks.published.base import Making, RowMaker, largest
from locret.data.tasks.rows import Row

TOKENIZER = tiny_tokenizer()
MADE = {name: task for name in tasks.names() if isinstance(task := tasks.get(name), RowMaker)}
ANYWHERE = [name for name in MADE if not name.startswith(("ruler/qa", "sirllm"))]
NEEDLE = re.compile(r"One of the special magic numbers for \S+ is: \d{7}\.")


def rows(name: str, tokens: int | None, samples: int, *only: int, seed: int = 0, data_dir: Any = None) -> list[Any]:
    make = MADE[name].maker(Making(TOKENIZER, tokens, samples, seed, data_dir))
    return [make(index) for index in only or range(samples)]


def row(name: str, tokens: int | None = 2048, **options: Any) -> dict[str, Any]:
    return rows(name, tokens, 1, **options)[0]


@pytest.mark.parametrize("name", ANYWHERE)
def test_a_prompt_fills_its_length_and_its_true_answer_scores_1(name: str) -> None:
    task = MADE[name]
    sample = task.sampler(Making(TOKENIZER, 3000, samples=2))
    for index in range(2):
        one = sample(index)
        prompt = build_prompt(task, one, TOKENIZER)
        assert 3000 - 170 < len(prompt.ids) + task.max_new_tokens <= 3000
        assert (task.score(one.reply, one), task.score("", one), one.id) == (1, 0, str(index))
        assert all(target in one.content for target in one.targets)
        assert one.content.endswith("\n" * name.startswith("ruler/") + one.question), "so a document can be read alone"


SIZES = {name: (1500, 3000) if MADE[name].needs_length else (None, 1500, 3000) for name in ANYWHERE}
"""Lengths of the rows that are compared; None is the published one, where there is one."""


def digest(name: str) -> str:
    made = [rows(name, tokens, 3, seed=3) for tokens in SIZES[name]]
    return hashlib.sha256(json.dumps(made, ensure_ascii=False).encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", ANYWHERE)
def test_rows_are_those_whose_form_was_compared_with_published_ones(name: str) -> None:
    """Needles at their depths, sums, chains and frequencies of words were checked one by one when this was recorded."""
    assert digest(name) == golden("made_rows")[name]
    whole = rows(name, 1500, 3, seed=3)
    assert rows(name, 1500, 3, 2, seed=3) == whole[2:]  # whichever others are made
    if name != "niah/needle":  # its statement is the same in all rows
        assert len({json.dumps(one) for one in [*whole, *rows(name, 1500, 3, 2, seed=4)]}) == 4


@pytest.mark.parametrize("limit", [3, 10, 11, 97])
@pytest.mark.parametrize("guess", [1, 9, 1000])
def test_the_largest_size_is_found_from_any_guess(limit: int, guess: int) -> None:
    assert largest(lambda size: 3 + size, limit, least=0, guess=guess, what="a row") == limit - 3
    uneven = [3 + size + size % 2 for size in range(5000)]
    found = largest(lambda size: uneven[size], limit, least=0, guess=guess, what="a row")
    assert uneven[found] <= limit
    assert all(cost > limit for cost in uneven[found + 2 :])


def test_a_length_that_is_missing_or_cannot_hold_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="tokens: ruler/vt has no length of its own"):
        MADE["ruler/vt"].sampler(Making(TOKENIZER))
    with pytest.raises(ValueError, match=r"tokens=100 cannot hold a row of ruler/vt, which takes at least \d+; raise"):
        row("ruler/vt", 100)


@pytest.mark.parametrize(("move", "share"), [("rock", 0.5), ("paper", 0.502), ("scissors", 0.5205)])
def test_a_constant_answer_wins_what_the_preferred_move_allows(move: str, share: float) -> None:
    task = tasks.get(f"sirllm/{move}")
    sample = task.sampler(Making(None))(0)
    best = {"rock": "B", "paper": "C", "scissors": "A"}[move]
    assert task.score(best * 2000, sample) == pytest.approx(share, abs=0.04)
    (short,) = tasks.get(f"sirllm/{move}", turns=2).items(entries([{"user_choice": letter} for letter in "ABC"]))
    assert (short.targets, task.score("BA", short)) == (("BC",), 0.5)
    assert short.turns[1].startswith("USER: I chose [rock]. Analyze my preferences to maximize your winning rate and ")


def test_essays_come_from_the_data_folder_and_are_repeated_where_they_are_too_short(tmp_path) -> None:
    (tmp_path / "PaulGrahamEssays").mkdir()
    (tmp_path / "PaulGrahamEssays" / "a.txt").write_text("The tower stands. It\nrests!")
    (tmp_path / "PaulGrahamEssays" / "b.txt").write_text("A dog turns.")
    words = NEEDLE.sub("", row("ruler/niah_single_2", 400, data_dir=tmp_path)["input"].split("\n")[1]).split()
    assert " ".join(words).startswith("The tower stands. It rests! A dog turns. The tower stands.")
    with pytest.raises(ValueError, match=r"holds no essays \(looked for PaulGrahamEssays"):
        row("niah/passkey", 400, data_dir=tmp_path / "no")


def paragraph(name: str, impossible: bool) -> dict[str, Any]:
    answers = [{"text": f"Answer {name}"}, {"text": "It"}]
    asked = {"question": f"What is {name}?", "answers": answers, "is_impossible": impossible}
    return {"context": f"Paragraph {name}.", "qas": [asked]}


SQUAD = {"data": [{"paragraphs": [paragraph(f"{article}{part}", part == 2) for part in range(3)]} for article in "ab"]}
HOTPOT = [
    {"question": f"Who is {name}?", "answer": name, "context": [[name, ["One. ", "Two."]], ["Shared", ["Both."]]]}
    for name in ("Ann", "Bob", "Cid")
]


@pytest.mark.parametrize(
    ("name", "file", "data", "count", "own", "question"),
    [
        ("qa_1", "squad.json", SQUAD, 6, "Paragraph a1.", "What is a1?"),
        ("qa_2", "hotpotqa.json", HOTPOT, 4, "Bob\nOne. Two.", "Who is Bob?"),
    ],
)
def test_a_question_comes_with_its_own_documents_and_distractors(
    name: str, file: str, data: Any, count: int, own: str, question: str, tmp_path
) -> None:
    task, path = MADE[f"ruler/{name}"], tmp_path / file
    path.write_text(json.dumps(data))
    found = rows(f"ruler/{name}", 1000, 3, 1, data_dir=tmp_path)[0]
    (asked,) = task.read(Row(0, "", found))
    assert (asked.content.count("Document "), asked.lead) == (count, " Answer:")
    assert f":\n{own}\n\n" in asked.content
    assert asked.content.endswith(f"do not output any other words.\n\nQuestion: {question}")
    assert (task.score("it is " + asked.targets[-1].upper(), asked), task.score("none", asked)) == (1, 0)
    for written, message in (('[{"question": "Who?"}]', rf"{file} is no"), ("[]", "no questions|is no")):
        path.write_text(written)
        with pytest.raises(ValueError, match=message):
            row(f"ruler/{name}", 1000, data_dir=tmp_path)
    with pytest.raises(ValueError, match="is made from questions of"):
        row(f"ruler/{name}")


def test_a_needle_scores_the_share_of_its_words() -> None:
    sample = MADE["niah/needle"].sampler(Making(TOKENIZER, 1000))(0)
    assert MADE["niah/needle"].score("You should eat a SANDWICH.", sample) == pytest.approx(3 / 11)
