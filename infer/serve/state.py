"""What the routes of one server share."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.requests import HTTPConnection

from locret.infer.serve.answers import Answers
from locret.infer.serve.metrics import Metrics
from locret.infer.serve.prompts import Prompts

if TYPE_CHECKING:
    from locret.conversation.long_context_model import LongContextModel
    from locret.infer.serve.library import Library
    from locret.infer.serve.plan import MemoryPlan
    from locret.infer.serve.transformers_engine import TransformersEngine

SHORT_WORK, LONG_WORK = 4, 16
"""Threads for what takes milliseconds, such as tokenising a question, and for what waits until a text is read."""


@dataclass(kw_only=True)
class ServerState:
    """A running server: `state_of(request)` gives it to a route."""

    lm: LongContextModel
    engine: TransformersEngine
    library: Library
    """The contexts on disk."""
    plan: MemoryPlan
    """How --kv-memory is divided."""
    model: str
    """Name of the model in requests and responses."""
    api_key: str | None = None
    """What clients show as a bearer token; None lets everybody in."""
    hosts: frozenset[str] | None = None
    """Names by which requests may address the server; None takes any. On a loopback address others are pages of
    strangers, whose names were made to point here."""
    max_body: int = 4 << 20
    """Bytes of a request's body; uploads of contexts are streams and have no such bound."""
    max_queue: int = 256
    """Answers that may wait for their first token; further requests get 429."""
    max_new_tokens: int = 1024
    """Longest answer in tokens where a request does not say."""
    timeout: float = 600.0
    """Seconds that a request may take from its arrival to its last token."""
    started: float = field(default_factory=time.time)
    """Seconds since the epoch."""
    metrics: Metrics = field(default_factory=Metrics)
    """What has been counted."""
    draining: bool = False
    """Whether the server is about to end, so that new requests are refused."""

    def __post_init__(self) -> None:
        self.answers = Answers(self.engine, self.lm.tokenizer, self.lm.end_ids, max_queue=self.max_queue)
        self.prompts = Prompts(self.lm, self.library)
        self.short_work = ThreadPoolExecutor(SHORT_WORK, "locret-short")
        self.long_work = ThreadPoolExecutor(LONG_WORK, "locret-long")

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
