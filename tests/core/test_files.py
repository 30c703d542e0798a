"""Files and folders appear whole or not at all, and one command at a time writes a folder."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from locret.base.files import locked, read_json, visible, write_text, written_whole


def test_a_file_too_large_for_what_it_should_be_is_refused_by_its_size(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    os.truncate(tmp_path / "config.json", 1 << 40)  # sparse
    with pytest.raises(ValueError, match=r"has 1,099,511,627,776 bytes, more than any JSON .*; give heads$"):
        read_json(tmp_path / "config.json", "heads")


def held(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("there", [False, True])
def test_what_ends_the_writing_early_leaves_all_as_it_was(tmp_path: Path, there: bool) -> None:
    file, folder = tmp_path / "file.txt", tmp_path / "folder"
    if there:
        write_text(file, "old")
        write_text(folder / "file.txt", "old", parents=True)

    def interrupted(target: Path, inside: str) -> None:
        with written_whole(target) as fresh:
            (fresh / inside).parent.mkdir(exist_ok=True)
            (fresh / inside).write_text("half")
            raise KeyboardInterrupt

    for target, inside in ((file, ""), (folder, "file.txt")):
        with pytest.raises(KeyboardInterrupt):
            interrupted(target, inside)
    assert held(tmp_path) == (["file.txt", "folder"] if there else [])
    if there:
        assert held(folder) == ["file.txt"]
        assert file.read_text() == (folder / "file.txt").read_text() == "old"


def test_a_folder_that_is_there_keeps_its_other_files_and_changes_the_last_one_last(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    for name in ("notes", "a", "z"):
        (tmp_path / "folder" / name).write_text("old")
    moved, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda *paths: (moved.append(paths[1].name), replace(*paths)))
    with written_whole(tmp_path / "folder", last="a") as fresh:
        fresh.mkdir()
        for name in ("a", "z"):
            (fresh / name).write_text("new")
    assert moved == ["z", "a"]
    texts = {path.name: path.read_text() for path in (tmp_path / "folder").iterdir()}
    assert texts == {"notes": "old", "a": "new", "z": "new"}


def test_the_umask_decides_who_may_read(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with written_whole(tmp_path / "a") as fresh:
            save_file({"a": torch.zeros(2)}, fresh)  # writes for the owner alone
        (tmp_path / "b").write_text("")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_what_the_system_refuses_is_one_sentence_of_the_same_kind(tmp_path: Path, monkeypatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(PermissionError, match="a: Permission denied; choose"):
        write_text(tmp_path / "a", "")
    assert held(tmp_path) == []


def test_a_folder_is_held_by_one_process_at_a_time(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    again = "import sys; from locret.base.files import locked\nwith locked(sys.argv[1], '--output x'): pass"
    with locked(out, "--output out"):
        other = subprocess.run([sys.executable, "-c", again, str(out)], capture_output=True, text=True, check=False)
        assert f"--output x is being written by process {os.getpid()} on" in other.stderr
        assert visible(out) == []
    assert held(tmp_path) == []  # what the lock had made is gone with it
    with locked(out, "--output out"):
        (out / "kept").write_text("")
    assert held(out) == ["kept"]
    with pytest.raises(ValueError, match="--output kept is a file"), locked(out / "kept", "--output kept"):
        pass


def test_what_a_killed_process_was_about_to_write_goes_when_the_folder_is_locked(tmp_path: Path) -> None:
    for name in (".checkpoint-6.0a1b2c3d.partial", ".heads.00000000.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.pt").write_bytes(b"half")
    (tmp_path / "log.jsonl").write_text("kept")
    with locked(tmp_path, "--output"):
        assert held(tmp_path) == [".locret.lock", "log.jsonl"]
    assert held(tmp_path) == ["log.jsonl"]
