"""The server's parts put together: routes, what each request must pass, and what it is refused with."""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import time
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import h11
import psutil
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from torch import nn
from uvicorn.protocols.http.h11_impl import H11Protocol

from locret._version import __version__
from locret.base.fields import shown
from locret.infer.serve import context_routes, openai_routes, page
from locret.infer.serve.refusal import Refusal, fault_of, one_line
from locret.infer.serve.state import STALL, ServerState, state_of

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


class Protocol(H11Protocol):
    """HTTP by h11, which bounds the head of a request; what it cannot read is refused as all else is."""

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, and close the connection."""
        refusal = Refusal(
            400, "the request is not HTTP that can be read, or its head is too long; send what is long in the body"
        )
        head = [("content-type", "application/json"), ("connection", "close")]
        body = h11.Data(data=json.dumps(refusal.body()).encode())
        for event in (h11.Response(status_code=400, headers=head, reason="Bad Request"), body, h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        self.transport.close()


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


OPEN = re.compile(r"/|/healthz|/page/.*|/favicon.ico")
"""Paths that need no key: they tell nothing but that a server is here."""
STREAMED = (("POST", "/v1/contexts"), ("POST", "/v1/files"))
"""What takes a text as a stream, which the route itself bounds."""
BODIES = 4
"""Bodies of the largest size that may be held at once, or as many bytes of smaller ones."""
LINGER, REST = 2.0, 16 << 20
"""Seconds and bytes for which the rest of a body that was refused is taken and dropped, as most clients read an answer
only when they have sent all of it, and lose it if the connection is cut before."""

_ENDING = Refusal(503, "the server is about to end; ask it again when it has started", code="ending")


class Gate:
    """ASGI middleware: what every request passes before a route sees it: who asks, by which name, and how much."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self.app, self.state = app, state
        self.held = 0
        """Bytes of bodies that are held now."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, body, ended, begun, events = Headers(scope=scope), bytearray(), False, False, False
        waits = headers.get("expect", "").lower() == "100-continue"  # it sends nothing before it is told to

        async def take() -> Message:
            nonlocal ended, waits
            waits = False
            message = await receive()
            ended = not message.get("more_body", False)
            return message

        async def drop() -> None:
            dropped = 0
            while not ended and dropped < REST:
                dropped += len((await take()).get("body", b""))

        async def answer(message: Message) -> None:
            nonlocal begun, events
            begun = True
            if message["type"] == "http.response.start":
                events = dict(message.get("headers", ())).get(b"content-type", b"").startswith(b"text/event-stream")
            if message["type"] == "http.response.start" and message["status"] >= 400 and not ended:
                if not waits:
                    with suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(drop(), LINGER)
                if not ended:
                    message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        try:
            try:
                self._check(scope["method"], scope["path"], headers)
                whole = (scope["method"], scope["path"]) not in STREAMED
                if whole:
                    await self._take(body, headers, take)
                await self.app(scope, _once(bytes(body), receive) if whole else take, answer)
            except Refusal as refusal:
                await JSONResponse(refusal.body(), refusal.status, headers=refusal.headers)(scope, take, answer)
        except ClientDisconnect:
            pass
        except asyncio.CancelledError:  # --drain is over
            if not begun:
                await JSONResponse(_ENDING.body(), _ENDING.status)(scope, receive, send)
            elif events:
                last = b"data: " + json.dumps(_ENDING.body()).encode() + b"\n\n"
                await send({"type": "http.response.body", "body": last})
        finally:
            self.held -= len(body)

    def _check(self, method: str, path: str, headers: Headers) -> None:
        state, name, keyed = self.state, _host(headers.get("host", "")), False
        if state.api_key is not None:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            given = key.strip() if scheme.lower() == "bearer" else headers.get("api-key", "")
            keyed = hmac.compare_digest(given.encode(), state.api_key.encode())
        # Under another name a page of strangers may ask, which has made that name point here. It has no key.
        if not (keyed or state.options.is_own_name(name)):
            why = f"the Host {shown(name)} is not this server; address it as {state.options.host}, or show its key"
            raise Refusal(403, why)
        # A browser lets pages of other sites send texts here, though not read the answer; it says so.
        if method not in ("GET", "HEAD") and not _from_own_page(headers):
            raise Refusal(403, "a page of another site asks, which may not change anything here; use the page at /")
        if OPEN.fullmatch(path):
            return
        if state.api_key is not None and not keyed:
            raise Refusal(
                401,
                "the API key is missing or another; send it as Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if state.draining:
            raise _ENDING

    async def _take(self, body: bytearray, headers: Headers, take: Receive) -> None:
        most, deadline = self.state.max_body, time.monotonic() + self.state.options.timeout
        declared = headers.get("content-length", "")
        size = int(declared[:20]) if declared.isdecimal() else 0
        message: Message = {"more_body": size <= most}
        while message.get("more_body", False):
            try:
                message = await asyncio.wait_for(take(), min(STALL, deadline - time.monotonic()))
            except asyncio.TimeoutError:
                raise Refusal(408, "the body did not come in time (--timeout); send it again, whole") from None
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            size = max(size, len(body) + len(message.get("body", b"")))
            if size > most:
                break
            if self.held + size - len(body) > BODIES * most:
                again = {"Retry-After": "1"}
                raise Refusal(429, "too many large requests at once; try again in a moment", headers=again)
            self.held += len(message.get("body", b""))
            body += message.get("body", b"")
        if size > most:
            raise Refusal(
                413,
                f"the body has {size} bytes or more, but --max-body allows {most}; upload a long text as a context "
                "(POST /v1/contexts), which may have any size",
            )


def _once(body: bytes, receive: Receive) -> Receive:
    """Return what hands out a body that has been taken, and then what comes."""
    given: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_one() -> Message:
        return given.pop() if given else await receive()

    return next_one


def _from_own_page(headers: Headers) -> bool:
    """Return whether no browser says that a page of another origin asks: by Sec-Fetch-Site, or where old, by Origin."""
    if (site := headers.get("sec-fetch-site")) is not None:
        return site in ("same-origin", "none")
    origin = headers.get("origin")
    return origin is None or origin.partition("://")[2].lower() == headers.get("host", "").lower()


def _host(header: str) -> str:
    """Return the name in a Host header, without its port."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return header
