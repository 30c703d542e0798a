"""Contexts on the Hub: pushed with card and picture, loaded by name, and refused where they should be."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from hub_server import READ_TOKEN

from locret import LongContextModel, RetentionPolicy
from locret.conversation.saved import SavedContext

TEXT = "The number of Oslo is 48213. The red house stands near the river. " * 12
ASKED = "What is the number of Oslo?"
POLICY = RetentionPolicy(budget=32, chunk_size=32, stabilizers=8, local_len=8)


@pytest.fixture(scope="module")
def lm() -> LongContextModel:
    return LongContextModel.from_pretrained(
        "checkpoints/tiny", heads="checkpoints/tiny-heads", policy=POLICY, device="cpu", dtype="float32"
    )


@pytest.fixture(scope="module")
def read(lm: LongContextModel) -> Any:
    return lm.read(TEXT, name="oslo", progress=False)


def push(read: Any, repo: str = "org/oslo", **options: Any) -> str:
    with pytest.warns(UserWarning, match=rf"whoever can read {repo} can ask this context about its text"):
        return read.push_to_hub(repo, **options)


def test_a_pushed_context_is_loaded_by_name_and_answers_the_same(lm: LongContextModel, read: Any, hub: Any) -> None:
    url = push(read, license="mit", base_model="org/base", heads="org/heads")
    assert url == f"{hub.url}/org/oslo"
    files = hub.repos["org/oslo"].files()
    assert sorted(files) == ["README.md", "context.safetensors", "kept.png"]
    assert files["kept.png"].startswith(b"\x89PNG")
    again = lm.load("org/oslo")
    assert again.ask(ASKED, max_new_tokens=8) == read.ask(ASKED, max_new_tokens=8)
    assert again.name == "oslo"
    first = hub.repos["org/oslo"].branches["main"]
    push(lm.read(TEXT + "It rains.", name="rain", progress=False))
    assert lm.load("org/oslo").name == "rain"
    assert lm.load("org/oslo", revision=first).name == "oslo"
    with pytest.raises(ValueError, match="cannot load org/oslo: that revision does not exist on the Hub"):
        lm.load("org/oslo", revision="nope")


def test_the_card_says_what_it_is_and_how_it_is_used(read: Any, hub: Any) -> None:
    push(read, base_model="org/base", heads="org/heads")
    card = hub.repos["org/oslo"].files()["README.md"].decode()
    front = yaml.safe_load(card.split("---\n")[1])
    assert (front["base_model"], front["library_name"]) == ("org/base", "locret")
    assert "locret-context" in front["tags"]
    assert 'from_pretrained("org/base", heads="org/heads")' in card
    assert 'lm.load("org/oslo")' in card
    assert "locret-context ask book.ctx --model org/base --heads org/heads" in card
    assert f"a text of {read.cache.seen:,} tokens" in card
    assert "![what was kept](kept.png)" in card
    assert "    0 |" in card
    assert "{{" not in card


def test_a_repository_that_is_missing_or_holds_something_else_is_named(
    lm: LongContextModel, read: Any, hub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"cannot load org/none: it is neither a file here nor a repository"):
        lm.load("org/none")
    push(read)
    del hub.repos["org/oslo"].files()["context.safetensors"]
    with pytest.raises(ValueError, match="org/oslo on the Hub has no context.safetensors, so it"):
        lm.load("org/oslo")
    monkeypatch.setenv("HF_TOKEN", READ_TOKEN)
    with pytest.raises(PermissionError, match=r"cannot push to org/oslo: the token has no write access there \(403\)"):
        push(read)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(PermissionError, match="cannot push to org/new without a token"):
        push(read, "org/new")


def test_a_pulled_file_is_checked_like_any_other(lm: LongContextModel, read: Any, hub: Any) -> None:
    read.push_to_hub("org/damaged", private=True)
    damaged = bytearray(hub.repos["org/damaged"].files()["context.safetensors"])
    damaged[-5] ^= 0x40
    read.push_to_hub("org/pickle", private=True)
    contents = {"org/damaged": bytes(damaged), "org/pickle": b"\x80\x04\x95cos\nsystem"}
    messages = {"org/damaged": "it is damaged", "org/pickle": "is not a saved cache"}
    for repo, content in contents.items():
        hub.repos[repo].files()["context.safetensors"] = content
        hub.blobs[hashlib.sha256(content).hexdigest()] = content
        with pytest.raises(ValueError, match=messages[repo]):
            lm.load(repo)


def test_a_saved_context_is_described_as_it_is_held(lm: LongContextModel, read: Any, tmp_path: Path) -> None:
    read.save(tmp_path / "a.ctx")
    saved = SavedContext.open(tmp_path / "a.ctx")
    for layer in lm.backbone.layers:
        held = read.cache.kept_positions(layer)[0]
        assert [one.tolist() for one in saved.kept(layer)] == [[p for p in head if p >= 0] for head in held.tolist()]
    assert saved.tokens == read.cache.seen
    assert saved.units() == [read.memory().units] * len(lm.backbone.layers)
    shutil.copy(tmp_path / "a.ctx", tmp_path / "b.ctx")
    assert SavedContext.open(tmp_path / "b.ctx").facts()["digest"] == saved.facts()["digest"]
    ragged = RetentionPolicy(budget=32, chunk_size=32, stabilizers=8, local_len=8, head_budgets="adaptive")
    other = LongContextModel(lm.model, lm.tokenizer, lm.scorer, ragged).read(TEXT, progress=False)
    other.save(tmp_path / "ragged.ctx")
    kept = SavedContext.open(tmp_path / "ragged.ctx").kept(2)
    assert [one.tolist() for one in kept] == [
        [p for p in head if p >= 0] for head in other.cache.kept_positions(2)[0].tolist()
    ]
