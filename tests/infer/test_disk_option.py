"""`--disk`: a second tier in a file, from the command line and from Python; what cannot be is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from locret import LongContextModel
from locret.infer import command
from locret.shipped import find

BASE = [
    "--model",
    "checkpoints/tiny",
    "--heads",
    "checkpoints/tiny-heads",
    "--prompt-file",
    "recipes/infer/pass_key.txt",
]
ASKED = [*BASE, "--question", "What is the pass key?", "--budget", "32", "--recall", "8", "--quiet"]


@pytest.mark.parametrize("host_budget", ["256", "all"])
@pytest.mark.parametrize("more", [[], ["--question", "What is the pass key?"]])
def test_an_answer_comes_from_a_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], host_budget: str, more: list[str]
) -> None:
    arguments = [*ASKED, "--host-budget", host_budget, "--disk", str(tmp_path / "scratch"), "--json", *more]
    assert command.command(arguments) == 0
    record = json.loads(capsys.readouterr().out)
    memory = record["reading"] if more else record
    assert "43600" in json.dumps(record)
    assert list(tmp_path.iterdir()) == []
    if "disk" in memory:
        assert memory["disk"] == memory["disk_planned"] > 0
        assert memory["host"] == 0


@pytest.mark.parametrize(
    ("disk", "more", "says"),
    [
        ("recipes/infer/pass_key.txt", ["--host-budget", "64"], "is there already and is not overwritten"),
        ("nowhere/scratch", ["--host-budget", "64"], "is in a folder that does not exist"),
        ("scratch", ["--recall", "0"], "holds a second tier, but there is none; give host_budget and recall"),
    ],
)
def test_a_disk_that_cannot_be_is_refused_before_weights_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: str, more: list[str], says: str
) -> None:
    monkeypatch.setattr("locret.loading.load_model", None)
    path = disk if disk.startswith("recipes") else str(tmp_path / disk)
    with pytest.raises(ValueError, match=says):
        command.command([*ASKED, *more, "--disk", path])
    assert list(tmp_path.iterdir()) == []


def test_contexts_and_chats_of_one_model_share_a_disk(tmp_path: Path) -> None:
    policy = {"budget": 48, "chunk_size": 128, "host_budget": "all", "recall": 8}
    lm = LongContextModel.from_pretrained(
        find("checkpoints/tiny"), heads=find("checkpoints/tiny-heads"), policy=policy, disk=tmp_path / "scratch"
    )
    text = "The grass is green. " * 60 + "The pass key is 71432. " + "The sky is blue. " * 60
    context = lm.read(text, progress=False)
    chat = context.chat()
    assert "71432" in chat.say("What is the pass key?")
    context.save(tmp_path / "a.ctx")
    again = lm.load(tmp_path / "a.ctx")
    assert "71432" in again.ask("What is the pass key?")
    assert again.cache.disk is context.cache.disk is chat.cache.disk is lm.disk
    assert [file.name for file in tmp_path.iterdir()] == ["a.ctx"]
    assert f"{context.memory().disk:,} bytes on disk" in repr(context)
    assert context.to_dynamic_cache(host=True).get_seq_length() == context.memory().units + context.memory().host_units


def test_a_saved_second_tier_is_loaded_onto_a_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, scratch = tmp_path / "a.ctx", str(tmp_path / "scratch")
    model = LongContextModel.from_pretrained(find("checkpoints/tiny"), heads=find("checkpoints/tiny-heads"), budget=48)
    plain = model.read("The pass key is 71432. ", progress=False)
    plain.save(tmp_path / "plain.ctx")
    with pytest.raises(ValueError, match="holds a second tier, but there is none"):
        model.load(tmp_path / "plain.ctx", disk=scratch)
    saved = ["--budget", "32", "--recall", "8", "--host-budget", "256", "--save-context", str(path), "--quiet"]
    command.command([*BASE, *saved])
    loaded = model.load(path, disk=scratch).memory()
    assert loaded.disk == loaded.disk_planned > 0 == loaded.host
    capsys.readouterr()
    command.command([*BASE[:4], "--context", str(path), "--disk", scratch, "--question", "Which key?", "--json"])
    reading = json.loads(capsys.readouterr().out)["reading"]
    assert reading["disk"] == loaded.disk
    assert reading["host"] == 0
