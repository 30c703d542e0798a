"""The server's parts put together: routes, what each request must pass, and what it is refused with."""

from __future__ import annotations

from typing import Any

import psutil
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from torch import nn

from locret._version import __version__
from locret.base.fields import shown
from locret.infer.serve import context_routes, openai_routes, page
from locret.infer.serve.gate import Gate
from locret.infer.serve.refusal import Refusal, fault_of, one_line
from locret.infer.serve.state import ServerState, state_of

watched = APIRouter()


def make_app(state: ServerState) -> FastAPI:
    """Return the application of a server.

    Routers are `router` of the modules; routes take what they share from `state_of(request)` and raise `Refusal`.
    """
    app = FastAPI(title="Locret", version=__version__, docs_url=None, redoc_url=None)
    app.state.server = state
    for router in (openai_routes.router, context_routes.router, context_routes.files, page.router, watched):
        app.include_router(router)
    for kind in (Refusal, RequestValidationError, HTTPException, OSError, Exception):
        app.add_exception_handler(kind, _refused)
    app.add_middleware(Gate, state=state)
    return app


async def _refused(request: Request, error: Any) -> JSONResponse:
    refusal = error if isinstance(error, Refusal) else _refusal(request, error)
    return JSONResponse(refusal.body(), refusal.status, headers=refusal.headers)


def _refusal(request: Request, error: Exception) -> Refusal:
    if isinstance(error, RequestValidationError):
        message, param = _sentence(max(error.errors(), key=lambda one: len(one["loc"])))  # of the shape nearest to it
        return Refusal(400, message, param=param)
    if isinstance(error, HTTPException):
        why = "the body cannot be read; send a JSON object" if error.status_code == 400 else error.detail
        message = f"{request.method} {shown(request.url.path)}: {why}; /openapi.json lists the routes"
        return Refusal(error.status_code, message, headers=error.headers)
    if isinstance(error, OSError):
        return Refusal(
            fault_of(error), f"{one_line(error.strerror or error)}; look at the server's disk, and ask again"
        )
    return Refusal(500, "the server has failed; its log says why")  # where we are wrong; the log has the traceback


def _sentence(error: dict[str, Any]) -> tuple[str, str | None]:
    """Return what is wrong with a request as one sentence, and the field that it is about."""
    part, *path = error["loc"]
    steps = [str(one) for one in path if isinstance(one, int) or (one.isidentifier() and one not in _ALTERNATIVES)]
    name, param = ".".join(steps) or f"the {part}", steps[0] if steps else None
    said = error["msg"].removeprefix("Value error, ")
    if error["type"] == "json_invalid" or (error["type"] == "model_attributes_type" and not steps):
        return "the body is no JSON object; send one, with Content-Type: application/json", None
    if error["type"] == "missing":
        return f"{name} is missing; give it, and a body as a JSON object with Content-Type: application/json", param
    if error["type"] == "value_error":  # ours, which says what to do
        return f"{name}: {said}" if steps else said, param
    return f"{name} {shown(error['input'])}: {said[:1].lower()}{said[1:]}; change it", param


_ALTERNATIVES = ("str", "int", "float", "bool")


# -- for those who watch the server ------------------------------------------------------------------------------------


@watched.get("/healthz", summary="Whether the server takes requests")
def health(request: Request) -> JSONResponse:
    """Return 200 with "ready", or 503: "draining" while the server ends, "stopped" where nothing writes answers."""
    state = state_of(request)
    status = "draining" if state.draining else "ready" if state.engine.running else "stopped"
    return JSONResponse({"status": status}, 200 if status == "ready" else 503)


@watched.get("/v1/memory", summary="The memory that was promised, and what is in use")
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
