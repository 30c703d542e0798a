"""What the routes of one server share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import HTTPConnection, Request

from locret.base.openmp import Workers
from locret.engines.transformers import PagedContexts
from locret.infer.serve.answers import Answers
from locret.infer.serve.library import Library
from locret.infer.serve.prompts import Prompts
from locret.infer.serve.refusal import Refusal
from locret.infer.serve.serve_options import ServeOptions

SHORT_WORK, LONG_WORK = 4, 16
"""Threads for what takes milliseconds, such as tokenising a question, and for what waits until a text is read."""
STALL = 30.0
"""Seconds without a byte of a body that is not complete."""

_T = TypeVar("_T")


@dataclass(kw_only=True)
class ServerState:
    """A running server: `state_of(request)` gives it to a route."""

    engine: PagedContexts
    library: Library
    model: str
    """Name of the model in requests and responses."""
    options: ServeOptions
    draining: bool = False
    """Whether the server is about to end, so that new requests are refused."""

    def __post_init__(self) -> None:
        self.lm, self.api_key, self.started = self.library.lm, self.options.key, time.time()
        self.max_body = self.options.bytes_of("max_body")
        turns, most = self.library.turns, self.options.max_queue
        self.answers = Answers(self.lm.tokenizer, self.lm.end_ids, turns, max_queue=most)
        self.prompts = Prompts(self.lm, self.library)
        self.short_work = Workers(SHORT_WORK, "locret-short")
        self.converting = asyncio.Lock()  # one document at a time
        self.long_work = Workers(LONG_WORK, "locret-long")

    def close(self) -> None:
        """End what is read and written, and give back threads, memory and the folder of contexts; idempotent."""
        for pool in (self.short_work, self.long_work):
            pool.shutdown(wait=False, cancel_futures=True)
        self.answers.close()
        self.library.close()
        self.engine.stop()


def state_of(connection: HTTPConnection) -> ServerState:
    """Return the state of the server that a request has reached."""
    state: ServerState = connection.app.state.server
    return state


async def unless_gone(request: Request, work: Coroutine[Any, Any, _T] | Any) -> _T:
    """Return what some work returns; it is cancelled if the client leaves."""
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            result: _T = task.result()
            return result
        raise Refusal(499, "the client has left before there was an answer")
    finally:
        watch.cancel()
        if task.cancel():
            with suppress(asyncio.CancelledError, Exception):
                await task


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
