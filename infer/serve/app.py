"""The server's parts put together: routes, what each request must pass, and what it is refused with."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from locret._version import __version__
from locret.base.fields import shown
from locret.base.nearest import nearest
from locret.infer.serve import context_routes, openai_routes, page, watching
from locret.infer.serve.gate import Gate
from locret.infer.serve.metrics import CountRequests
from locret.infer.serve.refusal import Refusal
from locret.infer.serve.schemas import NO_EFFECT
from locret.infer.serve.state import ServerState

_log = logging.getLogger(__name__)


def make_app(state: ServerState) -> FastAPI:
    """Return the application of a server.

    Routers are `router` of the modules; routes take what they share from `state_of(request)` and raise `Refusal`.
    """
    app = FastAPI(title="Locret", version=__version__, docs_url=None, redoc_url=None)
    app.state.server = state
    for part in (openai_routes, context_routes, page, watching):
        app.include_router(part.router)
    app.add_exception_handler(Refusal, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_exception_handler(Exception, _failed)
    app.add_middleware(Gate, state=state)
    app.add_middleware(CountRequests, metrics=state.metrics)
    return app


async def _refused(_: Request, refusal: Exception) -> JSONResponse:
    assert isinstance(refusal, Refusal)
    return JSONResponse(refusal.body(), refusal.status, headers=refusal.headers)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    message, param = _sentence(error.errors(), _body_model(request))
    return await _refused(request, Refusal(400, message, param=param))


async def _no_route(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    at = f"{request.method} {shown(request.url.path)}"
    sentences = {
        400: "the body is no JSON that can be read; send a JSON object",
        404: f"{at} is no route of this server; /openapi.json lists those there are",
        405: f"{at} is no route of this server, but the path takes other methods; /openapi.json lists them",
    }
    message = sentences.get(error.status_code, f"{at}: {error.detail}")
    return await _refused(request, Refusal(error.status_code, message, headers=error.headers))


async def _failed(request: Request, error: Exception) -> JSONResponse:
    """Answer where we are wrong; the log has the traceback."""
    return await _refused(request, Refusal(500, "the server has failed; its log says why"))


def _body_model(request: Request) -> type[BaseModel] | None:
    """Return the schema of the body that a route takes."""
    for parameter in getattr(getattr(request.scope.get("route"), "dependant", None), "body_params", ()):
        kind = parameter.field_info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _sentence(errors: Sequence[Any], model: type[BaseModel] | None) -> tuple[str, str | None]:
    """Return what is wrong with a request as one sentence, and the field that it is about."""
    first = errors[0]
    part, *path = first["loc"]
    if first["type"] == "json_invalid":
        return f"the body is no JSON: {first['ctx']['error']} at character {path[0]}; send a JSON object", None
    if not path:
        return f"the {part} is missing or no JSON object; send one with Content-Type: application/json", None
    # Where a field may be of several types each of them complains: the one whose shape the value has goes deepest.
    field = str(path[0])
    about = [error for error in errors if error["loc"][1:2] == first["loc"][1:2]]
    worst = max(about, key=lambda error: (len(error["loc"]), error["type"] not in _OTHER_TYPE))
    path = list(worst["loc"][1:])
    name, value = _name(path), shown(worst["input"])
    if worst["type"] == "extra_forbidden":
        near = nearest(str(path[-1]), model.model_fields) if model is not None and len(path) == 1 else []
        hint = f"did you mean {' or '.join(near)}?" if near else "leave it out"
        return f"{name} is not a field here; {hint}", field
    if worst["type"] == "missing":
        return f"{name} is missing; give it", field
    if NO_EFFECT.intersection(map(str, path)):
        return f"{name} {value} has no effect here; leave it out", field
    rule = worst["msg"].removeprefix("Value error, ").removeprefix("Input ")
    rule = rule if rule.startswith("should") else f"is refused, as {rule[:1].lower()}{rule[1:]}"
    return f"{name} {value} {rule}; change it", field


_OTHER_TYPE = ("string_type", "int_type", "list_type", "float_type")


def _name(path: Sequence[Any]) -> str:
    """Return a field as JavaScript would write it; names of alternatives are left out."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        elif str(step).isidentifier() and str(step) not in _ALTERNATIVES:
            text += f".{step}" if text else str(step)
        elif not text:
            text = shown(step)
    return text


_ALTERNATIVES = ("str", "int", "float", "bool")
