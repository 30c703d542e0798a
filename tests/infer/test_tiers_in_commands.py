"""Blocks in a second tier are planned, counted and asked alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from locret import shipped
from locret.infer.command import command as infer
from locret.infer.context_command import command as context


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
