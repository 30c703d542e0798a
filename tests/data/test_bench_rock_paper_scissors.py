"""Rock-Paper-Scissors: published prompts, one sample for a file of turns, and the share of turns won."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench_cases import entries, load

from locret.data import tasks
from locret.data.tasks import Sample
from locret.data.tasks.published import sirllm
from locret.data.training.json_rows import BadRow

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "sirllm"


def game(moves: str, name: str = "sirllm/rock", **options: object) -> Sample:
    (sample,) = tasks.get(name, **options).read(0, "made:0", {"moves": moves})  # type: ignore[attr-defined]
    return sample


def test_prompts_are_the_published_ones_and_tell_only_the_past() -> None:
    assert game("BCA").turns == (
        "USER: Let's play a game of Rock-Paper-Scissors. Choose one option from: (A) rock (B) paper (C) scissors. "
        "\n\nASSISTANT: ",
        "USER: I chose [paper]. Analyze my preferences to maximize your winning rate and proceed to the next round. "
        "Choices: (A) rock (B) paper (C) scissors. You choose:\n\nASSISTANT: ",
        "USER: I chose [scissors]. Analyze my preferences to maximize your winning rate and proceed to the next round. "
        "Choices: (A) rock (B) paper (C) scissors. You choose:\n\nASSISTANT: ",
    )
    bare = game("A", template="none")
    assert bare.turns == (bare.content,)
    assert bare.content.startswith("Let's play")


def test_each_move_beats_one_other_and_the_score_is_the_share_of_turns_won() -> None:
    sample = game("ABCAB")
    task = tasks.get("sirllm/rock")
    assert sample.targets == ("BCABC",)
    assert task.score("BCABC", sample) == 1.0
    assert task.score("CABCA", sample) == 0.0
    assert task.score("BBBBB", sample) == 0.4
    with pytest.raises(ValueError, match="1 moves for 5 turns"):
        task.score("A", sample)


@pytest.mark.parametrize(("move", "share"), [("rock", 0.5), ("paper", 0.502), ("scissors", 0.5205)])
def test_a_constant_answer_wins_what_the_preferred_move_allows(move: str, share: float) -> None:
    task = tasks.get(f"sirllm/{move}")
    sample = task.sampler(None, None, samples=1, seed=0)(0)
    best = sirllm.LETTERS[sirllm.beating(sirllm.MOVES.index(move))]
    assert task.score(best * 2000, sample) == pytest.approx(share, abs=0.04)


def test_published_turns_read_as_one_game_and_prefer_their_move() -> None:
    if not SHARED.is_dir():
        pytest.skip("needs the published turns in ../shared/data")
    for move, name in enumerate(sirllm.MOVES):
        task = tasks.get(f"sirllm/{name}")
        rows = load(SHARED / task.file)  # type: ignore[attr-defined]
        (sample,) = task.items(entries(rows))  # type: ignore[attr-defined]
        turns = [(sirllm.LETTERS.index(letter) - 1) % 3 for letter in sample.targets[0]]
        assert [sirllm.LETTERS[turn] for turn in turns] == [row["user_choice"] for row in rows]
        assert turns.count(move) / len(turns) == pytest.approx(0.5, abs=0.06)
        assert rows[0]["question"]["stem"].replace("Please play", "Let's play") in sample.content
        assert json.dumps([option["text"] for option in rows[0]["question"]["choices"]]) == json.dumps([*sirllm.MOVES])
        (short,) = tasks.get(f"sirllm/{name}", turns=7).items(entries(rows))  # type: ignore[attr-defined]
        assert short.targets[0] == sample.targets[0][:7]


def test_bad_turns_name_their_place() -> None:
    good = {"user_choice": "A", "answerKey": "B"}
    rows = entries([good, {"user_choice": "D", "answerKey": "B"}, {**good, "answerKey": "C"}], "f:{}")
    task = tasks.get("sirllm/rock")
    with pytest.raises(BadRow, match="f:2 holds 'D' in field 'user_choice' where A, B or C is needed"):
        list(task.items(rows))  # type: ignore[attr-defined]
    bad: list[BadRow] = []
    (sample,) = task.items(rows, bad.append)  # type: ignore[attr-defined]
    assert sample.targets == ("B",)
    assert [each.reason for each in bad] == ["unknown user_choice", "wrong answerKey"]
    assert "f:3 has the answerKey 'C', which does not beat 'A'" in str(bad[1])


def test_bad_options_of_a_game_are_refused() -> None:
    with pytest.raises(ValueError, match="turns=0 must be a whole number"):
        tasks.get("sirllm/rock", turns=0)
    with pytest.raises(ValueError, match="template='chatml' is unknown; use one of vicuna, none"):
        tasks.get("sirllm/rock", template="chatml")
