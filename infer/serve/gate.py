"""What every request passes before a route sees it: who asks, by which name, and how much."""

from __future__ import annotations

import asyncio
import hmac
import re
import time
from contextlib import suppress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from locret.base.fields import shown
from locret.infer.serve.refusal import Refusal
from locret.infer.serve.state import ServerState

OPEN = re.compile(r"/|/healthz|/page/.*|/favicon.ico")
"""Paths that need no key: they tell nothing but that a server is here."""
STREAMED = (("POST", "/v1/contexts"), ("POST", "/v1/files"))
"""What takes a text as a stream, which the route itself bounds."""
STALL = 30.0
"""Seconds without a byte of a body that is not complete."""
BODIES = 4
"""Bodies of the largest size that may be held at once, or as many bytes of smaller ones."""
LINGER, REST = 2.0, 16 << 20
"""Seconds and bytes for which the rest of a body that was refused is taken and dropped, as most clients read an answer
only when they have sent all of it, and lose it if the connection is cut before."""

_ENDING = Refusal(503, "the server is about to end; ask it again when it has started", code="ending")


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
        headers, body, ended, begun = Headers(scope=scope), bytearray(), False, False
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
            nonlocal begun
            begun = True
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
            if begun:
                raise
            await JSONResponse(_ENDING.body(), _ENDING.status)(scope, receive, send)
        finally:
            self.held -= len(body)

    def _check(self, method: str, path: str, headers: Headers) -> None:
        """Refuse who may not ask."""
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
        """Receive a body that is not too large."""
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
