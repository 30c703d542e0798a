"""`/v1/contexts`: texts are uploaded, read in the background, listed, looked at and deleted; `/v1/files`: the same.

A context in JSON, as every route here returns it:

    {"object": "context", "name": "book", "model": "smollm2:book", "state": "reading", "message": "",
     "source": "book.txt", "created": 1795350109.6, "tokens": 4096, "units": 288, "bytes": 0,
     "made": {}, "progress": {"bytes": 16676, "total": 33352, "seconds": 1.4}, "summary": null,
     "kept": null}

model: how clients ask it that can name nothing else. state is "waiting" (for a reader), "reading", "ready", "failed" or
"unusable"; message says why of the last two. bytes are those of its file. made: {"bytes", "sha256", "seconds"} of an
upload. progress: null once it is ready. summary: how much is kept then; where all is, "kept whole: 1,699 of 1,699
tokens fit in the budget". kept: for 50 stretches of the text which share is kept, 0 to 1; null in lists, and till then.
"""

from __future__ import annotations

import asyncio
import codecs
import hashlib
import re
import time
import unicodedata
from collections.abc import Coroutine
from contextlib import suppress
from itertools import chain, count
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse
from safetensors import SafetensorError
from starlette.concurrency import run_in_threadpool

from locret.base.fields import shown
from locret.infer.serve.convert import PURPOSES, converted
from locret.infer.serve.index import Entry
from locret.infer.serve.jobs import shares_in
from locret.infer.serve.library import Library
from locret.infer.serve.refusal import Refusal
from locret.infer.serve.state import STALL, state_of, unless_gone

router = APIRouter(prefix="/v1/contexts", tags=["contexts"])
files = APIRouter(prefix="/v1/files", tags=["files"])

_LOOK = 0.025
"""Seconds between two looks at whether a text has been read."""
_RATE = 1 << 14
"""Bytes of a text that have to come in each second, on average and after the first `STALL` of them."""
_TEXTS = ("text/", "application/octet-stream", "application/x-www-form-urlencoded")
"""Types of a body that is a text; the last is what curl says of --data-binary."""


def described(request: Request, entry: Entry, *, look: bool = False) -> dict[str, Any]:
    """Return a context in JSON; `look` reads from its file what is kept."""
    progress, done, share, summary = entry.progress, None, None, None
    if entry.going:
        done = {"bytes": progress.bytes, "total": progress.total, "seconds": round(progress.seconds, 3)}
    elif entry.state == "ready":
        rest = f"{entry.units:,} of {entry.tokens:,} tokens"
        where = "in every KV head" if entry.end == entry.units else "per KV head on average"
        summary = f"kept whole: {rest} fit in the budget" if entry.whole else f"kept {rest} {where}"
    if look and entry.state == "ready":
        # It was deleted meanwhile, or what is wrong is said when it is asked.
        with suppress(OSError, SafetensorError, RuntimeError, TypeError, ValueError, IndexError):
            share = shares_in(entry.path, entry.tokens)
    return {
        "object": "context",
        "name": entry.name,
        "model": f"{state_of(request).model}:{entry.name}",
        "state": entry.state,
        "message": entry.message,
        "source": entry.source,
        "created": entry.created,
        "tokens": progress.tokens,
        "units": progress.units,
        "bytes": entry.size,
        "made": entry.notes,
        "progress": done,
        "summary": summary,
        "kept": share,
    }


@router.get("", summary="All contexts")
def listed(request: Request) -> dict[str, Any]:
    """Return `{"object": "list", "data": [context, ...]}`, in the order of names."""
    return {"object": "list", "data": [described(request, entry) for entry in state_of(request).library.entries()]}


@router.post("", status_code=202, summary="Upload a text and read it")
async def upload(
    request: Request,
    name: str = Query(description="What to call the context", max_length=200),
    source: str | None = Query(None, description="What the text is called; else the name", max_length=200),
    system: str | None = Query(None, description="System message that comes before the text", max_length=20_000),
    wait: Annotated[bool, Query(description="Answer only when it is ready")] = False,
) -> JSONResponse:
    """Take a text of any length as the body, in UTF-8, and read it in the background when all of it has come.

    Returns the context: 202 while it is read, 201 with `wait=true` when it is ready, if that takes no longer than
    `--timeout`.
    """
    if unknown := request.query_params.keys() - {"name", "source", "system", "wait"}:
        raise Refusal(400, f"{shown(min(unknown))} is no parameter of an upload; leave it out", param=min(unknown)[:40])
    library, kind = state_of(request).library, request.headers.get("content-type", "text/plain").lower()
    if not kind.startswith(_TEXTS) or ("charset=" in kind and "utf-8" not in kind):
        raise Refusal(415, f"Content-Type {kind[:80]} is no text in UTF-8; send the text itself, as text/plain")
    if (coding := request.headers.get("content-encoding", "identity").lower()) != "identity":
        raise Refusal(415, f"Content-Encoding {coding[:40]} is not taken; send the text as it is")
    file = await run_in_threadpool(library.upload, name)
    try:
        notes = await _stored(request, file, library, text=True)
        entry = await run_in_threadpool(library.read, name, file, source=source, system=system, notes=notes)
    except BaseException:
        file.unlink(missing_ok=True)
        raise
    until = time.monotonic() + state_of(request).options.timeout
    while wait and entry.going and time.monotonic() < until:
        if await request.is_disconnected():
            raise Refusal(499, f"the client has left before context {name} was ready")
        await asyncio.sleep(_LOOK)
    if entry.state == "failed":
        raise Refusal(entry.fault, f"context {name} could not be made: {entry.message}")
    return JSONResponse(described(request, entry), 201 if entry.state == "ready" else 202)


async def _stored(request: Request, file: Path, library: Library, *, text: bool) -> dict[str, Any]:
    """Write a body, which may have to be a text, into a file as it comes; return its bytes and digest."""
    digest, decoder, size, parts = hashlib.sha256(), codecs.getincrementaldecoder("utf-8")(), 0, request.stream()
    began = time.monotonic()
    with open(file, "xb") as out:
        while True:
            left = began + STALL + size / _RATE - time.monotonic()
            try:
                part = await asyncio.wait_for(anext(parts, None), min(STALL, left))
            except asyncio.TimeoutError:
                why = f"the text stood still for {STALL:g} seconds, or came with fewer than {_RATE:,} bytes a second"
                raise Refusal(408, f"{why}; upload it again") from None
            size += len(part or b"")
            if size > library.max_upload:
                raise Refusal(
                    413,
                    f"the text has more than {library.max_upload:,} bytes; upload it in parts, or start the server "
                    "with a larger --max-upload",
                )
            try:
                decoder.decode((text and part) or b"", final=part is None)
            except UnicodeDecodeError as error:
                why = f"the text is not UTF-8 ({error.reason} before byte {size:,})"
                ways = "if it is one, convert it, for instance with `iconv -t UTF-8`; a PDF, EPUB or DOCX file goes to "
                ways += "/v1/files"
                raise Refusal(400, f"{why}; {ways}") from None
            if part is None:
                break
            digest.update(part)
            await run_in_threadpool(library.write, out, part)
    if not size:
        raise Refusal(400, "the text is empty; send the text as the body of the request")
    return {"bytes": size, "sha256": digest.hexdigest()}


@router.get("/{name}", summary="One context")
def show(request: Request, name: str) -> dict[str, Any]:
    """Return a context, with what is kept of it."""
    return described(request, state_of(request).library.find(name), look=True)


@router.delete("/{name}", summary="Delete a context, or end the reading of it")
def delete(request: Request, name: str) -> dict[str, Any]:
    """Return `{"object": "context.deleted", "name": name, "deleted": true}`. Answers that are being written go on."""
    state_of(request).library.delete(name)
    return {"object": "context.deleted", "name": name, "deleted": True}


_PARTS = {"file": {"type": "string", "format": "binary"}, "purpose": {"enum": PURPOSES}}
_FORM = {"multipart/form-data": {"schema": {"type": "object", "properties": _PARTS, "required": [*_PARTS]}}}


@files.post("", summary="Upload a document and read it", openapi_extra={"requestBody": {"content": _FORM}})
async def create(request: Request) -> dict[str, Any]:
    """Take a document (text in UTF-8, Markdown, PDF, EPUB, DOCX or HTML, as its name's ending says) and read it.

    Its id is a name made of the file's; it can be asked when its status is processed.
    """
    state, library, kind = state_of(request), state_of(request).library, request.headers.get("content-type", "")
    file, limit = await run_in_threadpool(library.upload), state.options.timeout
    try:
        await _stored(request, file, library, text=False)
        reading: Coroutine[Any, Any, dict[str, Any]] = unless_gone(
            request, converted(file, kind, limit, state.converting)
        )
        notes = await asyncio.wait_for(reading, limit)
        source = notes.pop("file")
        entry = await run_in_threadpool(lambda: library.read(_name(source, library), file, source=source, notes=notes))
    except BaseException as error:
        file.unlink(missing_ok=True)
        if not isinstance(error, asyncio.TimeoutError):
            raise
        why = f"the file takes longer than {limit:g} s (--timeout), with those before it"
        raise Refusal(408, f"{why}; convert it to plain text, or send it later") from None
    finally:
        for document in file.parent.glob(f"{file.name}.*"):
            document.unlink()
    return _as_file(request, entry)


def _name(source: str, library: Library) -> str:
    """Return a name of a context made of a file's, with a number where that is taken."""
    plain = unicodedata.normalize("NFKD", Path(source).stem).encode("ascii", "ignore").decode()
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", plain)[:60].strip("_-") or "file"
    taken = {entry.name for entry in library.entries() if entry.state != "failed"}
    return next(one for one in chain([name], (f"{name}-{nth}" for nth in count(2))) if one not in taken)


def _as_file(request: Request, entry: Entry) -> dict[str, Any]:
    return {
        "id": entry.name,
        "object": "file",
        "model": f"{state_of(request).model}:{entry.name}",
        "bytes": entry.notes.get("bytes", entry.size),
        "created_at": int(entry.created),
        "filename": entry.source,
        "purpose": entry.notes.get("purpose", PURPOSES[0]),
        "status": "uploaded" if entry.going else "processed" if entry.state == "ready" else "error",
        "status_details": entry.message or None,
    }


@files.get("", summary="All contexts, as files")
def listed_as_files(request: Request, purpose: str | None = None) -> dict[str, Any]:
    """Return all contexts, or those of a purpose, in the order of names."""
    if asked := request.query_params.keys() - {"purpose"}:
        raise Refusal(400, f"{shown(min(asked))} has no effect here; leave it out, all files are listed")
    found = [_as_file(request, one) for one in state_of(request).library.entries()]
    return {"object": "list", "data": [one for one in found if purpose in (None, one["purpose"])], "has_more": False}


@files.get("/{name}", summary="One context, as a file")
def show_as_file(request: Request, name: str) -> dict[str, Any]:
    """Return a context."""
    return _as_file(request, state_of(request).library.find(name))


@files.delete("/{name}", summary="Delete a context")
def delete_file(request: Request, name: str) -> dict[str, Any]:
    """Delete a context as `/v1/contexts` does."""
    state_of(request).library.delete(name)
    return {"id": name, "object": "file", "deleted": True}
