"""Fixtures of the server's tests: the embedded backbone with small budgets, a text, and a library of contexts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import many_clients
import pytest
from running import KV_MEMORY, ROOT, load

from locret import LongContextModel
from locret.infer.serve.index import Entry
from locret.infer.serve.library import Library
from locret.infer.serve.plan import MemoryPlan


@pytest.fixture(scope="session")
def serving() -> LongContextModel:
    """Return the embedded backbone."""
    return load()


@pytest.fixture(scope="session")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Return the address of a `locret-serve` in a process of its own, and its log."""
    folder = tmp_path_factory.mktemp("process")
    options = ["--kv-memory", "32MiB", "--max-body", "64KiB", "--max-upload", "1MiB"]
    with many_clients.serving(folder / "contexts", options) as (url, _):
        yield url, folder / "server.log"


@pytest.fixture(scope="session")
def book() -> str:
    """Return a text of about 1,000 tokens."""
    return (ROOT / "recipes/infer/pass_key.txt").read_text(encoding="utf-8")[:4000]


@pytest.fixture
def library(serving: LongContextModel, tmp_path: Path) -> Iterator[Library]:
    """Return an empty library."""
    opened = Library(tmp_path / "contexts", serving, MemoryPlan.of(serving, KV_MEMORY), stall=5.0)
    yield opened
    opened.close()


@pytest.fixture
def read() -> Callable[..., Entry]:
    """Return what uploads a text to a library and waits until it has been read."""

    def read(library: Library, name: str, text: str, **options: Any) -> Entry:
        upload = library.upload(name)
        upload.write(text.encode())
        upload.end()
        entry = library.read(name, upload, **options)
        assert (job := entry.job) is None or job.done.wait(60)
        return entry

    return read
