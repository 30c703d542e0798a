"""The server's parts put together: routes, what each request must pass, and what it is refused with."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from locret._version import __version__
from locret.infer.serve import context_routes, page, watch_routes
from locret.infer.serve.metrics import CountRequests
from locret.infer.serve.refusal import Refusal
from locret.infer.serve.state import ServerState


def make_app(state: ServerState) -> FastAPI:
    """Return the application of a server.

    Routers are `router` of the modules; routes take what they share from `state_of(request)` and raise `Refusal`.
    """
    app = FastAPI(title="Locret", version=__version__, docs_url=None, redoc_url=None)
    app.state.server = state
    app.add_exception_handler(Refusal, _refused)
    app.add_middleware(CountRequests, metrics=state.metrics)
    for part in (page, watch_routes, context_routes):
        app.include_router(part.router)
    return app


async def _refused(_: Request, refusal: Exception) -> JSONResponse:
    assert isinstance(refusal, Refusal)
    return JSONResponse(refusal.body(), refusal.status, headers=refusal.headers)
