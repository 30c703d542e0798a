"""Fixtures of the server's tests: the embedded backbone with small budgets, a text, and a library of contexts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from running import KV_MEMORY, ROOT, load, started, until

from locret import LongContextModel
from locret.infer.serve.index import Entry
from locret.infer.serve.library import Library
from locret.infer.serve.plan import MemoryPlan


@pytest.fixture(scope="session")
def serving() -> LongContextModel:
    """Return the embedded backbone."""
    return load()


@pytest.fixture(scope="session")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, psutil.Process]]:
    """Return the address of a `locret-serve` in a process of its own, its log, and the process."""
    folder = tmp_path_factory.mktemp("process")
    options = ["--kv-memory", "32MiB", "--max-body", "64KiB", "--max-upload", "1MiB", "--name", "checkpoints/tiny"]
    with (folder / "log").open("w+") as log, started(folder / "contexts", *options, stderr=log) as (child, ready):
        yield ready["url"].removesuffix("/v1"), folder / "log", psutil.Process(child.pid)


@pytest.fixture(scope="session")
def book() -> str:
    """Return a text of about 1,000 tokens."""
    return (ROOT / "recipes/infer/pass_key.txt").read_text(encoding="utf-8")[:4000]


@pytest.fixture
def library(serving: LongContextModel, tmp_path: Path) -> Iterator[Library]:
    """Return an empty library."""
    opened = Library(tmp_path / "contexts", serving, MemoryPlan.of(serving, KV_MEMORY))
    yield opened
    opened.close()


@pytest.fixture
def read() -> Callable[..., Entry]:
    """Return what uploads a text to a library and waits until it has been read."""

    def read(library: Library, name: str, text: str, **options: Any) -> Entry:
        (file := library.upload(name)).write_text(text, encoding="utf-8")
        entry = library.read(name, file, **options)
        until(lambda: not entry.going, 60)
        return entry

    return read
