"""Rock-Paper-Scissors through `locret-eval`: one bounded session, and constant answers beside every result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from locret.data.tasks import published as benchmarks
from locret.data.tasks.published import rock_paper_scissors as game
from locret.infer.evaluation import command

MODEL = Path(__file__).parents[2] / "checkpoints"
SHARED = Path(__file__).parents[3] / "shared" / "data" / "sirllm"
ARGUMENTS = ["--model", str(MODEL / "tiny"), "--heads", str(MODEL / "tiny-heads"), "--quiet", "--figures", "none"]
ARGUMENTS += ["--budget", "64", "--chunk-size", "64", "--stabilizers", "8", "--local-len", "16", "--threads", "1"]


def run(output: Path, *arguments: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    assert command.command([*ARGUMENTS, "--output", str(output), *arguments]) == 0
    lines = (output / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines], json.loads((output / "results.json").read_text(encoding="utf-8"))


def published(folder: Path, moves: str) -> Path:
    """Write turns as SirLLM publishes them."""
    path = folder / game.FILES["rock"]
    path.parent.mkdir(parents=True)
    rows = []
    for number, letter in enumerate(moves):
        best = game.LETTERS[game.beating(game.LETTERS.index(letter))]
        rows.append({"id": number, "question": {"stem": "Play."}, "user_choice": letter, "answerKey": best})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def test_a_game_is_one_bounded_session_with_constant_answers_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = json.dumps({"sirllm/rock": {"turns": 12}})
    records, results = run(
        tmp_path / "out", "--tasks", "sirllm/rock", "--methods", "full,locret", "--task_options", options
    )
    full, bounded = records
    assert full["peak_units"] > 12 * 30
    assert bounded["peak_units"] <= 64 + 64
    assert bounded["prompt_tokens"] == full["prompt_tokens"] > 12 * 30
    assert len(bounded["prediction"]) == 12
    assert set(bounded["prediction"]) <= set("ABC")
    turns = game.drawn_turns("rock", 12)
    moves = [game.LETTERS.index(letter) for letter in bounded["prediction"]]
    assert bounded["score"] == game.rates(turns, moves).win
    assert [one["method"] for one in results["games"]] == ["full", "locret"]
    for one in results["games"]:
        assert one["constant_policies"]["always paper"]["win"] == turns.count(0) / 12
    assert [cell["score"] for cell in results["cells"]] == [round(100 * r["score"], 4) for r in records]
    printed = capsys.readouterr().out
    assert f"best constant answer wins {max(turns.count(move) for move in range(3)) / 12:.2%}" in printed
    assert ("says nothing about memory" in printed) == any(one["constant"] for one in results["games"])


def test_a_published_file_is_one_game_of_its_turns(tmp_path: Path) -> None:
    folder = published(tmp_path / "data", "ABCAABAC")
    records, results = run(tmp_path / "out", "--tasks", "sirllm/rock", "--methods", "locret", "--data-dir", str(folder))
    assert records[0]["targets"] == ["BCABBCBA"]
    assert results["games"][0]["turns"] == 8
    assert results["games"][0]["best_constant"] == 0.5
    assert results["cells"][0]["task"] == "sirllm/rock"


def test_a_bad_turn_is_named_and_left_out_on_request_only(tmp_path: Path) -> None:
    folder = published(tmp_path / "data", "ABC")
    path = folder / game.FILES["rock"]
    path.write_text(path.read_text().replace('"user_choice": "B"', '"user_choice": "D"'))
    arguments = ["--tasks", "sirllm/rock", "--methods", "locret", "--data-dir", str(folder)]
    with pytest.raises(ValueError, match=r"dominant_rock.jsonl:2: field 'user_choice' is 'D'"):
        run(tmp_path / "out", *arguments)
    records, _ = run(tmp_path / "out", *arguments, "--skip-bad-rows", "true")
    assert records[0]["targets"] == ["BA"]


def test_the_oracle_cannot_play(tmp_path: Path) -> None:
    options = json.dumps({"sirllm/paper": {"turns": 2}})
    with pytest.raises(ValueError, match="method oracle knows the answer to one prompt, and sirllm/paper is a session"):
        run(tmp_path / "out", "--tasks", "sirllm/paper", "--methods", "oracle", "--task_options", options)


def test_the_best_answers_score_one_and_constant_ones_what_the_other_side_allows() -> None:
    task = benchmarks.get("sirllm/scissors", turns=50)
    (item,) = task.read(0, "made:1", task.maker(None, None, samples=1, seed=0, data_dir=None)(0))  # type: ignore[attr-defined]
    assert task.score(item.reply, item) == 1.0
    losing = "".join(game.LETTERS[game.beating(game.LETTERS.index(letter))] for letter in item.reply)
    assert task.score(losing, item) == 0.0
    assert task.score("A" * 50, item) == game.drawn_turns("scissors", 50).count(2) / 50
    with pytest.raises(ValueError, match="1 moves for 50 turns"):
        task.score("A", item)


def test_bad_options_of_a_game_are_refused() -> None:
    with pytest.raises(ValueError, match="turns=0 must be a whole number"):
        benchmarks.get("sirllm/rock", turns=0)
    with pytest.raises(ValueError, match='template="chatml" is unknown'):
        benchmarks.get("sirllm/rock", template="chatml")


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the published turns in ../shared/data/sirllm")
@pytest.mark.parametrize("move", game.MOVES)
def test_published_turns_read_as_one_game(move: str) -> None:
    from locret.data.tasks.published.loading import open_task

    (item,) = open_task(benchmarks.get(f"sirllm/{move}"), data_dir=SHARED).items()
    moves = benchmarks.get(f"sirllm/{move}").moves(item)  # type: ignore[attr-defined]
    assert len(moves) == 500
    assert max(range(3), key=moves.count) == game.MOVES.index(move)
