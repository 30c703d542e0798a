"""Commands that read prompts of millions of tokens and play thousands of turns: small runs of both, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from locret.infer.speed.lab import long_prompts, rock_paper_scissors

ROOT = Path(__file__).parents[2]
MODEL = ["--model", str(ROOT / "checkpoints" / "tiny"), "--heads", str(ROOT / "checkpoints" / "tiny-heads")]
SMALL = ["--budget", "128", "--chunk-size", "128", "--stabilizers", "16", "--local-len", "32"]


def printed(capsys: Any) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_long_prompt_is_read_in_locret_mode_within_its_budget(capsys: Any) -> None:
    assert long_prompts.command([*MODEL, "--tokens", "6000", "--max-new-tokens", "16"]) == 0
    found = printed(capsys)
    assert 5900 < found["prompt_tokens"] <= 6000
    assert found["kept_units"] == found["policy"]["budget"] + found["policy"]["local_len"]
    assert found["peak_cache_bytes"] <= found["planned_cache_bytes"]
    assert found["expected"] in found["answer"]


def test_a_prompt_that_is_only_made_is_counted(capsys: Any) -> None:
    assert long_prompts.command([*MODEL[:2], "--tokens", "50000", "--kind", "number", "--read", "false"]) == 0
    found = printed(capsys)
    assert 49_900 < found["prompt_tokens"] <= 50_000
    assert len(found["expected"]) == 10
    assert "answer" not in found


def test_every_session_reports_what_constant_answers_score(capsys: Any) -> None:
    assert rock_paper_scissors.command([*MODEL, *SMALL, "--turns", "5", "--dominant", "rock,paper"]) == 0
    found = printed(capsys)
    assert list(found["sessions"]) == ["rock", "paper"]
    for session in found["sessions"].values():
        assert session["turns"] == 5
        assert list(session["constant_policies"]) == ["always rock", "always paper", "always scissors"]
        assert session["most_units"] <= 128 + 128
        assert session["constant"] == ("never changed" in session["sentence"])
    assert sum(found["mean"].values()) == pytest.approx(1)


def test_the_plain_cache_plays_too_and_grows(capsys: Any) -> None:
    assert rock_paper_scissors.command([*MODEL, "--full-cache", "--turns", "4", "--dominant", "scissors"]) == 0
    found = printed(capsys)
    assert found["policy"] is None
    assert found["sessions"]["scissors"]["most_units"] > 256


def test_published_turns_are_found_or_refused(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(ValueError, match="has no rock_paper_scissors/rock_paper_scissors_dominant_rock.jsonl"):
        rock_paper_scissors.command([*MODEL, "--data-dir", str(tmp_path)])
    path = tmp_path / "sirllm" / "rock_paper_scissors" / "rock_paper_scissors_dominant_rock.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text('{"user_choice": "A", "answerKey": "B"}\n' * 3)
    assert rock_paper_scissors.command([*MODEL, *SMALL, "--data-dir", str(tmp_path), "--dominant", "rock"]) == 0
    assert printed(capsys)["sessions"]["rock"]["turns"] == 3


def test_options_that_fit_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="--kind sand is unknown; choose one of needle, needle-passkey, number"):
        long_prompts.command([*MODEL, "--kind", "sand"])
    with pytest.raises(ValueError, match="--turns 0 is no game"):
        rock_paper_scissors.command([*MODEL, "--turns", "0"])
    with pytest.raises(ValueError, match='dominant="lizard" is no move'):
        rock_paper_scissors.command([*MODEL, "--dominant", "lizard"])
