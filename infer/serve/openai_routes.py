"""OpenAI's routes: chats and completions, whole or as a stream of events, and the models there are."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion

from locret.base.fields import shown
from locret.engines.sampling import Sampling
from locret.engines.transformers import Written
from locret.infer.serve.answers import Asked, Piece, TimeLimit
from locret.infer.serve.prompts import Prompt
from locret.infer.serve.refusal import Refusal
from locret.infer.serve.responses import ChatForm, CompletionForm, ResponsesForm, usage
from locret.infer.serve.schemas import Body, ChatRequest, CompletionRequest, ResponsesRequest
from locret.infer.serve.state import ServerState, state_of, unless_gone

LEAST_TEMPERATURE = 1e-3
"""Below it half-precision logits would overflow; what it would draw is the likeliest token anyway."""
LONG_BODY = 1 << 16
"""Bytes of a request from which it is tokenised beside long texts, and not in front of short questions."""

router = APIRouter(prefix="/v1", responses={"4XX": {"description": "What has to change, as one sentence."}})
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


@router.post("/chat/completions", response_model=ChatCompletion)
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    """Answer a conversation, about a context if one is named."""
    return await _Work(request, body, ChatForm).respond()


@router.post("/responses")
async def responses(request: Request, body: ResponsesRequest) -> Response:
    """Answer a text or a conversation, in the newer of OpenAI's shapes."""
    return await _Work(request, body, ResponsesForm).respond()


@router.post("/completions", response_model=Completion)
async def completions(request: Request, body: CompletionRequest) -> Response:
    """Continue a text, or that of a context."""
    return await _Work(request, body, CompletionForm).respond()


@router.get("/models")
def models(request: Request) -> dict[str, Any]:
    """List the model that this server runs, and that with each context behind its name."""
    state = state_of(request)
    contexts = [f"{state.model}:{entry.name}" for entry in state.library.entries() if entry.state == "ready"]
    return {"object": "list", "data": [model(request, name) for name in (state.model, *contexts)]}


@router.get("/models/{name:path}", response_model=Model)
def model(request: Request, name: str) -> dict[str, Any]:
    """Describe the model, or the model with a context."""
    state = state_of(request)
    if name.startswith(f"{state.model}:"):
        state.library.find(name.removeprefix(f"{state.model}:"))
    else:
        _check_model(state, name)
    return {"id": name, "object": "model", "created": int(state.started), "owned_by": "locret"}


def _of_context(request: Request, body: Body) -> Body:
    """Return a request that names a context in one of OpenAI's ways, as the model smollm2:book or a file, about it."""
    served, named = state_of(request).model, {body.context} - {None}
    if body.model is not None and body.model.startswith(f"{served}:"):
        named.add(body.model.removeprefix(f"{served}:"))
        body = body.model_copy(update={"model": served})
    if not isinstance(body, CompletionRequest):
        named.update(name for message in body.messages for name in message.files)
    if len(named) > 1:
        why = f"the request names several contexts, {' and '.join(sorted(map(shown, named)))}; ask about one at a time"
        raise Refusal(400, why, param="context")
    return body.model_copy(update={"context": next(iter(named), None)})


def _check_model(state: ServerState, name: str | None) -> None:
    if name is not None and name != state.model:
        context = name.rpartition(":")[2]  # its bare name, or behind another model's
        known = any(context == entry.name for entry in state.library.entries())
        served = f"{state.model}:{context}" if known else state.model
        why = f"the model {shown(name)} is not served here; use {served!r}"
        raise Refusal(404, why, param="model", code="model_not_found")


class _Work:
    """One request from its text to the last token of its answers."""

    def __init__(self, request: Request, body: Body, form: type[ChatForm | ResponsesForm]) -> None:
        self.state, self.request, self.body = state_of(request), request, _of_context(request, body)
        self.form = form(self.state.model, body)
        count = len(body.prompts) if isinstance(body, CompletionRequest) else 1
        self.answers = [Piece(nth) for nth in range(count * body.choices)]
        self.prompts: list[Prompt] = []
        self._deadline = time.monotonic() + self.state.options.timeout
        self._left = threading.Event()

    async def respond(self) -> Response:
        """Answer the request, whole or as a stream."""
        body, pieces = self.body, self.pieces()
        _check_model(self.state, body.model)
        if body.stream_options is not None and not body.stream:
            why = "stream_options has no effect without stream; set stream to true, or leave it out"
            raise Refusal(400, why, param="stream_options")
        if body.stream:
            await unless_gone(self.request, anext(pieces))
            return StreamingResponse(self.events(pieces), media_type="text/event-stream")
        await unless_gone(self.request, _finished(pieces))
        return JSONResponse(self.form.whole(self.answers, usage(self.prompts, self.answers)))

    async def events(self, pieces: AsyncGenerator[Piece | None, None]) -> AsyncIterator[str]:
        """Yield the answers as server-sent events; what fails on the way is the last one."""
        async with aclosing(pieces):
            try:
                for chunk in self.form.opening(len(self.answers)):
                    yield _event(chunk)
                async for piece in pieces:
                    for chunk in [] if piece is None else self.form.piece(piece):
                        yield _event(chunk)
                for chunk in self.form.closing(self.answers, usage(self.prompts, self.answers)):
                    yield _event(chunk)
            except Refusal as refusal:
                yield _event(refusal.body())
                return
            except Exception:  # the status has been sent, so this is where a client can learn of it
                _log.exception("a stream broke off")
                yield _event(Refusal(500, "the server has failed; its log says why").body())
                return
        yield self.form.ending

    async def pieces(self) -> AsyncGenerator[Piece | None, None]:
        """Yield None when the prompts have been read, and then the pieces of all answers; to leave cancels them."""
        state, body = self.state, self.body
        try:
            with state.answers.place(len(self.answers)) as place:
                await self._read()
                asked = [one for prompt in self.prompts for one in self._asked(prompt)]
                yield None
                async with aclosing(state.answers.write(asked, body.stops, place, self._deadline)) as pieces:
                    async for piece in pieces:
                        self.answers[piece.choice].add(piece)
                        yield piece
        except TimeLimit:
            why = f"the request has taken {state.options.timeout:g} s, which is the most that --timeout allows"
            raise Refusal(408, f"{why}; ask for less, or again later", code="timeout") from None
        finally:
            self._left.set()

    async def _read(self) -> None:
        """Read what has to be read before the prompts can be answered."""
        long = int(self.request.headers.get("content-length", LONG_BODY)) >= LONG_BODY
        for draft in await self._within(partial(self.state.prompts.of, self.body), long=long):
            settled = partial(self.state.prompts.settled, draft, self._left.is_set)
            self.prompts.append(await self._within(settled, long=draft.long))

    async def _within(self, work: Callable[[], _T], *, long: bool) -> _T:
        """Return what blocking work returns, if it does before the time is over."""
        pool = self.state.long_work if long else self.state.short_work
        running = asyncio.get_running_loop().run_in_executor(pool, work)
        try:
            return await asyncio.wait_for(running, self._deadline - time.monotonic())
        except asyncio.TimeoutError:
            raise TimeLimit from None

    def _asked(self, prompt: Prompt) -> list[Asked]:
        """Return what begins the answers to a prompt, which loads its prefix, and whose text completions go on with."""
        body, engine, library = self.body, self.state.engine, self.state.library
        room = engine.room(prompt.units, 0 if prompt.holder is None else prompt.holder.end) - len(prompt.rest)
        most = getattr(body, body.limit) or min(self.state.options.max_new_tokens, max(room, 1))
        if most > room:
            raise Refusal(
                400,
                f"{body.limit} {most} do not fit: next to this prompt there is room for {max(room, 0)} in --kv-memory "
                f"and the backbone's {library.lm.backbone.max_positions:,} positions; ask for fewer, or give it more",
                param=body.limit,
            )
        draws = body.temperature is None and (body.choices > 1 or bool(body.top_k) or body.top_p not in (None, 1))
        temperature = 1.0 if draws else body.temperature or 0.0
        temperature = temperature if temperature >= LEAST_TEMPERATURE else 0.0
        how: dict[str, Any] = {"top_p": body.top_p or 1.0, "top_k": body.top_k or 0, "top_logprobs": body.top}
        ends = self.state.answers.ends(body.stops)

        def begin(nth: int, on_token: Callable[[Written], None]) -> Callable[[], None]:
            prefix = None if prompt.holder is None else library.stored(prompt.holder)
            seed = None if body.seed is None else (body.seed + nth) % 2**63
            way: Any = {"end_ids": ends, "sampling": Sampling(temperature=temperature, seed=seed, **how)}
            return engine.submit(prompt.rest, prefix, max_new_tokens=most, on_token=on_token, **way)

        before = prompt.rest if isinstance(body, CompletionRequest) else ()
        return [(partial(begin, nth), before) for nth in range(body.choices)]


async def _finished(pieces: AsyncGenerator[Piece | None, None]) -> None:
    async with aclosing(pieces):
        async for _ in pieces:
            pass


def _event(value: dict[str, Any]) -> str:
    named = f"event: {value['type']}\n" if "type" in value else ""
    return f"{named}data: {json.dumps(value, separators=(',', ':'))}\n\n"
