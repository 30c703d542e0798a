"""What the routes of one server share."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.process_collector import ProcessCollector
from starlette.requests import HTTPConnection

from locret.engines.transformers import PagedContexts
from locret.infer.serve.answers import Answers
from locret.infer.serve.library import Library
from locret.infer.serve.prompts import Prompts
from locret.infer.serve.serve_options import ServeOptions

SHORT_WORK, LONG_WORK = 4, 16
"""Threads for what takes milliseconds, such as tokenising a question, and for what waits until a text is read."""
FIRST_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Metrics:
    """What one server counts, in a registry of its own: two servers in one process do not add up."""

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()
        ProcessCollector(registry=own)
        self.requests = Counter("locret_requests", "Requests", ["route", "status"], registry=own)
        self.questions = Counter("locret_question_tokens", "Tokens of questions", registry=own)
        self.written = Counter("locret_written_tokens", "Tokens of answers", registry=own)
        about = "Seconds from a request to the first token of its answer"
        self.first_token = Histogram("locret_first_token_seconds", about, buckets=FIRST_TOKEN_SECONDS, registry=own)


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
        self.lm, self.api_key, self.started, self.metrics = self.library.lm, self.options.key, time.time(), Metrics()
        self.max_body = self.options.bytes_of("max_body")
        self.answers = Answers(self.lm.tokenizer, self.lm.end_ids, max_queue=self.options.max_queue)
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
