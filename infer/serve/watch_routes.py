"""What the server tells those who watch it: `/metrics` for Prometheus, `/healthz` for whoever sends it requests."""

from __future__ import annotations

from typing import Any

import psutil
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from torch import nn

from locret.infer.serve.metrics import Now, PartMemory
from locret.infer.serve.state import ServerState, state_of

router = APIRouter()


@router.get("/healthz", summary="Whether the server takes requests")
def health(request: Request) -> JSONResponse:
    """Return 200 with "ready", or 503: "draining" while the server ends, "stopped" where nothing writes answers."""
    state = state_of(request)
    status = "draining" if state.draining else "ready" if state.engine.running else "stopped"
    return JSONResponse({"status": status}, 200 if status == "ready" else 503)


@router.get("/metrics", summary="Counters for Prometheus", response_class=Response)
def metrics(request: Request) -> Response:
    """Return what the server counts, in Prometheus' text format."""
    state = state_of(request)
    return Response(state.metrics.text(now(state)), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/memory", summary="The memory that was promised, and what is in use")
def memory(request: Request) -> dict[str, Any]:
    """Return the bytes planned and used of each part, and those of the whole process."""
    parts = memory_of(state_of(request))
    return {
        "object": "memory",
        "parts": {name: {"planned": part.planned, "used": part.used} for name, part in parts.items()},
        "resident": psutil.Process().memory_info().rss,
    }


def now(state: ServerState) -> Now:
    """Return how things are with a server at this moment."""
    library = state.library
    named, automatic = library.entries(), library.automatic()
    going = sum(entry.state in ("waiting", "reading") for entry in named)
    return Now(
        waiting=state.answers.waiting,
        running=state.answers.running,
        contexts={"disk": len(named) - going, "automatic": len(automatic), "reading": going, "loaded": library.loaded},
        memory=memory_of(state),
        read_tokens=library.turns.tokens,
        read_chunks=library.turns.chunks,
    )


def memory_of(state: ServerState) -> dict[str, PartMemory]:
    """Return the parts of the memory that was promised; what chunks and files work with is always set aside."""
    plan, engine, used = state.plan, state.engine, state.library.used_bytes
    weights, aside = _weights(state), plan.working + plan.moving
    return {
        "weights": PartMemory(weights, weights),
        "answers": PartMemory(engine.planned_bytes, engine.used_bytes),
        "reading": PartMemory(plan.reading, used["reading"]),
        "loaded": PartMemory(plan.loaded, used["loaded"]),
        "working": PartMemory(aside, aside),
    }


def _weights(state: ServerState) -> int:
    """Return the bytes of the backbone and of what rates units."""
    parts = (part for part in (state.lm.model, state.lm.scorer) if isinstance(part, nn.Module))
    return sum(weight.nbytes for part in parts for weight in (*part.parameters(), *part.buffers()))
