"""What the server tells those who watch it: `/metrics` for Prometheus, `/healthz` for whoever sends it requests."""

from __future__ import annotations

from typing import Any

import psutil
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from locret.infer.serve.metrics import Now, PartMemory
from locret.infer.serve.state import ServerState, state_of

router = APIRouter()


@router.get("/healthz", summary="Whether the server takes requests")
def health(request: Request) -> JSONResponse:
    """Return 200 with "ready", or 503 with "draining" while the server ends."""
    draining = state_of(request).draining
    return JSONResponse({"status": "draining" if draining else "ready"}, 503 if draining else 200)


@router.get("/metrics", summary="Counters for Prometheus", response_class=Response)
def metrics(request: Request) -> Response:
    """Return what the server counts, in Prometheus' text format."""
    state = state_of(request)
    return Response(state.metrics.text(now(state)), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/memory", summary="The memory that was promised, and what is in use")
def memory(request: Request) -> dict[str, Any]:
    """Return the bytes planned and used of each part, and those of the whole process."""
    parts = now(state_of(request)).memory
    return {
        "parts": {name: {"planned": part.planned, "used": part.used} for name, part in parts.items()},
        "resident": psutil.Process().memory_info().rss,
    }


def now(state: ServerState) -> Now:
    """Return how things are with a server at this moment."""
    engine = state.engine
    return Now(waiting=0, contexts={}, memory={"pages": PartMemory(engine.planned_bytes, engine.used_bytes)})
