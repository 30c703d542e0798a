"""What tests of the server share besides fixtures: texts, waiting, and a real server in a thread."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

import locret
from locret import LongContextModel, RetentionPolicy
from locret.engines.transformers import PagedContexts
from locret.infer.serve.app import Protocol, make_app
from locret.infer.serve.library import Library
from locret.infer.serve.plan import MemoryPlan
from locret.infer.serve.refusal import Refusal
from locret.infer.serve.serve_options import ServeOptions
from locret.infer.serve.state import ServerState

ROOT = Path(locret.__file__).resolve().parent.parent
KV_MEMORY = 24 << 20
POLICY = RetentionPolicy(budget=64, chunk_size=128, stabilizers=16, local_len=8)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
QUESTION = "What is the pass key?"


def load() -> LongContextModel:
    """Return the embedded backbone with budgets that are small beside the texts of these tests."""
    heads = str(ROOT / "checkpoints/tiny-heads")
    return LongContextModel.from_pretrained(str(ROOT / "checkpoints/tiny"), heads=heads, device="cpu", policy=POLICY)


def text_with(key: int, repeats: int = 12) -> str:
    """Return a text with a pass key in its middle."""
    return FILLER * repeats + f"The pass key is {key}. Remember it. {key} is the pass key. " + FILLER * repeats


def ids(count: int, start: int = 5) -> list[int]:
    """Return token ids of no text."""
    return [start + nth * 7 % 800 for nth in range(count)]


def never() -> bool:
    """Let whoever waits wait on."""
    return False


def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def refusal(call: Callable[[], object]) -> Refusal:
    """Return what a call is refused with, which is one sentence."""
    with pytest.raises(Refusal) as caught:
        call()
    assert caught.value.message
    assert "\n" not in caught.value.message
    return caught.value


def refused(response: Any, status: int) -> str:
    """Return the sentence that a request is refused with, in the shape of OpenAI's errors."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    assert "Traceback" not in error["message"]
    return str(error["message"])


MODEL = ["--model", str(ROOT / "checkpoints/tiny"), "--heads", str(ROOT / "checkpoints/tiny-heads"), "--device", "cpu"]


@contextmanager
def started(
    folder: Path, *options: str, stderr: Any = subprocess.PIPE, **environment: str
) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Start a server as a process, and yield it and what it said when it was ready."""
    line = [sys.executable, "-m", "locret.infer.serve.command", *MODEL, "--contexts", str(folder), "--port", "0"]
    line += ["--json", *options]
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    process = subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=folder.parent, env=surroundings
    )
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert ready, process.communicate(timeout=90)[1]
        yield process, json.loads(ready)
    finally:
        process.kill()
        process.communicate()


class Running:
    """A server that runs, with its state."""

    def __init__(self, state: ServerState, port: int) -> None:
        self.state, self.url = state, f"http://127.0.0.1:{port}"

    def read(self, name: str, text: str) -> None:
        """Read a text into a context of the library."""
        context = self.state.lm.read(text, name=name, progress=False)
        context.save(self.state.library.folder / f"{name}.ctx")

    def idle(self) -> bool:
        """Return whether nobody waits and nothing is written."""
        answers = self.state.answers
        return answers.waiting == answers.running == 0


@contextmanager
def running(
    library: Library | tuple[LongContextModel, Path], *, kv_bytes: int | None = None, **options: Any
) -> Iterator[Running]:
    """Run a server on a free port for the block, over a library or a new one in a folder; options of `ServeOptions`."""
    if isinstance(library, tuple):
        lm, folder = library
        library = Library(folder, lm, MemoryPlan.of(lm, options.get("kv_memory", "64MiB"), readers=1))
    engine = PagedContexts(library.lm.model, kv_bytes=kv_bytes or library.plan.engine)
    engine.start()
    state = ServerState(engine=engine, library=library, model="tiny", options=ServeOptions(**options))
    place = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(make_app(state), http=Protocol, log_level="error", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [place]}, daemon=True)
    thread.start()
    try:
        until(lambda: server.started)
        yield Running(state, place.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(10)
        place.close()
        state.close()
