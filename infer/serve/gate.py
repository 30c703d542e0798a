"""What every request passes before a route sees it: who asks, by which name, and how much."""

from __future__ import annotations

import asyncio
import hmac
import re
import time
from contextlib import suppress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from locret.base.fields import shown
from locret.infer.serve.refusal import Refusal
from locret.infer.serve.state import ServerState

OPEN = re.compile(r"/|/healthz|/page/.*|/favicon.ico")
"""Paths that need no key: they tell nothing but that a server is here."""
STREAMED = ("POST", "/v1/contexts")
"""What takes a text as a stream, which the route itself bounds."""
WAIT_FOR_BODY = 30.0
"""Seconds without a byte of a body that is not complete."""
BODIES = 4
"""Bodies of the largest size that may be held at once, or as many bytes of smaller ones."""
LINGER, REST = 2.0, 16 << 20
"""Seconds and bytes for which the rest of a body that was refused is taken and dropped, as most clients read an answer
only when they have sent all of it, and lose it if the connection is cut before."""


class Gate:
    """ASGI middleware; see the module."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self.app, self.state = app, state
        self.held = 0
        """Bytes of bodies that are held now."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, body = Headers(scope=scope), bytearray()
        passing = _Passing(receive, send, waits=headers.get("expect", "").lower() == "100-continue")
        try:
            try:
                self._check(scope["method"], scope["path"], headers)
                if (scope["method"], scope["path"]) != STREAMED:
                    await self._take(body, headers, passing)
                    passing.whole = bytes(body)
            except Refusal as refusal:
                response = JSONResponse(refusal.body(), refusal.status, headers=refusal.headers)
                await response(scope, passing.receive, passing.send)
            except _Left:
                pass
            else:
                await self.app(scope, passing.receive, passing.send)
        finally:
            self.held -= len(body)

    def _check(self, method: str, path: str, headers: Headers) -> None:
        """Refuse who may not ask."""
        state = self.state
        if state.hosts is not None and (name := _host(headers.get("host", ""))) not in state.hosts:
            raise Refusal(403, f"the Host {shown(name)} is not this server; address it as {min(state.hosts)}")
        # A browser lets pages of other sites send texts here, though not read the answer; it says so.
        if method not in ("GET", "HEAD") and headers.get("sec-fetch-site") == "cross-site":
            raise Refusal(403, "a page of another site asks, which may not change anything here; use the page at /")
        if OPEN.fullmatch(path):
            return
        if state.api_key is not None:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            given = key.strip() if scheme.lower() == "bearer" else headers.get("api-key", "")
            if not hmac.compare_digest(given.encode(), state.api_key.encode()):
                raise Refusal(
                    401,
                    "the API key is missing or another; send it as Authorization: Bearer KEY",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        if state.draining:
            raise Refusal(503, "the server is about to end; ask it again when it has started", code="ending")

    async def _take(self, body: bytearray, headers: Headers, passing: _Passing) -> None:
        """Receive a body that is not too large."""
        most, timeout = self.state.max_body, self.state.options.timeout
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > most:
            raise _too_large(declared[:20], most)
        deadline = time.monotonic() + timeout
        while True:
            wait = min(WAIT_FOR_BODY, deadline - time.monotonic())
            try:
                message = await asyncio.wait_for(passing.receive(), wait)
            except asyncio.TimeoutError:
                since = f"no byte of the body came for {WAIT_FOR_BODY:g} s"
                why = since if wait == WAIT_FOR_BODY else f"the body took more than --timeout {timeout:g} s to come"
                raise Refusal(408, f"{why}; send it again, whole") from None
            if message["type"] == "http.disconnect":
                raise _Left
            part = message.get("body", b"")
            if len(body) + len(part) > most:
                raise _too_large(f"more than {most}", most)
            if self.held + len(part) > BODIES * most:
                again = {"Retry-After": "1"}
                raise Refusal(429, "too many large requests at once; try again in a moment", headers=again)
            self.held += len(part)
            body += part
            if not message.get("more_body", False):
                return


def _too_large(size: str, most: int) -> Refusal:
    return Refusal(
        413,
        f"the body has {size} bytes, but --max-body allows {most}; upload a long text as a context "
        "(POST /v1/contexts), which may have any size",
    )


class _Left(Exception):
    """The client has left before its request was whole."""


class _Passing:
    """A request that passes: its body as it comes, or as it was taken, and the answer that comes after all of it.

    A client that `waits` sends nothing before it is told to, which the first call of `receive` does.
    """

    def __init__(self, receive: Receive, send: Send, *, waits: bool) -> None:
        self._receive, self._send, self._waits, self._ended = receive, send, waits, False
        self.whole: bytes | None = None
        """A body that has been taken, which is handed out once."""

    async def receive(self) -> Message:
        """Return the next part of the body."""
        if self.whole is not None:
            whole, self.whole = self.whole, None
            return {"type": "http.request", "body": whole, "more_body": False}
        self._waits = False
        message = await self._receive()
        self._ended = not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        """Send a part of the answer: a refusal when all of the body has come, or the connection is cut after it."""
        if message["type"] == "http.response.start" and message["status"] >= 400 and not self._ended:
            if not self._waits:
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._drop(), LINGER)
            if not self._ended:
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
        await self._send(message)

    async def _drop(self) -> None:
        dropped = 0
        while not self._ended and dropped < REST:
            dropped += len((await self.receive()).get("body", b""))


def _host(header: str) -> str:
    """Return the name in a Host header, without its port."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return header
