"""The command that reads prompts of millions of tokens: small runs of it, and a refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from locret.infer.speed.lab import long_prompts

ROOT = Path(__file__).parents[2]
MODEL = ["--model", str(ROOT / "checkpoints" / "tiny"), "--heads", str(ROOT / "checkpoints" / "tiny-heads")]


def printed(capsys: Any) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.slow
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


def test_options_that_fit_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="--kind sand is unknown; choose one of needle, needle-passkey, number"):
        long_prompts.command([*MODEL, "--kind", "sand"])
