"""The contexts of a folder: what is in it besides contexts hides none of them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from locret import LongContextModel, RetentionPolicy
from locret.engines.folder import ContextFolder

POLICY = RetentionPolicy(budget=32, chunk_size=64, stabilizers=8, local_len=8)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lm = LongContextModel.from_pretrained("checkpoints/tiny", heads="checkpoints/tiny-heads", policy=POLICY)
    path = tmp_path_factory.mktemp("saved") / "a.ctx"
    lm.read(torch.arange(10, 200).tolist(), name="ids").save(path)
    return path


@pytest.mark.parametrize(
    ("link", "target"), [("x", "x"), ("gone", "nothing"), ("loop", "."), ("books/up", ".."), ("books/far", "../books")]
)
def test_links_that_lead_nowhere_or_round_hide_no_context(saved: Path, tmp_path: Path, link: str, target: str) -> None:
    (tmp_path / "books").mkdir()
    shutil.copy(saved, tmp_path / "books/a.ctx")
    os.symlink(target, tmp_path / link)
    os.mkfifo(tmp_path / "pipe")
    folder = ContextFolder(tmp_path, lambda *_: None)
    folder.refresh()
    assert [str(listed.path.relative_to(tmp_path)) for listed in folder.files] == ["books/a.ctx"]
    assert folder.named("books/a").ids


def test_a_folder_that_is_linked_counts_like_any_other(saved: Path, tmp_path: Path) -> None:
    os.symlink(saved.parent, tmp_path / "linked")
    folder = ContextFolder(tmp_path, lambda *_: None)
    folder.refresh()
    assert folder.named("linked/a").path == tmp_path / "linked/a.ctx"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every folder")
def test_a_folder_that_cannot_be_read_hides_no_other(saved: Path, tmp_path: Path) -> None:
    shutil.copy(saved, tmp_path / "a.ctx")
    (tmp_path / "lost+found").mkdir(mode=0)
    folder = ContextFolder(tmp_path, lambda *_: None)
    folder.refresh()
    assert [listed.path.name for listed in folder.files] == ["a.ctx"]
