"""The scratch files of a second tier: nameless, refused before anything is written, and never left."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from locret.cache.disk import Disk

PAGE = 4096


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """Make writes beyond so many bytes of a file fail, as on a disk that is full."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.bool, torch.int32, torch.float8_e4m3fn])
def test_a_tensor_of_any_type_comes_back_as_it_was_written(tmp_path: Path, dtype: torch.dtype) -> None:
    disk = Disk(tmp_path / "scratch")
    bits = torch.randint(0, 2 if dtype == torch.bool else 100, (2, 3, 7, 5), generator=torch.Generator().manual_seed(0))
    wanted = bits.to(dtype)
    first, second = disk.empty((2, 3, 7, 5), dtype).copy_(wanted), disk.empty((1,), dtype)
    assert first.dtype == dtype
    assert torch.equal(first.float(), wanted.float())
    assert first.data_ptr() != second.data_ptr()


def test_the_space_of_a_tensor_is_taken_at_once_and_given_back_once_nobody_looks_at_it(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "scratch")
    gc.collect()
    before, used = len(os.listdir("/proc/self/fd")), disk.used
    tensors = [disk.empty((PAGE // 4,), torch.int32).fill_(number) for number in range(8)]
    assert [int(tensor.unique()) for tensor in tensors] == list(range(8))
    assert disk.used - used == 8 * PAGE
    assert len(os.listdir("/proc/self/fd")) == before  # no tensor costs a file descriptor
    part = tensors[3][10:20]
    tensors = []
    gc.collect()
    assert disk.used - used == PAGE  # a view keeps it
    assert int(part.unique()) == 3


@pytest.mark.parametrize("kind", ["file", "link", "dangling link", "pipe"])
def test_what_is_there_is_never_overwritten(tmp_path: Path, kind: str) -> None:
    path, book = tmp_path / "scratch", tmp_path / "book.txt"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "file":
        path.write_text("a text")
    else:
        path.symlink_to(book)
        if kind == "link":
            book.write_text("a text")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"^disk=.*scratch is there already and is not overwritten; give a file that"):
        Disk(path)
    assert sorted(tmp_path.iterdir()) == before
    assert not book.exists() or book.read_text() == "a text"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing/scratch", "in a folder that does not exist; make it"),
        ("book.txt/scratch", "in a folder that does not exist; make it"),
        ("x" * 300, "File name too long"),
    ],
)
def test_a_path_that_cannot_be_made_is_refused_in_one_line(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "book.txt").write_text("a text")
    with pytest.raises((ValueError, OSError)) as caught:
        Disk(f"{tmp_path}/{name}")
    assert str(caught.value).startswith("disk=")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_more_than_the_disk_has_is_refused_at_once(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "scratch")
    for nbytes in (2**50, 2**70):
        with pytest.raises(OSError, match=r"cannot hold [\d,]+ bytes for the host tier \(No space left on device\);"):
            disk.check_room(nbytes)


def test_a_disk_that_fills_refuses_and_keeps_what_was_there(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "scratch")
    held = disk.empty((PAGE,), torch.uint8).fill_(7)
    with files_of_at_most(10 * PAGE), pytest.raises(OSError, match=r"cannot hold [\d,]+ bytes for the host tier"):
        disk.empty((20 * PAGE,), torch.uint8)
    assert int(held.unique()) == 7
    assert list(tmp_path.iterdir()) == []
