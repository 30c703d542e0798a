"""What the server counts, and the requests by route and status."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.process_collector import ProcessCollector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

FIRST_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
NO_ROUTE = "none"
"""The route of a request that none takes: paths that clients make up must not become labels."""


class Metrics:
    """What one server counts, in a registry of its own: two servers in one process do not add up."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.requests = Counter("locret_requests", "Requests", ["route", "status"], registry=self.registry)
        self.first_token = Histogram(
            "locret_first_token_seconds",
            "Seconds from a request to the first token of its answer",
            buckets=FIRST_TOKEN_SECONDS,
            registry=self.registry,
        )
        self.questions = Counter("locret_question_tokens", "Tokens of questions", registry=self.registry)
        self.written = Counter("locret_written_tokens", "Tokens of answers", registry=self.registry)


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
            route = getattr(scope.get("route"), "path", NO_ROUTE)
            self._metrics.requests.labels(route, str(status)).inc()
