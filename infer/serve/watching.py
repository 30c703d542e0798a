"""What the server tells those who watch it: `/v1/memory`, and `/healthz` for load balancers."""

from __future__ import annotations

from typing import Any

import psutil
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from torch import nn

from locret.infer.serve.state import state_of

router = APIRouter()


@router.get("/healthz", summary="Whether the server takes requests")
def health(request: Request) -> JSONResponse:
    """Return 200 with "ready", or 503: "draining" while the server ends, "stopped" where nothing writes answers."""
    state = state_of(request)
    status = "draining" if state.draining else "ready" if state.engine.running else "stopped"
    return JSONResponse({"status": status}, 200 if status == "ready" else 503)


@router.get("/v1/memory", summary="The memory that was promised, and what is in use")
def memory(request: Request) -> dict[str, Any]:
    """Return the bytes planned and used of each part, those of the whole process, and the answers there are."""
    state = state_of(request)
    library, engine, plan = state.library, state.engine, state.library.plan
    parts = (part for part in (library.lm.model, library.lm.scorer) if isinstance(part, nn.Module))
    weights = sum(weight.nbytes for part in parts for weight in (*part.parameters(), *part.buffers()))
    aside = plan.working + plan.moving
    planned_and_used = {
        "weights": (weights, weights),
        "answers": (engine.planned_bytes, engine.used_bytes),
        "reading": (plan.reading, library.room.used),
        "working": (aside, aside),  # what chunks and files work with
    }
    return {
        "object": "memory",
        "parts": {name: {"planned": planned, "used": used} for name, (planned, used) in planned_and_used.items()},
        "resident": psutil.Process().memory_info().rss,
        "answers": {"waiting": state.answers.waiting, "running": state.answers.running},
    }
