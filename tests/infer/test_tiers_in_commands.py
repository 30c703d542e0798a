"""A second tier is planned, counted and shown alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from locret import shipped
from locret.infer.command import command as infer
from locret.infer.context_command import command as context

MODEL = ["--model", "checkpoints/tiny", "--heads", "checkpoints/tiny-heads"]
KEY = 4 * 32 * 4 * 5  # one key of every layer of the embedded backbone: heads, dimensions, bytes, layers
UNIT = 2 * KEY + 4 * 5 * (4 + 4)  # with its value, its score and its position


@pytest.mark.slow
def test_an_answer_is_measured_with_both_tiers(capsys: pytest.CaptureFixture[str]) -> None:
    text = shipped.find("recipes/infer/pass_key.txt")
    line = [*MODEL, "--prompt-file", text, "--question", "What is the pass key?", "--budget", "32"]
    line += ["--host-budget", "128", "--recall", "4"]
    assert infer([*line, "--dry-run", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["planned_host_bytes"] == 128 * UNIT
    assert infer([*line, "--json", "--quiet"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["planned_host_bytes"] == record["host_bytes"] == 128 * UNIT
    assert record["moved_bytes"] > 0
    assert "43600" in record["answer"]
    assert infer([*line, "--host-budget", "all", "--dry-run", "--quiet"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["planned_host_bytes"] == (plan["prompt_tokens"] - 32 - plan["policy"]["local_len"]) * UNIT


def test_blocks_are_planned_asked_several_times_and_not_saved(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(Path(shipped.find("recipes/infer/pass_key.txt")).read_text(encoding="utf-8")[:2000])
    line = ["--model", "checkpoints/tiny", "--scorer", "streaming", "--recall-by", "infllm", "--prompt-file", str(text)]
    line += ["--max-new-tokens", "4", "--quiet"]
    for budget in (["--budget", "96"], ["--kv-memory", "1MiB"]):
        assert infer([*line, *budget, "--question", "What?", "--protocol", "aware", "--dry-run"]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert infer([*line, *budget, "--question", "What?", "--protocol", "aware", "--json"]) == 0
        record = json.loads(capsys.readouterr().out)
        assert record["policy"] == plan["policy"]
        assert plan["planned_host_bytes"] == record["planned_host_bytes"] == record["host_bytes"] > 0
        assert plan["planned_cache_bytes"] == record["planned_cache_bytes"] == record["peak_cache_bytes"] <= 2**20
    assert infer([*line, "--budget", "96", "--question", "What?", "--question", "Which pass key?", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["answers"]
    assert infer([*line, "--budget", "96", "--question", "Which pass key?", "--question", "Who?", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["answers"][0]["answer"] == second["answer"]
    assert first["host_bytes"] == first["planned_host_bytes"] > 0
    monkeypatch.setattr("locret.loading.load_model", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(ValueError, match="a file has no place for the blocks"):
        context(["read", *[*line[:-3], "--quiet"], "--budget", "96", "--output", str(tmp_path / "context")])
    with pytest.raises(ValueError, match="even a budget of 21 takes"):
        infer([*line, "--kv-memory", "100KiB", "--question", "What?"])
