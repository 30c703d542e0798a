"""Contexts on the Hub: loaded by name, and refused where they should be; what a saved one says of itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from locret import LongContextModel, RetentionPolicy
from locret.conversation.saved import SavedContext

TEXT = "The number of Oslo is 48213. The red house stands near the river. " * 12
ASKED = "What is the number of Oslo?"
POLICY = RetentionPolicy(budget=32, chunk_size=32, stabilizers=8, local_len=8)


@pytest.fixture(scope="module")
def read(lm: LongContextModel) -> Any:
    return lm.read(TEXT, name="oslo", progress=False)


@pytest.fixture
def upload(hub: Any, tmp_path: Path) -> Callable[[Any, str], None]:
    """Return a function that puts a context where one is looked for on the Hub."""
    from huggingface_hub import HfApi

    def put(context: Any, repo: str) -> None:
        context.save(tmp_path / "a.ctx")
        HfApi().create_repo(repo, exist_ok=True)
        HfApi().upload_file(path_or_fileobj=tmp_path / "a.ctx", path_in_repo="context.safetensors", repo_id=repo)

    return put


def test_an_uploaded_context_is_loaded_by_name_and_answers_the_same(
    lm: LongContextModel, read: Any, hub: Any, upload: Any
) -> None:
    upload(read, "org/oslo")
    again = lm.load("org/oslo")
    assert again.ask(ASKED, max_new_tokens=8) == read.ask(ASKED, max_new_tokens=8)
    assert lm.load_chat("org/oslo").say(ASKED, max_new_tokens=8) == read.ask(ASKED, max_new_tokens=8)
    assert again.name == "oslo"
    first = hub.repos["org/oslo"].branches["main"]
    upload(lm.read(TEXT + "It rains.", name="rain", progress=False), "org/oslo")
    assert lm.load("org/oslo").name == "rain"
    assert lm.load("org/oslo", revision=first).name == "oslo"
    with pytest.raises(ValueError, match="cannot load org/oslo: that revision does not exist on the Hub"):
        lm.load("org/oslo", revision="nope")
    del hub.repos["org/oslo"].files()["context.safetensors"]
    with pytest.raises(ValueError, match="org/oslo on the Hub has no context.safetensors, so it"):
        lm.load("org/oslo")
    with pytest.raises(ValueError, match=r"cannot load org/none: it is neither a file here nor a repository"):
        lm.load("org/none")


def test_a_saved_context_is_described_as_it_is_held(lm: LongContextModel, read: Any, tmp_path: Path) -> None:
    ragged = LongContextModel(lm.model, lm.tokenizer, lm.scorer, POLICY.changed(head_budgets="adaptive"))
    for context in (read, ragged.read(TEXT, progress=False)):
        context.save(tmp_path / "a.ctx")
        saved = SavedContext.open(tmp_path / "a.ctx")
        for layer in lm.backbone.layers:
            held = context.cache.kept_positions(layer)[0].tolist()
            assert [one.tolist() for one in saved.kept(layer)] == [[p for p in head if p >= 0] for head in held]
        assert saved.tokens == context.cache.seen
    read.save(tmp_path / "a.ctx")
    assert SavedContext.open(tmp_path / "a.ctx").units() == [read.memory().units] * len(lm.backbone.layers)
