"""`/v1/contexts`: texts are uploaded, read in the background, listed, looked at, forked, composed, shrunk and deleted.

A context in JSON, as every route here returns it:

    {"object": "context", "name": "book", "state": "reading", "message": "", "source": "book.txt",
     "created": 1795350109.6, "tokens": 4096, "units": 288, "bytes": 0, "text": false,
     "made": {}, "progress": {"bytes": 16676, "total": 33352, "seconds": 1.4}, "kept": [0.21, 0.07, ...]}

state is "waiting" (for a reader), "reading", "ready", "failed" or "damaged"; message says why of the last two. bytes
are those of its file. text: whether the passages that were kept can be shown. made: {"bytes", "sha256", "seconds"} of
an upload, {"of": [names]} of what was composed or shrunk. progress: null once it is ready; its total is null where it
is unknown. kept: for 50 stretches of the text which share of each is kept, 0 to 1; null in lists, but while it is read.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import Field
from safetensors import SafetensorError
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from locret.conversation.saved import SavedContext
from locret.infer.serve import kept
from locret.infer.serve.index import Entry
from locret.infer.serve.library import Library
from locret.infer.serve.receiver import About, receiver_of
from locret.infer.serve.refusal import Refusal, not_stored
from locret.infer.serve.schemas import Body
from locret.infer.serve.state import state_of
from locret.infer.serve.upload import TooLarge, Upload

router = APIRouter(prefix="/v1/contexts", tags=["contexts"])

_T = TypeVar("_T")
_LOOK = 0.1
"""Seconds between two looks at how far a text has been read."""
_ALIVE = 15.0
"""Seconds after which a stream without news says that it is there."""
_GONE = "the client went away before the text had ended; upload it again"
_PROTECT = (
    "What stays whatever its scores: system, document, message:N or tokens:A-B, each with a least share of the "
    "budget, as document=0.5, instead of all its units; each=0.05"
)
_Name = Annotated[str, Field(max_length=200)]
_Wait = Annotated[bool, Query(description="Answer only when it is ready")]


class Fork(Body):
    """A copy of a context under another name."""

    name: _Name
    """What to call the copy."""


class Shrink(Body):
    """A smaller context of one that has been read."""

    name: _Name
    """What to call it."""
    budget: Annotated[int, Field(ge=1, le=2**31)]
    """Units per KV head, fewer than it has."""


class Compose(Body):
    """Contexts that were read apart, joined so that they are asked together."""

    name: _Name
    """What to call the whole."""
    contexts: Annotated[list[str], Field(min_length=2, max_length=64, fail_fast=True)]
    """Names of the contexts, in their order."""
    budget: Annotated[int, Field(ge=1, le=2**31)] | None = None
    """Units per KV head of the whole; null: all that are held."""
    shares: Annotated[str, Field(max_length=64)] | Annotated[list[float], Field(max_length=64, fail_fast=True)] = "fair"
    """Within a budget: "fair", "score", or a number for each context."""


def _library(request: Request) -> Library:
    return state_of(request).library


def described(entry: Entry, *, look: bool = False) -> dict[str, Any]:
    """Return a context in JSON; `look` reads from its file what is kept."""
    now, progress, done = entry.state, entry.progress, None
    shown: Any = None
    if now in ("waiting", "reading"):
        shown = list(progress.kept)
        done = {"bytes": progress.bytes, "total": progress.total, "seconds": round(progress.seconds, 3)}
    elif look and now == "ready":
        try:
            shown = kept.mean_shares(kept.positions_of(entry.path), entry.tokens)
        except (OSError, SafetensorError):  # it was deleted meanwhile
            shown = None
    return {
        "object": "context",
        "name": entry.name,
        "state": now,
        "message": entry.message,
        "source": entry.source,
        "created": entry.created,
        "tokens": progress.tokens,
        "units": progress.units,
        "bytes": entry.size,
        "text": entry.has_text,
        "made": entry.notes,
        "progress": done,
        "kept": shown,
    }


@router.get("", summary="All contexts")
def listed(request: Request) -> dict[str, Any]:
    """Return `{"object": "list", "data": [context, ...]}`, in the order of names."""
    return {"object": "list", "data": [described(entry) for entry in _library(request).entries()]}


@router.post("", status_code=202, summary="Upload a text and read it")
async def upload(
    request: Request,
    name: str = Query(description="What to call the context", max_length=200),
    source: str | None = Query(None, description="What the text is called; else the file's name", max_length=200),
    system: str | None = Query(None, description="System message that comes before the text", max_length=20_000),
    protect: Annotated[list[str], Query(description=_PROTECT, max_length=64)] = [],  # noqa: B006 (FastAPI copies it)
    wait: _Wait = False,
) -> JSONResponse:
    """Take a text of any length as the body, UTF-8, or one file of a multipart form, and read it in the background.

    Returns the context: 202 while it is read, 201 with `wait=true` when it is ready, if that takes no longer than
    `--timeout`.
    """
    about = About(name, source, system, protect)
    receiver = await run_in_threadpool(receiver_of, request.headers, _library(request), about)
    try:
        async for data in _parts(request, receiver.upload):
            if data:
                await run_in_threadpool(receiver.take, data)
        entry = await run_in_threadpool(receiver.end)
    except ClientDisconnect:
        receiver.fail(_GONE)
        raise Refusal(400, _GONE) from None
    except (ValueError, OSError, Refusal) as error:
        refusal = _refusal(error, receiver.upload)
        receiver.fail(refusal.message)
        raise refusal from error
    except BaseException:
        receiver.fail(_GONE)
        raise
    return await _answered(request, entry, wait)


@router.post("/compose", status_code=201, summary="Join contexts so that they are asked together")
async def compose(request: Request, body: Compose, wait: _Wait = True) -> JSONResponse:
    """Join contexts in their order under a new name; returns the context, 202 with `wait=false`."""
    call = _library(request).compose
    entry = await run_in_threadpool(lambda: call(body.contexts, body.name, budget=body.budget, shares=body.shares))
    return await _answered(request, entry, wait)


@router.get("/{name}", summary="One context")
def show(request: Request, name: str) -> dict[str, Any]:
    """Return a context, with what is kept of it."""
    return described(_library(request).find(name), look=True)


@router.delete("/{name}", summary="Delete a context, or end the reading of it")
def delete(request: Request, name: str) -> dict[str, Any]:
    """Return `{"object": "context.deleted", "name": name, "deleted": true}`. Answers that use it go on."""
    _library(request).delete(name)
    return {"object": "context.deleted", "name": name, "deleted": True}


@router.get("/{name}/events", summary="How a text is being read, as it happens")
async def events(request: Request, name: str) -> StreamingResponse:
    """Return server-sent events: `progress` with the context whenever something has changed, at last `end` with it.

    A context that is deleted meanwhile ends with `{"object": "context.deleted", "name": name, "deleted": true}`.
    """
    library, state = _library(request), state_of(request)
    entry = await run_in_threadpool(library.find, name)

    async def stream() -> AsyncIterator[str]:
        before, said = "", time.monotonic()
        while entry.going and not state.draining:
            if (data := json.dumps(described(entry))) != before:
                before, said = data, time.monotonic()
                yield f"event: progress\ndata: {data}\n\n"
            elif time.monotonic() - said > _ALIVE:
                said = time.monotonic()
                yield ": reading goes on\n\n"
            await asyncio.sleep(_LOOK)
        try:
            last = await run_in_threadpool(lambda: described(library.find(name), look=True))
        except Refusal:
            last = {"object": "context.deleted", "name": name, "deleted": True}
        yield f"event: end\ndata: {json.dumps(last)}\n\n"

    return StreamingResponse(stream(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


@router.get("/{name}/picture", summary="What was kept, as a picture", response_class=Response)
def picture(request: Request, name: str) -> Response:
    """Return an SVG of what every head has kept along the text."""
    entry = _library(request).get(name)
    drawn = _looked(entry, lambda: kept.picture(entry.name, kept.positions_of(entry.path), entry.tokens))
    policy = {"Content-Security-Policy": "default-src 'none'; img-src data:; style-src 'unsafe-inline'"}
    return Response(drawn, media_type="image/svg+xml", headers=policy)


@router.get("/{name}/kept", summary="The passages that most heads have kept")
def passages(
    request: Request, name: str, count: int = Query(10, ge=1, le=200, description="Passages wanted")
) -> dict[str, Any]:
    """Return `{"object": "list", "data": [{"start", "end", "place", "share", "text"}, ...]}`, in the text's order.

    start and end are tokens, place is where in the text it is, 0 to 1, share the part of all heads that hold it.
    """
    entry = _library(request).get(name)
    if not entry.has_text:
        raise Refusal(
            404,
            f"the text of context {name} is not kept, so its passages cannot be shown; upload it to a server that "
            "keeps texts",
        )
    tokenizer, ids, tokens = _library(request).lm.tokenizer, entry.ids, entry.tokens
    found = _looked(entry, lambda: kept.passages(kept.positions_of(entry.path), tokens, ids, tokenizer, count))
    return {"object": "list", "data": found}


@router.get("/{name}/messages", summary="What has stayed of each message")
def messages(request: Request, name: str) -> dict[str, Any]:
    """Return `{"object": "list", "data": [message, ...]}`, in the order of the conversation.

    A message is `{"role", "start", "tokens", "units", "least", "most", "share", "protected"}`: units is the mean over
    all layers and their KV heads of the units that stayed, share the part of all units held, protected "all", "part",
    a least share of the budget, or null.
    """
    entry = _library(request).get(name)
    found = _looked(entry, lambda: SavedContext.open(entry.path).kept_by_message())
    if found is None:
        raise Refusal(
            404, f"where the messages of context {name} are is not known, for an earlier version made it; read it again"
        )
    return {"object": "list", "data": [asdict(one) for one in found]}


@router.post("/{name}/fork", status_code=201, summary="Copy a context")
def fork(request: Request, name: str, body: Fork) -> JSONResponse:
    """Copy a context under another name; returns the copy."""
    return _result(_library(request).fork(name, body.name))


@router.post("/{name}/shrink", status_code=201, summary="Make a smaller context of one")
async def shrink(request: Request, name: str, body: Shrink, wait: _Wait = True) -> JSONResponse:
    """Make a context with fewer units, without reading again; returns it, 202 with `wait=false`."""
    call = _library(request).shrink
    entry = await run_in_threadpool(lambda: call(name, body.name, body.budget))
    return await _answered(request, entry, wait)


async def _parts(request: Request, upload: Upload) -> AsyncIterator[bytes]:
    """Yield a body as it comes."""
    parts = request.stream()
    while True:
        try:
            part = await asyncio.wait_for(anext(parts), upload.stall)
        except StopAsyncIteration:
            return
        except asyncio.TimeoutError:
            raise Refusal(408, upload.stalled, code="timeout") from None
        yield part


def _refusal(error: Exception, upload: Upload) -> Refusal:
    """Return what to say of an upload that cannot be taken."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, OSError):
        return not_stored(error)
    return Refusal(413 if isinstance(error, TooLarge) else upload.fault, str(error))


async def _answered(request: Request, entry: Entry, wait: bool) -> JSONResponse:
    """Return a context that is made, after a wait for its end or for as long as requests may take."""
    until = time.monotonic() + state_of(request).options.timeout
    while wait and entry.going and time.monotonic() < until:
        if await request.is_disconnected():
            raise Refusal(499, f"the client has left before context {entry.name} was ready")
        await asyncio.sleep(_LOOK / 4)
    return _result(entry)


def _result(entry: Entry) -> JSONResponse:
    """Return a context that was asked for, or why there is none."""
    if entry.state == "failed":
        raise Refusal(entry.fault, f"context {entry.name} could not be made: {entry.message}")
    return JSONResponse(described(entry), 201 if entry.state == "ready" else 202)


def _looked(entry: Entry, look: Callable[[], _T]) -> _T:
    try:
        return look()
    except (OSError, SafetensorError, KeyError, IndexError, ValueError) as error:
        raise Refusal(
            409, f"the file of context {entry.name} is gone or damaged; delete it, and read it again"
        ) from error
