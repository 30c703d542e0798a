"""What the server counts, and the requests by route and status."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

FIRST_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
NO_ROUTE = "none"
"""The route of a request that none takes: paths that clients make up must not become labels."""


@dataclass(frozen=True)
class PartMemory:
    """Bytes of one part of what was promised at the start."""

    planned: int
    used: int


@dataclass(frozen=True, kw_only=True)
class Now:
    """What is true at this moment."""

    waiting: int
    """Answers that wait for their first token."""
    running: int
    """Answers that have it."""
    contexts: Mapping[str, int]
    """Contexts by where they are."""
    memory: Mapping[str, PartMemory]
    """The memory that was promised, part by part."""
    read_tokens: int
    """Tokens of texts that were read since the start."""
    read_chunks: int
    """Chunks that they were read in."""


class Metrics:
    """What one server counts, in a registry of its own: two servers in one process do not add up."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._requests = Counter("locret_requests", "Requests", ["route", "status"], registry=self.registry)
        self._first_token = Histogram(
            "locret_first_token_seconds",
            "Seconds from a request to the first token of its answer",
            buckets=FIRST_TOKEN_SECONDS,
            registry=self.registry,
        )
        self._questions = Counter("locret_question_tokens", "Tokens of questions", registry=self.registry)
        self._written = Counter("locret_written_tokens", "Tokens of answers", registry=self.registry)

    def answered(self, route: str, status: int) -> None:
        """Count a request that has been answered or refused."""
        self._requests.labels(route, str(status)).inc()

    def began_answer(self, seconds: float) -> None:
        """Take down how long a request has waited for the first token of its answer."""
        self._first_token.observe(seconds)

    def asked(self, tokens: int) -> None:
        """Count the tokens of a question."""
        self._questions.inc(tokens)

    def wrote(self, tokens: int) -> None:
        """Count tokens of an answer."""
        self._written.inc(tokens)

    def text(self, now: Now) -> bytes:
        """Return all of it, and how things are now, in Prometheus' text format."""
        moment = CollectorRegistry()
        moment.register(_Moment(now))
        return generate_latest(self.registry) + generate_latest(moment)


class _Moment(Collector):
    """What is true now, besides the counters of what has happened."""

    def __init__(self, now: Now) -> None:
        self._now = now

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("locret_queue_length", "Answers that wait for their first token", self._now.waiting)
        yield GaugeMetricFamily("locret_running_answers", "Answers that are being written", self._now.running)
        yield CounterMetricFamily("locret_read_tokens", "Tokens of texts that were read", self._now.read_tokens)
        yield CounterMetricFamily("locret_read_chunks", "Chunks that were read", self._now.read_chunks)
        contexts = GaugeMetricFamily("locret_contexts", "Contexts by where they are", labels=["where"])
        for where, count in self._now.contexts.items():
            contexts.add_metric([where], count)
        yield contexts
        planned = GaugeMetricFamily("locret_planned_bytes", "Bytes promised at the start, by part", labels=["part"])
        used = GaugeMetricFamily("locret_used_bytes", "Bytes of the promise in use, by part", labels=["part"])
        for part, memory in self._now.memory.items():
            planned.add_metric([part], memory.planned)
            used.add_metric([part], memory.used)
        yield planned
        yield used


class CountRequests:
    """ASGI middleware that counts requests by the route that took them and the status they got."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and count it when its response begins, or when there is none."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 499  # the client left before there was a response

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception:
            status = 500
            raise
        finally:
            route = scope.get("route")
            self._metrics.answered(getattr(route, "path", NO_ROUTE), status)
