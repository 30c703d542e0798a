"""A real server in a thread: uvicorn on a free port, the library of contexts, the engine, the embedded backbone."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from locret import LongContextModel, RetentionPolicy
from locret.infer.serve.app import make_app
from locret.infer.serve.library import Library
from locret.infer.serve.plan import MemoryPlan
from locret.infer.serve.state import ServerState
from locret.infer.serve.transformers_engine import TransformersEngine

POLICY = RetentionPolicy(budget=64, chunk_size=128, stabilizers=16, local_len=16)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "


def load() -> LongContextModel:
    """Return the embedded backbone, which reads into few units."""
    return LongContextModel.from_pretrained("checkpoints/tiny", heads="checkpoints/tiny-heads", policy=POLICY)


def text_with(key: int, repeats: int = 12) -> str:
    """Return a text with a pass key in its middle."""
    return FILLER * repeats + f"The pass key is {key}. Remember it. {key} is the pass key. " + FILLER * repeats


class Running:
    """A server that runs.

    Args:
        state: The server's.
        port: Where it listens.
    """

    def __init__(self, state: ServerState, port: int) -> None:
        self.state, self.url = state, f"http://127.0.0.1:{port}"

    def read(self, name: str, text: str) -> None:
        """Read a text into a context of the library."""
        context = self.state.lm.read(text, name=name, progress=False)
        context.save(self.state.library.folder / f"{name}.ctx")


@contextmanager
def running(
    lm: LongContextModel, folder: Path, *, kv_memory: str = "64MiB", kv_bytes: int | None = None, **options: Any
) -> Iterator[Running]:
    """Run a server for the block.

    Args:
        lm: What reads and answers.
        folder: Of the contexts.
        kv_memory: As the option of `locret-serve`.
        kv_bytes: Bytes of the engine, if not what the plan gives it.
        options: Of `ServerState`.
    """
    plan = MemoryPlan.of(lm, kv_memory, readers=1)
    library = Library(folder, lm, plan)
    engine = TransformersEngine(lm.model, library.turns, kv_bytes=kv_bytes or plan.engine)
    engine.start()
    state = ServerState(lm=lm, engine=engine, library=library, plan=plan, **{"model": "tiny", **options})
    with listening(state) as port:
        yield Running(state, port)


@contextmanager
def listening(state: ServerState) -> Iterator[int]:
    """Let a server listen on a free port of this machine for the block, and close it then."""
    place = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(make_app(state), log_level="error", lifespan="off", ws="none"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [place]}, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield place.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(10)
        place.close()
        state.close()
