"""What the routes of one server share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.requests import HTTPConnection

from locret.infer.serve.engine import Engine
from locret.infer.serve.metrics import Metrics

if TYPE_CHECKING:
    from locret.conversation.context import LongContextModel


@dataclass(kw_only=True)
class ServerState:
    """A running server: `state_of(request)` gives it to a route."""

    lm: LongContextModel
    engine: Engine
    library: Any
    """The contexts on disk, `locret.infer.serve.library.Library`."""
    plan: Any = None
    """How --kv-memory is divided, `locret.infer.serve.plan.MemoryPlan`."""
    model: str
    """Name of the model in requests and responses."""
    api_key: str | None = None
    """What clients show as a bearer token; None lets everybody in."""
    max_body: int = 4 << 20
    """Bytes of a request's body; uploads of contexts are streams and have no such bound."""
    max_queue: int = 256
    """Answers that may wait for memory; further requests get 429."""
    timeout: float = 600.0
    """Seconds that a request may take from its arrival to its last token."""
    started: float = field(default_factory=time.time)
    """Seconds since the epoch."""
    metrics: Metrics = field(default_factory=Metrics)
    """What has been counted."""
    draining: bool = False
    """Whether the server is about to end, so that new requests are refused."""


def state_of(connection: HTTPConnection) -> ServerState:
    """Return the state of the server that a request has reached."""
    state: ServerState = connection.app.state.server
    return state
